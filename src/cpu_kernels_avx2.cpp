// Vector kernels for AVX2, eight floats a vector.
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
#pragma GCC target("avx2,fma,f16c,bmi2")
#define PGQA_SIMD_WIDTH 8
#define PGQA_SIMD_TABLE Avx2CpuKernels
#define PGQA_SIMD_NAME "avx2"
#include "cpu_kernels.inc"
#endif
