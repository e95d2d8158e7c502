// Merging: the warps of a team in shared memory, then the workers of a request by the last to arrive.
// SPDX-License-Identifier: Apache-2.0
//
// A team is the warps of a CTA that share a head. Everything merges in index order, so the bits do not depend
// on timing. Of each eight rows a warp merges rank, rank + team_size, ... in every worker alike, so that it waits
// for the same warp of the other workers alone: the counters of a split request, one a warp, belong to the worker of
// its first piece, or to its first slot where pieces are segments.
#pragma once

#include <cstdint>

#include "cuda/accumulator.cuh"
#include "cuda/arrival.cuh"
#include "cuda/attention_params.h"
#include "cuda/element.cuh"
#include "cuda/output_row.cuh"
#include "cuda/stage_loader.cuh"
#include "pgqa/softmax_state.h"

namespace pgqa {

// The query heads that one team works on, and where their partials go.
struct TeamTarget {
  int32_t request = 0;
  int32_t first_head = 0;  // query head of row 0
  int32_t num_rows = 0;
  bool is_whole = true;
  int32_t num_pieces = 1;           // of the request
  float* own_partials = nullptr;    // row 0 of this worker's slot
  float* first_partials = nullptr;  // row 0 of the request's first slot
  uint32_t slot_bytes = 0;          // from slot to slot
  uint64_t* counter = nullptr;      // of this warp
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
// `areas` is the merge area of the team's first warp; the others' follow in rank order, MergeAreaPitch() apart.
template <class Traits>
__device__ __forceinline__ void MergeTeamRows(const AttentionParams& params, const WarpRole& role,
                                              const TeamTarget& target, int32_t first_row,
                                              const float* areas) {
  using Row = OutputRow<Traits>;
  const int32_t end = min(target.num_rows - first_row, kMergeRows);
#pragma unroll 1
  for (int32_t r = role.rank; r < end; r += role.team_size) {
    Row merged;
    merged.template Merge<Traits::kTile.max_warps>(areas + r * Row::kRowFloats,
                                                   Traits::kTile.MergeAreaPitch(), role.team_size);
    if (target.is_whole) {
      merged.StoreOutput(params, target.request, target.first_head + first_row + r);
    } else {
      merged.StorePartial(target.own_partials + (first_row + r) * Row::kRowFloats);
    }
  }
}

// True for the warp that brings the last partial of its rows; the partials of all workers are then to be read.
__device__ __forceinline__ bool ArriveLast(const TeamTarget& target) {
  bool is_last = false;
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) is_last = Arrive(target.counter, target.num_pieces);
  __syncwarp();
  return __any_sync(kFullWarp, is_last);
}

// Merges this warp's rows of a split request, in slot order. With one axis a head group of 8, a request of any
// length has 16 slots at most; in segments as many as it has of them.
template <class Traits>
__device__ __forceinline__ void MergeSlots(const AttentionParams& params, const WarpRole& role,
                                           const TeamTarget& target) {
  using Row = OutputRow<Traits>;
  constexpr int32_t kSlotsInFlight = Row::kColumns <= 4 ? 16 : 8;
#pragma unroll 1
  for (int32_t set = 0; set < target.num_rows; set += kMergeRows) {
    const int32_t end = min(target.num_rows, set + kMergeRows);
#pragma unroll 1
    for (int32_t r = set + role.rank; r < end; r += role.team_size) {
      Row merged;
      merged.template Merge<kSlotsInFlight>(target.first_partials + r * Row::kRowFloats,
                                            target.slot_bytes, target.num_pieces);
      merged.StoreOutput(params, target.request, target.first_head + r);
    }
  }
}

template <class Traits, int kSet>
__device__ __forceinline__ void FinishRowSets(const AttentionParams& params, const WarpRole& role,
                                              const TeamTarget& target,
                                              const Accumulator<Traits>& acc, float* areas) {
  if constexpr (kSet < Traits::kRowSets) {
    if (kSet * kMergeRows >= target.num_rows) return;
    StageRows<Traits, kSet>(acc, areas + role.rank * (Traits::kTile.MergeAreaPitch() / 4));
    TeamBarrier(role);
    MergeTeamRows<Traits>(params, role, target, kSet * kMergeRows, areas);
    TeamBarrier(role);
    FinishRowSets<Traits, kSet + 1>(params, role, target, acc, areas);
  }
}

// Writes the outputs of a team of one warp from its registers. Lane (g, j) holds, of row g of a set, columns
// 64 b + 16 j + i, 0 <= i < 16, of each block b.
template <class Traits, int kSet>
__device__ __forceinline__ void WriteOutputs(const AttentionParams& params,
                                             const TeamTarget& target,
                                             const Accumulator<Traits>& acc) {
  using Element = typename Traits::Element;
  if constexpr (kSet < Traits::kRowSets) {
    const int32_t lane = threadIdx.x % kWarpSize;
    const int32_t row = kSet * kMergeRows + lane / 4;
    const SoftmaxState state{acc.max[kSet], acc.sum[kSet]};
    const float scale = OutputScale(state);
#pragma unroll
    for (int32_t block = 0; row < target.num_rows && block < Traits::kValueBlocks; ++block) {
      const OutputColumns<Traits> columns(params, target.request, target.first_head + row,
                                          block * 64 + lane % 4 * 16);
      uint2* out = reinterpret_cast<uint2*>(columns.address);
#pragma unroll
      for (int32_t i = 0; i < 16; i += 4) {
        const int32_t t = block * 8 + i % 8;
        const int32_t c = 2 * kSet + i / 8;
        if (i < columns.num_valid) {
          out[i / 4] =
              make_uint2(Pack<Element>(acc.out[t][c] * scale, acc.out[t + 1][c] * scale),
                         Pack<Element>(acc.out[t + 2][c] * scale, acc.out[t + 3][c] * scale));
        }
      }
      if (block == 0 && lane % 4 == 0 && params.lse != nullptr) {
        params.lse[columns.row] = LogSumExp(state);
      }
    }
    WriteOutputs<Traits, kSet + 1>(params, target, acc);
  }
}

// Ends a piece: the team's warps merge; then the output, or this worker's partial and, by each warp that is the last
// of the request with its rows, the merge over workers.
template <class Traits>
__device__ __forceinline__ void FinishPiece(const AttentionParams& params, const WarpRole& role,
                                            const TeamTarget& target, Accumulator<Traits>& acc,
                                            float* areas) {
  acc.Finish();
  if constexpr (Traits::kHeadDim <= 128) {  // beyond, registers are short
    if (!PGQA_LIKELY(role.team_size > 1 || !target.is_whole)) {
      WriteOutputs<Traits, 0>(params, target, acc);
      return;
    }
  }
  FinishRowSets<Traits, 0>(params, role, target, acc, areas);
  if (target.is_whole || role.rank >= target.num_rows) return;
  if (ArriveLast(target)) MergeSlots<Traits>(params, role, target);
}

}  // namespace pgqa
