// Named wrappers of the PTX instructions that the kernels use.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pgqa::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes (8 or 16) to shared memory asynchronously; only the first `valid_bytes` (0 or kBytes) are
// read, the rest is zero-filled. For data that is read once: it leaves the L2 first, which spares large batches 1 to
// 3 % (H200).
template <int kBytes>
__device__ __forceinline__ void CopyAsync(uint32_t dst, const void* src, int32_t valid_bytes) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  if constexpr (kBytes == 16) {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(dst),
        "l"(src), "r"(valid_bytes), "l"(policy));
  } else {
    asm volatile(
        "cp.async.ca.shared.global.L2::cache_hint.L2::128B [%0], [%1], 8, %2, %3;" ::"r"(dst),
        "l"(src), "r"(valid_bytes), "l"(policy));
  }
}

// Copies a word likewise and has the L2 fetch the 256 bytes around it.
__device__ __forceinline__ void CopyWordAsync(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global.L2::256B [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending committed groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void Prefetch(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Barrier of num_threads threads (a multiple of 32); ids 1 to 15, 0 is __syncthreads().
__device__ __forceinline__ void NamedBarrier(int32_t id, int32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Atomics that return the old value, acquire and release at device scope.
__device__ __forceinline__ uint64_t Add(uint64_t* address, uint64_t value) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(address), "l"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ uint64_t CompareAndSwap(uint64_t* address, uint64_t expected,
                                                   uint64_t desired) {
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(address), "l"(expected), "l"(desired)
               : "memory");
  return old;
}

// Waits for the grid that this one programmatically depends on, where a launch or a graph edge says so; returns at
// once otherwise.
__device__ __forceinline__ void WaitForPrecedingGrid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the grid that programmatically depends on this one be launched, once every CTA has come here or ended.
__device__ __forceinline__ void AllowDependentGrid() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c[16x8] += a[16x16] b[16x8], fp32 accumulation. Lane (g, j) = (lane / 4, lane % 4) holds a: rows g, g + 8 of
// columns 2j.. and 2j + 8..; b: rows 2j.. and 2j + 8.. of column g; c: rows g, g + 8 of columns 2j, 2j + 1.
template <class Element>
__device__ __forceinline__ void Mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

}  // namespace pgqa::ptx
