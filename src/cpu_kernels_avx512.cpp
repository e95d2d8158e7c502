// Vector kernels for AVX-512, sixteen floats a vector.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_kernels.h"

#ifdef PGQA_X86_CPU_KERNELS
#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

// After every other header, so that only the kernels are compiled for these instructions.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
#define PGQA_SIMD_WIDTH 16
#define PGQA_SIMD_TABLE Avx512CpuKernels
#define PGQA_SIMD_NAME "avx512"
#include "cpu_kernels.inc"
#endif
