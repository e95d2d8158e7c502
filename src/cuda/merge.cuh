// Merging: the warps of a team in shared memory, then the workers of a request by the last to arrive.
// SPDX-License-Identifier: Apache-2.0
//
// A team is the warps of a CTA that share a head. Everything merges in index order, so the bits do not depend
// on timing. The counter of a split request belongs to the worker of its first piece; it wraps back to zero
// with the last arrival, so a launch leaves all counters as it found them.
#pragma once

#include <cstdint>

#include "cuda/accumulator.cuh"
#include "cuda/attention_params.h"
#include "cuda/element.cuh"
#include "cuda/stage_loader.cuh"
#include "pgqa/softmax_state.h"

namespace pgqa {

// One row of a merged output: lane l holds columns [l * kColumns, + kColumns).
template <class Traits>
struct OutputRow {
  static_assert(kMergeRows * Traits::kTile.PartialFloats() * 4 <= Traits::kTile.StageBytes());
  static constexpr int kColumns = Traits::kHeadDim / kWarpSize;
  static constexpr int kRowFloats = Traits::kTile.PartialFloats();

  float value[kColumns] = {};
  SoftmaxState state;

  // Merges `num_rows` partial rows [padded head_dim values, maximum, sum, unused, unused], `stride` floats
  // apart in shared or global memory, in order; a batch of them is in flight at a time.
  __device__ __forceinline__ void Merge(const float* rows, int64_t stride, int32_t num_rows) {
    constexpr int32_t kBatch = 32 / kColumns;
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int32_t first = 0; first < num_rows; first += kBatch) {
      float2 values[kBatch][kColumns / 2];
      float2 states[kBatch];
      float max = state.max;
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        states[i] = *reinterpret_cast<const float2*>(rows + Traits::kHeadDim);
#pragma unroll
        for (int32_t c = 0; c < kColumns / 2; ++c) {
          values[i][c] = reinterpret_cast<const float2*>(rows + lane * kColumns)[c];
        }
        if (first + i + 1 < num_rows) rows += stride;
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) max = fmaxf(max, states[i].x);
      Scale(Rescale(state.max, max));
      state.max = max;
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const float weight = first + i < num_rows ? Rescale(states[i].x, max) : 0.0F;
        state.sum += states[i].y * weight;
#pragma unroll
        for (int32_t c = 0; c < kColumns / 2; ++c) {
          value[2 * c] += values[i][c].x * weight;
          value[2 * c + 1] += values[i][c].y * weight;
        }
      }
    }
  }

  __device__ __forceinline__ void Scale(float factor) {
    state.sum *= factor;
#pragma unroll
    for (int32_t i = 0; i < kColumns; ++i) value[i] *= factor;
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

  // Writes the normalised row and its LSE. The padded columns of a lane lie in one half of the row.
  __device__ __forceinline__ void StoreOutput(const AttentionParams& params, int32_t request,
                                              int32_t head) const {
    const int32_t lane = threadIdx.x % kWarpSize;
    const int32_t half_dim = params.head_dim / 2;
    const int32_t half = lane / (kWarpSize / 2);
    const int32_t in_half = lane * kColumns - half * (Traits::kHeadDim / 2);
    const int64_t row = static_cast<int64_t>(request) * params.num_query_heads + head;
    uint32_t* out = reinterpret_cast<uint32_t*>(
        params.out + (row * params.head_dim + half * half_dim + in_half) * 2);
    const float scale = OutputScale(state);
#pragma unroll
    for (int32_t i = 0; i < kColumns; i += 2) {
      if (in_half + i < half_dim) {
        out[i / 2] = Pack<typename Traits::Element>(value[i] * scale, value[i + 1] * scale);
      }
    }
    if (params.lse != nullptr && lane == 0) params.lse[row] = LogSumExp(state);
  }
};

// The query heads that one team works on, and where their partials go.
struct TeamTarget {
  int32_t request = 0;
  int32_t first_head = 0;  // query head of row 0
  int32_t num_rows = 0;
  bool is_whole = true;
  int32_t num_pieces = 1;           // of the request
  float* own_partials = nullptr;    // row 0 of this worker's slot
  float* first_partials = nullptr;  // row 0 of the request's first slot
  int64_t slot_floats = 0;          // from slot to slot
  uint32_t* counter = nullptr;
};

__device__ __forceinline__ void TeamBarrier(const WarpRole& role) {
  if (role.team_size == 1) {
    __syncwarp();
  } else {
    ptx::NamedBarrier(1 + role.team, role.team_size * kWarpSize);
  }
}

