// Query fragments and the scores of one stage: q . k for 16 tokens on the tensor cores.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/kernel_traits.cuh"
#include "cuda/ptx.cuh"
#include "cuda/rope.cuh"
#include "cuda/stage_loader.cuh"

namespace pgqa {

// 16 bytes of a q row from padded column `column` (16-byte units); halves of rows end on 8 bytes.
template <class Traits>
__device__ __forceinline__ uint4 LoadPaddedUnit(const AttentionParams& params, const char* row,
                                                int32_t column) {
  const PaddedColumn<Traits> source(params.head_dim, column);
  const uint2* address = reinterpret_cast<const uint2*>(row + source.element * 2);
  const uint2 zero = make_uint2(0, 0);
  const uint2 low = source.num_valid >= 4 ? address[0] : zero;
  const uint2 high = source.num_valid == 8 ? address[1] : zero;
  return make_uint4(low.x, low.y, high.x, high.y);
}

// The query heads of one (request, row block): lane (g, j) holds rows g, g + 8, ... in the chunk order of
// TileTraits.
template <class Traits>
struct Queries {
  uint4 unit[Traits::kRowSets][Traits::kChunks];

  // `base` is the block's first query head, num_rows the block's size.
  __device__ __forceinline__ void Load(const AttentionParams& params, const char* base,
                                       int32_t num_rows) {
    const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) {
      const int32_t row = set * 8 + lane / 4;
      const char* address = base + row * params.q_head_stride;
      if (PGQA_LIKELY(params.head_dim == Traits::kHeadDim)) {
#pragma unroll
        for (int32_t c = 0; c < Traits::kChunks; ++c) {
          unit[set][c] =
              row < num_rows ? Load16(address + c * 64 + lane % 4 * 16) : make_uint4(0, 0, 0, 0);
        }
      } else {
#pragma unroll
        for (int32_t c = 0; c < Traits::kChunks; ++c) {
          unit[set][c] = row < num_rows ? LoadPaddedUnit<Traits>(params, address, c * 4 + lane % 4)
                                        : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }
};

// Scores of one stage as accumulator fragments: [eight tokens][rows g, g + 8 of two tokens].
using StageScores = float[2][4];

// Address of the lane's first 16 bytes of K row lane / 4.
template <class Traits>
__device__ __forceinline__ const char* KeyAddress(const char* stage) {
  const int32_t lane = threadIdx.x % kWarpSize;
  return stage + lane / 4 * Traits::kTile.KeyPitch() + lane % 4 * 16;
}

__device__ __forceinline__ void AddScores(const StageScores& from, StageScores& to) {
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) to[half][i] += from[half][i];
  }
}

// The contraction runs in two chains, so that fewer products wait for each other.
template <class Traits>
__device__ __forceinline__ void ComputeScores(const Queries<Traits>& q, const char* stage,
                                              StageScores& scores) {
  using Element = typename Traits::Element;
  StageScores odd = {};
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const char* keys = KeyAddress<Traits>(stage) + half * 8 * Traits::kTile.KeyPitch();
#pragma unroll
    for (int32_t c = 0; c < Traits::kChunks; ++c) {
      const uint4 k = Load16(keys + c * 64);
      const uint4 low = q.unit[0][c];
      const uint4 high = Traits::kSplit ? make_uint4(0, 0, 0, 0) : q.unit[Traits::kRowSets - 1][c];
      ptx::Mma<Element>(scores[half], low.x, high.x, low.y, high.y, k.x, k.y);
      ptx::Mma<Element>(odd[half], low.z, high.z, low.w, high.w, k.z, k.w);
    }
  }
  AddScores(odd, scores);
}

// One pair of contraction steps with q and k as high + low parts, those of k in accumulators of their own: half
// the chain of dependent products. In split mode the low parts of q are rows 8-15 of the tile; else they enter
// by a further product.
template <class Traits>
__device__ __forceinline__ void MultiplyTurned(float (&scores)[4], float (&low_scores)[4],
                                               const SplitPair (&q_low_rows)[4],
                                               const SplitPair (&q_high_rows)[4],
                                               const SplitPair (&k)[4]) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int32_t i = 0; i < 4; i += 2) {
    const SplitPair* a = q_low_rows + i;
    const SplitPair* b = q_high_rows + i;
    if constexpr (Traits::kSplit) {
      ptx::Mma<Element>(scores, a[0].high, a[0].low, a[1].high, a[1].low, k[i].high, k[i + 1].high);
      ptx::Mma<Element>(low_scores, a[0].high, a[0].low, a[1].high, a[1].low, k[i].low,
                        k[i + 1].low);
    } else {
      ptx::Mma<Element>(scores, a[0].high, b[0].high, a[1].high, b[1].high, k[i].high,
                        k[i + 1].high);
      ptx::Mma<Element>(low_scores, a[0].low, b[0].low, a[1].low, b[1].low, k[i].high,
                        k[i + 1].high);
      ptx::Mma<Element>(low_scores, a[0].high, b[0].high, a[1].high, b[1].high, k[i].low,
                        k[i + 1].low);
    }
  }
}

