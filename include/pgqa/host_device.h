// Marks functions that run on the host and, when nvcc compiles them, on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a branch mostly sees, so that its code follows on: in a short call the GPU waits for cold instructions.
#define PGQA_LIKELY(condition) __builtin_expect(!!(condition), 1)

#ifdef __CUDACC__
#define PGQA_HOST_DEVICE __host__ __device__ inline
#else
#define PGQA_HOST_DEVICE inline
#endif
