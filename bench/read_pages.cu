// Reads whole pages by bulk copies: one producer warp and a ring of three stages in every CTA.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "bench/read_ceiling.cuh"

namespace read_ceiling {
namespace {

constexpr int32_t kNumStages = 3;
constexpr int32_t kNumConsumerWarps = 4;
constexpr int32_t kMaxCtasPerSm = kMaxSumsPerSm / kNumConsumerWarps;
constexpr int32_t kPageThreads = (1 + kNumConsumerWarps) * kWarpSize;

// Tokens [first_slot, first_slot + num_tokens) of the K and of the V cache, which lie in one page.
struct Chunk {
  int32_t first_slot;
  int32_t num_tokens;
};

struct PageReadParams {
  const char* k_cache;
  const char* v_cache;
  const Chunk* chunks;
  uint32_t* sums;
  int32_t num_chunks;
  int32_t token_bytes;
  int32_t chunk_bytes;       // the largest chunk's
  int32_t chunks_per_stage;  // 1 to 32: one for each lane of the producer

  __host__ __device__ int32_t StageBytes() const { return 2 * chunk_bytes * chunks_per_stage; }
  __host__ __device__ int32_t NumStageLoads() const {
    return (num_chunks + chunks_per_stage - 1) / chunks_per_stage;
  }
};

// full[s] completes when a stage's bytes have landed; empty[s] when every consumer warp has read them.
struct RingState {
  uint64_t full[kNumStages];
  uint64_t empty[kNumStages];
  int32_t bytes[kNumStages][kWarpSize];  // of each chunk of the stage, written by the producer
};

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void WaitParity(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void CopyBulk(void* dst, const char* src, uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(dst)),
      "l"(src), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

__device__ __forceinline__ Chunk LoadChunk(const PageReadParams& p, int32_t load, int32_t lane) {
  const int64_t chunk = static_cast<int64_t>(load) * p.chunks_per_stage + lane;
  return lane < p.chunks_per_stage && chunk < p.num_chunks ? p.chunks[chunk] : Chunk{0, 0};
}

// One warp: each lane copies one chunk of K and of V into each stage.
__device__ void ProducePages(const PageReadParams& p, RingState& state, char* ring) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t num_loads = p.NumStageLoads();
  const int32_t stride = gridDim.x;
  Chunk next = LoadChunk(p, blockIdx.x, lane);
  for (int32_t load = blockIdx.x, i = 0; load < num_loads; load += stride, ++i) {
    const Chunk chunk = next;
    if (load + stride < num_loads) next = LoadChunk(p, load + stride, lane);
    const int32_t stage = i % kNumStages;
    // The first round passes: a fresh barrier's preceding phase, parity 1, counts as complete.
    WaitParity(&state.empty[stage], (i / kNumStages + 1) % 2);
    const int32_t bytes = chunk.num_tokens * p.token_bytes;
    const int32_t total = 2 * __reduce_add_sync(kAllLanes, bytes);
    state.bytes[stage][lane] = bytes;
    __syncwarp();
    if (lane == 0) ArriveExpecting(&state.full[stage], total);
    __syncwarp();
    if (bytes == 0) continue;
    const int64_t offset = static_cast<int64_t>(chunk.first_slot) * p.token_bytes;
    char* dst = ring + static_cast<int64_t>(stage) * p.StageBytes() +
                static_cast<int64_t>(lane) * 2 * p.chunk_bytes;
    CopyBulk(dst, p.k_cache + offset, bytes, &state.full[stage]);
    CopyBulk(dst + p.chunk_bytes, p.v_cache + offset, bytes, &state.full[stage]);
  }
}

// The other warps: add up every word that has landed.
__device__ uint32_t ConsumePages(const PageReadParams& p, RingState& state, const char* ring) {
  const int32_t thread = threadIdx.x - kWarpSize;
  const int32_t num_loads = p.NumStageLoads();
  uint32_t sum = 0;
  for (int32_t load = blockIdx.x, i = 0; load < num_loads; load += gridDim.x, ++i) {
    const int32_t stage = i % kNumStages;
    WaitParity(&state.full[stage], (i / kNumStages) % 2);
    const char* stage_begin = ring + static_cast<int64_t>(stage) * p.StageBytes();
    for (int32_t half = 0; half < 2 * p.chunks_per_stage; ++half) {
      const uint4* words =
          reinterpret_cast<const uint4*>(stage_begin + static_cast<int64_t>(half) * p.chunk_bytes);
      const int32_t num_words = state.bytes[stage][half / 2] / 16;
      for (int32_t w = thread; w < num_words; w += kNumConsumerWarps * kWarpSize)
        sum += WordSum(words[w]);
    }
    __syncwarp();
    if (thread % kWarpSize == 0) Arrive(&state.empty[stage]);
  }
  return sum;
}

__global__ void __launch_bounds__(kPageThreads) ReadPages(const PageReadParams p) {
  extern __shared__ __align__(128) char ring[];
  __shared__ RingState state;
  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < kNumStages; ++stage) {
      InitBarrier(&state.full[stage], 1);
      InitBarrier(&state.empty[stage], kNumConsumerWarps);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int32_t warp = threadIdx.x / kWarpSize;
  if (warp == 0) {
    ProducePages(p, state, ring);
  } else {
    StoreSum(p.sums, blockIdx.x * kNumConsumerWarps + warp - 1, ConsumePages(p, state, ring));
  }
}

}  // namespace
}  // namespace read_ceiling

// Entries of `sums` that any kernel may write.
PGQA_READ_API int32_t pgqa_read_num_sums() {
  return read_ceiling::NumSms() * read_ceiling::kMaxSumsPerSm;
}

PGQA_READ_API const char* pgqa_read_error_text(int32_t status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

// chunks: Chunk [num_chunks] on the device. token_bytes (all KV heads of a token) is a multiple of 16;
// chunk_bytes is that of the largest chunk; ctas_per_sm at most 8.
PGQA_READ_API int32_t pgqa_read_pages(const void* k_cache, const void* v_cache, const void* chunks,
                                      int32_t num_chunks, int32_t token_bytes, int32_t chunk_bytes,
                                      int32_t chunks_per_stage, int32_t ctas_per_sm, void* sums,
                                      void* stream) {
  using namespace read_ceiling;
  if (num_chunks < 1 || token_bytes < 16 || token_bytes % 16 != 0 || chunk_bytes < token_bytes ||
      chunks_per_stage < 1 || chunks_per_stage > kWarpSize || ctas_per_sm < 1 ||
      ctas_per_sm > kMaxCtasPerSm) {
    return cudaErrorInvalidValue;
  }
  const PageReadParams params{static_cast<const char*>(k_cache),
                              static_cast<const char*>(v_cache),
                              static_cast<const Chunk*>(chunks),
                              static_cast<uint32_t*>(sums),
                              num_chunks,
                              token_bytes,
                              chunk_bytes,
                              chunks_per_stage};
  const int32_t ring_bytes = kNumStages * params.StageBytes();
  const cudaError_t status =
      cudaFuncSetAttribute(ReadPages, cudaFuncAttributeMaxDynamicSharedMemorySize, ring_bytes);
  if (status != cudaSuccess) return status;
  const int32_t grid = std::min(params.NumStageLoads(), NumSms() * ctas_per_sm);
  ReadPages<<<grid, kPageThreads, ring_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return cudaGetLastError();
}
