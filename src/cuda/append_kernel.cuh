// The kernel that writes new key and value rows into their page slots, turned where asked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx.cuh"
#include "pgqa/page_table.h"
#include "pgqa/types.h"
#include "pgqa/validate.h"

namespace pgqa {

constexpr int32_t kAppendThreads = 128;

// Rows of a step, [batch, heads, head_dim]; strides in bytes.
struct StepRows {
  const char* address = nullptr;
  RowStrides strides;

  __device__ const char* Row(int64_t request) const { return address + request * strides.batch; }
};

// [pages, page_size, kv_heads, head_dim]; strides in bytes.
struct CacheRows {
  char* address = nullptr;
  CacheStrides strides;
};

struct AppendParams {
  PageTableView table;
  StepRows k, v, q;  // q: null where no queries are turned
  CacheRows k_cache, v_cache;
  char* q_out = nullptr;
  RowStrides q_out_strides;  // bytes
  int32_t num_kv_heads = 0;
  int32_t num_query_heads = 0;
  int32_t head_dim = 0;
  double log2_theta = 0.0;
  double turns_scale = 0.0;  // frequency i, in turns a token: turns_scale * theta^(-2 i / head_dim)
};

// kWidth elements that are read and written at once.
template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth) ElementUnit {
  Element values[kWidth];
};

// Copies the rows of all heads; strides in bytes.
template <class Element, int kWidth>
__device__ void CopyRows(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                         int32_t num_heads, int32_t head_dim) {
  using Unit = ElementUnit<Element, kWidth>;
  const int32_t row_units = head_dim / kWidth;
  for (int32_t i = threadIdx.x; i < num_heads * row_units; i += kAppendThreads) {
    const int32_t head = i / row_units;
    const int64_t offset = int64_t{i - head * row_units} * sizeof(Unit);
    *reinterpret_cast<Unit*>(to + head * to_stride + offset) =
        *reinterpret_cast<const Unit*>(from + head * from_stride + offset);
  }
}

// The same with each pair (i, i + head_dim / 2) turned by rotations[i], (cosine, sine). In place
// too.
template <class Element, int kWidth>
__device__ void TurnRows(const char* from, int64_t from_stride, char* to, int64_t to_stride,
                         int32_t num_heads, int32_t head_dim, const float2* rotations) {
  using Unit = ElementUnit<Element, kWidth>;
  const int32_t half_units = head_dim / 2 / kWidth;
  const int64_t half_bytes = int64_t{head_dim / 2} * sizeof(Element);
  for (int32_t i = threadIdx.x; i < num_heads * half_units; i += kAppendThreads) {
    const int32_t head = i / half_units;
    const int32_t unit_idx = i - head * half_units;
    const int64_t offset = int64_t{unit_idx} * sizeof(Unit);
    const char* source = from + head * from_stride + offset;
    Unit low = *reinterpret_cast<const Unit*>(source);
    Unit high = *reinterpret_cast<const Unit*>(source + half_bytes);
#pragma unroll
    for (int32_t j = 0; j < kWidth; ++j) {
      const float2 turn = rotations[unit_idx * kWidth + j];
      const float a = static_cast<float>(low.values[j]);
      const float b = static_cast<float>(high.values[j]);
      low.values[j] = static_cast<Element>(a * turn.x - b * turn.y);
      high.values[j] = static_cast<Element>(b * turn.x + a * turn.y);
    }
    char* target = to + head * to_stride + offset;
    *reinterpret_cast<Unit*>(target) = low;
    *reinterpret_cast<Unit*>(target + half_bytes) = high;
  }
}

// Angles in fp64, reduced to a turn before they are narrowed: right at any position.
__device__ inline void FillRotations(const AppendParams& params, int64_t position,
                                     float2* rotations) {
  for (int32_t pair = threadIdx.x; pair < params.head_dim / 2; pair += kAppendThreads) {
    const double turns = static_cast<double>(position) * params.turns_scale *
                         exp2(-2.0 * pair / params.head_dim * params.log2_theta);
    sincospif(static_cast<float>(2.0 * (turns - rint(turns))), &rotations[pair].y,
              &rotations[pair].x);
  }
}

// A CTA a request. All of it leaves where the request has no token or its last page is none of the
// caches'.
template <class Element, int kWidth, bool kTurned>
__global__ void __launch_bounds__(kAppendThreads)
    AppendKernel(const __grid_constant__ AppendParams params) {
  __shared__ float2 rotations[kTurned ? kMaxGpuHeadDim / 2 : 1];
  ptx::WaitForPrecedingGrid();
  ptx::AllowDependentGrid();
  const PageTableView& table = params.table;
  const int32_t request = static_cast<int32_t>(blockIdx.x);
  const int64_t position = table.NewestPosition(request);
  if (position < 0) return;
  const int64_t page = table.PageId(table.RowBegin(request), position / table.page_size);
  if (page < 0) return;
  const int64_t token = position % table.page_size;

  const auto slot = [&](const CacheRows& cache) {
    return cache.address + page * cache.strides.page + token * cache.strides.token;
  };
  CopyRows<Element, kWidth>(params.v.Row(request), params.v.strides.head, slot(params.v_cache),
                            params.v_cache.strides.head, params.num_kv_heads, params.head_dim);
  if constexpr (kTurned) {
    FillRotations(params, position, rotations);
    __syncthreads();
    TurnRows<Element, kWidth>(params.k.Row(request), params.k.strides.head, slot(params.k_cache),
                              params.k_cache.strides.head, params.num_kv_heads, params.head_dim,
                              rotations);
    if (params.q.address == nullptr) return;
    TurnRows<Element, kWidth>(params.q.Row(request), params.q.strides.head,
                              params.q_out + request * params.q_out_strides.batch,
                              params.q_out_strides.head, params.num_query_heads, params.head_dim,
                              rotations);
  } else {
    CopyRows<Element, kWidth>(params.k.Row(request), params.k.strides.head, slot(params.k_cache),
                              params.k_cache.strides.head, params.num_kv_heads, params.head_dim);
  }
}

}  // namespace pgqa
