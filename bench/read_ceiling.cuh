// What the read-only kernels share: the checksum, the grid's unit and the interface of the library.
// SPDX-License-Identifier: Apache-2.0
//
// The kernels only read the live tokens of a paged cache, as fast as the memory gives them. They make a
// shared library with C functions, for bench/read_ceiling.py. Launches are asynchronous and capturable.
// `sums` is null in timed launches; else uint32 [pgqa_read_num_sums()], zeroed by the caller, whose sum
// modulo 2^32 becomes that of all 32-bit words read. Functions that launch return a cudaError_t.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define PGQA_READ_API extern "C" __attribute__((visibility("default")))

namespace read_ceiling {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFU;
constexpr int32_t kMaxSumsPerSm = 32;

__device__ __forceinline__ uint32_t WordSum(uint4 v) { return v.x + v.y + v.z + v.w; }

// Called by whole warps. The loads are volatile, so that a null `sums` does not make them go away.
__device__ __forceinline__ void StoreSum(uint32_t* sums, int32_t slot, uint32_t sum) {
  if (sums == nullptr) return;
  sum = __reduce_add_sync(kAllLanes, sum);
  if (threadIdx.x % kWarpSize == 0) sums[slot] = sum;
}

// Of the current device; 1 where that can not be found out.
inline int32_t NumSms() {
  int device = 0;
  int num_sms = 1;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  return num_sms;
}

}  // namespace read_ceiling
