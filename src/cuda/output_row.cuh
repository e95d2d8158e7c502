// One row of an output, merged from partials by a warp, and where its columns go.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention_params.h"
#include "cuda/element.cuh"
#include "cuda/row_window.cuh"
#include "pgqa/softmax_state.h"

namespace pgqa {

// Maximum and sum over each run of kLanes lanes, a power of two, in every lane.
template <int kLanes>
__device__ __forceinline__ float LaneMax(float value) {
#pragma unroll
  for (int32_t offset = 1; offset < kLanes; offset *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

template <int kLanes>
__device__ __forceinline__ float LaneSum(float value) {
#pragma unroll
  for (int32_t offset = 1; offset < kLanes; offset *= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// Output row of a query head, and which of its columns a run of padded columns is: the halves of a row are padded
// apart, and a run lies in one of them.
template <class Traits>
struct OutputColumns {
  __device__ __forceinline__ OutputColumns(const AttentionParams& params, int32_t request,
                                           int32_t head, int32_t padded_column) {
    const int32_t half_dim = params.head_dim / 2;
    const int32_t half = padded_column / (Traits::kHeadDim / 2);
    const int32_t in_half = padded_column - half * (Traits::kHeadDim / 2);
    row = static_cast<int64_t>(request) * params.num_query_heads + head;
    address = params.out + (row * params.head_dim + half * half_dim + in_half) * 2;
    num_valid = half_dim - in_half;
  }

  int64_t row;
  char* address;      // of the first column
  int32_t num_valid;  // columns from there on that are no padding; a multiple of 4
};

// One row of a merged output: lane l holds columns [l * kColumns, + kColumns).
template <class Traits>
struct OutputRow {
  static_assert(Traits::kTile.MergeAreaBytes() <= Traits::kTile.StageBytes());
  static constexpr int kColumns = Traits::kHeadDim / kWarpSize;
  static constexpr int kRowFloats = Traits::kTile.PartialFloats();

  // A lane's columns of one partial row.
  struct Values {
    alignas(kColumns == 2 ? 8 : 16) float column[kColumns];

    __device__ __forceinline__ void Load(const float* row) {
      using Word = std::conditional_t<kColumns == 2, float2, float4>;
      const Word* words = reinterpret_cast<const Word*>(row + threadIdx.x % kWarpSize * kColumns);
#pragma unroll
      for (int32_t i = 0; i < kColumns * 4 / static_cast<int32_t>(sizeof(Word)); ++i) {
        *reinterpret_cast<Word*>(column + i * (sizeof(Word) / 4)) = words[i];
      }
    }
  };

  float value[kColumns] = {};
  SoftmaxState state;

  // Merges `num_rows` partial rows [padded head_dim values, maximum, sum, unused, unused], `stride` bytes
  // apart in shared or global memory, in order; kBatch of them are in flight at a time. Lane l weighs row
  // l % kBatch of a batch.
  template <int kBatch>
  __device__ __forceinline__ void Merge(const float* rows, uint32_t stride, int32_t num_rows) {
    const auto row = [&](uint32_t index) {
      return reinterpret_cast<const float*>(reinterpret_cast<const char*>(rows) +
                                            uint64_t{index} * stride);
    };
#pragma unroll 1
    for (int32_t first = 0; first < num_rows; first += kBatch, rows = row(kBatch)) {
      const uint32_t last = min(kBatch, num_rows - first) - 1;
      const uint32_t own = threadIdx.x % kBatch;
      SoftmaxState partial;
      if (own <= last) {
        const float2 loaded = *reinterpret_cast<const float2*>(row(own) + Traits::kHeadDim);
        partial = {loaded.x, loaded.y};
      }
      Values values[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) values[i].Load(row(min(i, last)));
      const float max = fmaxf(state.max, LaneMax<kBatch>(partial.max));
      const float weight = Rescale(partial.max, max);
      Scale(Rescale(state.max, max));
      state.max = max;
      state.sum += LaneSum<kBatch>(partial.sum * weight);
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) Add(values[i], __shfl_sync(kFullWarp, weight, i));
    }
  }

  __device__ __forceinline__ void Scale(float factor) {
    state.sum *= factor;
#pragma unroll
    for (int32_t i = 0; i < kColumns; ++i) value[i] *= factor;
  }

  __device__ __forceinline__ void Add(const Values& values, float weight) {
#pragma unroll
    for (int32_t i = 0; i < kColumns; ++i) value[i] += values.column[i] * weight;
  }

  __device__ __forceinline__ void StorePartial(float* row) const {
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int32_t i = 0; i < kColumns; i += 2) {
      *reinterpret_cast<float2*>(row + lane * kColumns + i) = make_float2(value[i], value[i + 1]);
    }
    if (lane == 0)
      *reinterpret_cast<float2*>(row + Traits::kHeadDim) = make_float2(state.max, state.sum);
  }

  // Writes the normalised row and its LSE.
  __device__ __forceinline__ void StoreOutput(const AttentionParams& params, int32_t request,
                                              int32_t head) const {
    const int32_t lane = threadIdx.x % kWarpSize;
    const OutputColumns<Traits> columns(params, request, head, lane * kColumns);
    uint32_t* out = reinterpret_cast<uint32_t*>(columns.address);
    const float scale = OutputScale(state);
#pragma unroll
    for (int32_t i = 0; i < kColumns; i += 2) {
      if (i < columns.num_valid) {
        out[i / 2] = Pack<typename Traits::Element>(value[i] * scale, value[i + 1] * scale);
      }
    }
    if (params.lse != nullptr && lane == 0) params.lse[columns.row] = LogSumExp(state);
  }
};

}  // namespace pgqa
