// Outputs of requests without tokens, which own no tile.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/row_window.cuh"

namespace pgqa {

// Output 0 and LSE -inf for one request, by a warp.
__device__ __forceinline__ void WriteEmptyRequest(const AttentionParams& params, int32_t request) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int64_t row_elements = static_cast<int64_t>(params.num_query_heads) * params.head_dim;
  uint4* out = reinterpret_cast<uint4*>(params.out + request * row_elements * 2);
  for (int32_t i = lane; i < row_elements / 8; i += kWarpSize) out[i] = make_uint4(0, 0, 0, 0);
  if (params.lse == nullptr) return;
  float* lse = params.lse + static_cast<int64_t>(request) * params.num_query_heads;
  for (int32_t head = lane; head < params.num_query_heads; head += kWarpSize) lse[head] = -INFINITY;
}

// Empty requests own no tile; their outputs are written here, each by one warp. Neighbouring requests go to
// different CTAs; a warp looks at 32 of its requests at a time.
__device__ __forceinline__ void WriteEmptyRequests(const AttentionParams& params) {
  const auto num_ctas = static_cast<int32_t>(gridDim.x);
  const auto num_warps = static_cast<int32_t>(blockDim.x) / kWarpSize;
  const int32_t warp = threadIdx.x / kWarpSize;
  const int32_t lane = threadIdx.x % kWarpSize;
  for (int32_t base = 0; base < params.table.batch; base += num_ctas * num_warps * kWarpSize) {
    const int32_t own = base + static_cast<int32_t>(blockIdx.x) + num_ctas * warp;
    const int32_t request = own + num_ctas * num_warps * lane;
    const bool is_empty =
        request < params.table.batch && params.table.KvLength<int64_t>(request) == 0;
    for (uint32_t left = __ballot_sync(kFullWarp, is_empty); left != 0; left &= left - 1) {
      const int32_t found = __ffs(static_cast<int32_t>(left)) - 1;
      WriteEmptyRequest(params, own + num_ctas * num_warps * found);
    }
  }
}

}  // namespace pgqa
