// Reads the rows of one KV head by plain 16-byte loads, 16 tokens at a time.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "bench/read_ceiling.cuh"

namespace read_ceiling {
namespace {

constexpr int32_t kRowThreads = 256;
constexpr int32_t kRowWarps = kRowThreads / kWarpSize;
constexpr int32_t kRowCtasPerSm = 4;
static_assert(kRowCtasPerSm * kRowWarps <= kMaxSumsPerSm);
constexpr int32_t kTileTokens = 16;
constexpr int32_t kLoadsInFlight = 8;      // of 16 bytes, a lane
constexpr int32_t kMaxRowItems = 1 << 27;  // tiles x heads, so that indices stay in int32

struct RowReadParams {
  const char* k_cache;
  const char* v_cache;
  const int32_t* slots;  // [num_tiles * kTileTokens], -1 past the end
  uint32_t* sums;
  int32_t num_tiles;
  int32_t kv_heads;
};

__device__ __forceinline__ uint4 LoadOnce(const char* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// One warp: K and V rows of one head over one tile. Lane l < 16 holds the row of token l, or -1.
template <int kRowBytes>
__device__ __forceinline__ uint32_t ReadTile(const RowReadParams& p, int32_t lane_row) {
  constexpr int32_t kRowWords = kRowBytes / 16;
  constexpr int32_t kCacheLoads = kTileTokens * kRowWords / kWarpSize;  // a lane
  constexpr int32_t kNumLoads = 2 * kCacheLoads;
  constexpr int32_t kBatch = kNumLoads % kLoadsInFlight == 0 ? kLoadsInFlight : kCacheLoads;
  static_assert(kNumLoads % kBatch == 0 && kTileTokens * kRowWords % kWarpSize == 0);
  const int32_t lane = threadIdx.x % kWarpSize;
  uint32_t sum = 0;
#pragma unroll 1
  for (int32_t begin = 0; begin < kNumLoads; begin += kBatch) {
    uint4 values[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t word = (begin + i) % kCacheLoads * kWarpSize + lane;
      const int64_t row = __shfl_sync(kAllLanes, lane_row, word / kRowWords);
      const char* cache = begin + i < kCacheLoads ? p.k_cache : p.v_cache;
      values[i] = uint4{0, 0, 0, 0};
      if (row >= 0) values[i] = LoadOnce(cache + row * kRowBytes + word % kRowWords * 16);
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) sum += WordSum(values[i]);
  }
  return sum;
}

template <int kRowBytes>
__global__ void __launch_bounds__(kRowThreads, kRowCtasPerSm) ReadRows(const RowReadParams p) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t warp = blockIdx.x * kRowWarps + threadIdx.x / kWarpSize;
  const int32_t num_items = p.num_tiles * p.kv_heads;
  const int32_t stride = gridDim.x * kRowWarps;
  const auto load_slot = [&](int32_t item) {
    const int32_t tile = item / p.kv_heads;
    return lane < kTileTokens && item < num_items ? p.slots[tile * kTileTokens + lane] : -1;
  };
  int32_t next = load_slot(warp);
  uint32_t sum = 0;
  for (int32_t item = warp; item < num_items; item += stride) {
    const int32_t slot = next;
    next = load_slot(item + stride);
    sum += ReadTile<kRowBytes>(p, slot < 0 ? -1 : slot * p.kv_heads + item % p.kv_heads);
  }
  StoreSum(p.sums, warp, sum);
}

template <int kRowBytes>
cudaError_t LaunchRows(const RowReadParams& params, cudaStream_t stream) {
  const int32_t wanted = (params.num_tiles * params.kv_heads + kRowWarps - 1) / kRowWarps;
  const int32_t grid = std::min(wanted, NumSms() * kRowCtasPerSm);
  ReadRows<kRowBytes><<<grid, kRowThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace
}  // namespace read_ceiling

// slots: int32 [num_tiles * 16] on the device; row_bytes (one KV head of a token) is 128, 192, 256 or
// 512. Rows are counted in int32: slots x kv_heads < 2^31.
PGQA_READ_API int32_t pgqa_read_rows(const void* k_cache, const void* v_cache, const void* slots,
                                     int32_t num_tiles, int32_t kv_heads, int32_t row_bytes,
                                     void* sums, void* stream) {
  using namespace read_ceiling;
  if (num_tiles < 1 || kv_heads < 1 || num_tiles > kMaxRowItems / kv_heads) {
    return cudaErrorInvalidValue;
  }
  const RowReadParams params{static_cast<const char*>(k_cache),
                             static_cast<const char*>(v_cache),
                             static_cast<const int32_t*>(slots),
                             static_cast<uint32_t*>(sums),
                             num_tiles,
                             kv_heads};
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (row_bytes) {
    case 128:
      return LaunchRows<128>(params, cuda_stream);
    case 192:
      return LaunchRows<192>(params, cuda_stream);
    case 256:
      return LaunchRows<256>(params, cuda_stream);
    case 512:
      return LaunchRows<512>(params, cuda_stream);
    default:
      return cudaErrorInvalidValue;
  }
}