// Scores of a stage under RoPE; `turned(c, set)` gives q's unit of chunk c and row set `set`, `rotations` those
// of the stage's rows.
template <class Traits, class Turned>
__device__ __forceinline__ void MultiplyTurnedStage(const char* stage, const char* rotations,
                                                    Turned turned, StageScores& scores) {
  using Unit = TurnedUnit<typename Traits::Element>;
  constexpr int kHalf = Traits::kHalfChunks;
  const int32_t lane = threadIdx.x % kWarpSize;
  StageScores low = {};
#pragma unroll
  for (int32_t c = 0; c < kHalf; ++c) {
    const Unit q_first = turned(c, 0);
    const Unit q_second =
        turned(c, Traits::kRowSets - 1);  // the same set again, unused, in split mode
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const char* keys = KeyAddress<Traits>(stage) + half * 8 * Traits::kTile.KeyPitch();
      const int32_t row = half * 8 + lane / 4;
      const Unit k(Load16(keys + c * 64), Load16(keys + (c + kHalf) * 64),
                   rotations + row * Traits::kTile.RowRotationPitch() + c * 256 + lane % 4 * 16);
      MultiplyTurned<Traits>(scores[half], low[half], q_first.x, q_second.x, k.x);
      MultiplyTurned<Traits>(scores[half], low[half], q_first.y, q_second.y, k.y);
    }
  }
  AddScores(low, scores);
}

// q as the stages of a piece need it: as it is, or turned into the current frame.
template <class Traits>
class StageQueries {
 public:
  // `base` is the first query head of the block, num_rows its size.
  __device__ __forceinline__ void Start(const AttentionParams& params, const char* base,
                                        int32_t num_rows) {
    if constexpr (Traits::kTile.keeps_turned_q) {
      base_ = base;
      num_rows_ = num_rows;
      const int32_t row = threadIdx.x % kWarpSize / 4;
      const char* quarter = base + row * params.q_head_stride + threadIdx.x % 4 * 128;
      if (row < num_rows && threadIdx.x % 4 * 64 < params.head_dim) ptx::Prefetch(quarter);
    } else {
      queries_.Load(params, base, num_rows);
    }
    stage_in_frame_ = Traits::kTile.frame_stages;
    starts_piece_ = true;
  }

  // Turns q into the frame of the next stage, whose first token lies `distance` before the query, where it is not in
  // it yet.
  __device__ __forceinline__ void Turn(const AttentionParams& params, int64_t distance,
                                       Frame<Traits>& frame) {
    if constexpr (Traits::kRope) {
      if (stage_in_frame_ != Traits::kTile.frame_stages) return;
      frame.Advance(distance, starts_piece_);
      starts_piece_ = false;
      stage_in_frame_ = 0;
      if constexpr (Traits::kTile.keeps_turned_q) {
        Queries<Traits>
            queries;  // loaded anew: they would take the registers that the loop is short of
        queries.Load(params, base_, num_rows_);
#pragma unroll
        for (int32_t c = 0; c < Traits::kHalfChunks; ++c) {
          TurnedQuery(queries, c, 0, frame.Table()).Store(Place(frame, c));
        }
      }
    }
  }

  // Scores of the stage that Turn() was called for.
  __device__ __forceinline__ void ComputeStage(const char* stage, const Frame<Traits>& frame,
                                               StageScores& scores) {
    if constexpr (!Traits::kRope) {
      ComputeScores<Traits>(queries_, stage, scores);
    } else {
      const char* rotations = frame.RowsOf(stage_in_frame_);
      ++stage_in_frame_;
      if constexpr (Traits::kTile.keeps_turned_q) {
        MultiplyTurnedStage<Traits>(
            stage, rotations,
            [&](int32_t c, int32_t) {
              Unit unit;
              unit.Load(Place(frame, c));
              return unit;
            },
            scores);
        AddLowRows(scores);
      } else {
        MultiplyTurnedStage<Traits>(
            stage, rotations,
            [&](int32_t c, int32_t set) { return TurnedQuery(queries_, c, set, frame.Table()); },
            scores);
      }
    }
  }

 private:
  using Unit = TurnedUnit<typename Traits::Element>;

  __device__ __forceinline__ static Unit TurnedQuery(const Queries<Traits>& queries, int32_t c,
                                                     int32_t set, const char* table) {
    return Unit(queries.unit[set][c], queries.unit[set][c + Traits::kHalfChunks],
                table + c * 256 + threadIdx.x % 4 * 16);
  }

  // Where this lane keeps its turned unit of chunk c.
  __device__ __forceinline__ char* Place(const Frame<Traits>& frame, int32_t c) const {
    return frame.Turned() + c * Unit::kWords * Unit::kPitch + threadIdx.x % kWarpSize * 16;
  }

  // Fragment rows 8-15 hold the products of q's low parts.
  __device__ __forceinline__ static void AddLowRows(StageScores& scores) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      scores[half][0] += scores[half][2];
      scores[half][1] += scores[half][3];
    }
  }

  Queries<Traits> queries_;  // unused where the turned q is kept
  const char* base_ = nullptr;
  int32_t num_rows_ = 0;
  int32_t stage_in_frame_ = 0;
  bool starts_piece_ = false;
};

}  // namespace pgqa
