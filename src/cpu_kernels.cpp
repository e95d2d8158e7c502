// Chooses the vector kernels that this machine can run.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_kernels.h"

namespace pgqa {

#ifdef PGQA_X86_CPU_KERNELS

bool IsRunnable(const CpuKernels& kernels) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (&kernels == &Avx2CpuKernels()) return avx2;
  if (&kernels == &Avx512CpuKernels()) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  return true;
}

const CpuKernels& BestCpuKernels() {
  static const CpuKernels& best = IsRunnable(Avx512CpuKernels()) ? Avx512CpuKernels()
                                  : IsRunnable(Avx2CpuKernels()) ? Avx2CpuKernels()
                                                                 : BaseCpuKernels();
  return best;
}

#else

bool IsRunnable(const CpuKernels&) { return true; }
const CpuKernels& BestCpuKernels() { return BaseCpuKernels(); }

#endif

}  // namespace pgqa
