// Vector kernels for the baseline instruction set of the target, four floats a vector.
// SPDX-License-Identifier: Apache-2.0
#define PGQA_SIMD_WIDTH 4
#define PGQA_SIMD_TABLE BaseCpuKernels
#define PGQA_SIMD_NAME "base"
#include "cpu_kernels.inc"