// Copies rows [8 * set, + 8) of a warp's accumulator to its merge area.
template <class Traits, int kSet>
__device__ __forceinline__ void StageRows(const Accumulator<Traits>& acc, float* area) {
  const int32_t lane = threadIdx.x % kWarpSize;
  float* row = area + lane / 4 * Traits::kTile.PartialFloats();
  const int32_t first_column = lane % 4 * 16;
#pragma unroll
  for (int32_t block = 0; block < Traits::kValueBlocks; ++block) {
#pragma unroll
    for (int32_t i = 0; i < 16; i += 4) {
      const int32_t t = block * 8 + i % 8;
      const int32_t c = 2 * kSet + i / 8;
      *reinterpret_cast<float4*>(row + block * 64 + first_column + i) =
          make_float4(acc.out[t][c], acc.out[t + 1][c], acc.out[t + 2][c], acc.out[t + 3][c]);
    }
  }
  if (lane % 4 == 0) {
    *reinterpret_cast<float2*>(row + Traits::kHeadDim) = make_float2(acc.max[kSet], acc.sum[kSet]);
  }
}

// Merges one round of staged rows over the warps of the team; writes outputs or this worker's partials.
// `areas` is the merge area of the team's first warp; the others' follow a ring apart, in rank order.
template <class Traits>
__device__ __forceinline__ void MergeTeamRows(const AttentionParams& params, const WarpRole& role,
                                              const TeamTarget& target, int32_t first_row,
                                              const float* areas) {
  using Row = OutputRow<Traits>;
  constexpr int32_t kAreaFloats = Traits::kTile.RingBytes() / 4;
  const int32_t end = min(target.num_rows - first_row, kMergeRows);
#pragma unroll 1
  for (int32_t r = role.rank; r < end; r += role.team_size) {
    Row merged;
    merged.Merge(areas + r * Row::kRowFloats, kAreaFloats, role.team_size);
    if (target.is_whole) {
      merged.StoreOutput(params, target.request, target.first_head + first_row + r);
    } else {
      merged.StorePartial(target.own_partials + (first_row + r) * Row::kRowFloats);
    }
  }
}

// Merges the partials of a split request, in slot order.
template <class Traits>
__device__ __forceinline__ void MergeSlots(const AttentionParams& params, const WarpRole& role,
                                           const TeamTarget& target) {
  using Row = OutputRow<Traits>;
#pragma unroll 1
  for (int32_t r = role.rank; r < target.num_rows; r += role.team_size) {
    Row merged;
    merged.Merge(target.first_partials + r * Row::kRowFloats, target.slot_floats,
                 target.num_pieces);
    merged.StoreOutput(params, target.request, target.first_head + r);
  }
}

// True for the team that brings the request's last partial. Called after a barrier of the team: together with the
// counter's release and acquire it orders the partials of all teams before what follows.
__device__ __forceinline__ bool ArriveLast(const WarpRole& role, const TeamTarget& target,
                                           int32_t* flag) {
  if (role.rank == 0 && threadIdx.x % kWarpSize == 0) {
    const uint32_t last = target.num_pieces - 1;
    *flag = ptx::IncrementWrapped(target.counter, last) == last;
  }
  TeamBarrier(role);
  return *flag != 0;
}

template <class Traits, int kSet>
__device__ __forceinline__ void FinishRowSets(const AttentionParams& params, const WarpRole& role,
                                              const TeamTarget& target,
                                              const Accumulator<Traits>& acc, float* areas) {
  if constexpr (kSet < Traits::kRowSets) {
    if (kSet * kMergeRows >= target.num_rows) return;
    StageRows<Traits, kSet>(acc, areas + role.rank * (Traits::kTile.RingBytes() / 4));
    TeamBarrier(role);
    MergeTeamRows<Traits>(params, role, target, kSet * kMergeRows, areas);
    TeamBarrier(role);
    FinishRowSets<Traits, kSet + 1>(params, role, target, acc, areas);
  }
}

// Ends a piece: the team's warps merge; then the output, or this worker's partial and, if it is the last of
// its request, the merge over workers.
template <class Traits>
__device__ __forceinline__ void FinishPiece(const AttentionParams& params, const WarpRole& role,
                                            const TeamTarget& target, Accumulator<Traits>& acc,
                                            float* areas, int32_t* flag) {
  acc.Finish();
  __syncwarp();  // the stage that `areas` lies in has been read
  FinishRowSets<Traits, 0>(params, role, target, acc, areas);
  if (target.is_whole) return;
  if (ArriveLast(role, target, flag)) MergeSlots<Traits>(params, role, target);
}

}  // namespace pgqa
