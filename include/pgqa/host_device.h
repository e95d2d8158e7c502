// Marks functions that run on the host and, when nvcc compiles them, on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#ifdef __CUDACC__
#define PGQA_HOST_DEVICE __host__ __device__ inline
#else
#define PGQA_HOST_DEVICE inline
#endif
