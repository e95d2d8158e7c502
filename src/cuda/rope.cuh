// RoPE by tile-relative rotation: q is turned into the frame of each stage, key row j by a constant R(j).
// SPDX-License-Identifier: Apache-2.0
//
// With R orthogonal, (R(p_q) q) . (R(p_k) k) = (R(p_q - t) q) . (R(p_k - t) k) for any t. Take t as the
// position of the first token of a frame, which is frame_stages stages of a warp: keys turn by constants, the
// same in every frame, and q once a frame by R(p_q - t). That rotation steps from frame to frame by a constant,
// in fp32, and restarts from an angle in fp64 at each piece and at least every 64 stages.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/element.cuh"
#include "cuda/kernel_traits.cuh"
#include "cuda/ptx.cuh"

namespace pgqa {

struct Rotation {
  float cos = 1.0F;
  float sin = 0.0F;
};

// Turns a token advances pair `pair` by: its frequency over 2 pi. Padding pairs do not turn.
__device__ __forceinline__ double TurnsPerToken(const AttentionParams& params, int32_t pair) {
  if (pair >= params.head_dim / 2) return 0.0;
  return params.rope.turns_scale * exp2(pair * params.rope.log2_step);
}

// To 5e-7: sine and cosine of an angle within half a turn, by the hardware. What the angle needs is kept in fp64.
__device__ __forceinline__ Rotation RotationOf(double turns) {
  constexpr float kTwoPi = 6.283185307179586F;
  const float angle = static_cast<float>(turns - rint(turns)) * kTwoPi;
  return {__cosf(angle), __sinf(angle)};
}

// Byte offset of pair `pair` in a table of rotations, laid out so that lane j of a quad reads those of its
// eight elements of a chunk in four conflict-free 16-byte reads: [chunk][two pairs][lane j].
__device__ __forceinline__ int32_t RotationOffset(int32_t pair) {
  const int32_t in_chunk = pair % 32;
  return pair / 32 * 256 + in_chunk % 8 / 2 * 64 + in_chunk / 8 * 16 + pair % 2 * 8;
}

// Eight RoPE pairs, turned: x holds their first halves, y their second, as high and low parts.
template <class Element>
struct TurnedUnit {
  SplitPair x[4];
  SplitPair y[4];

  __device__ __forceinline__ TurnedUnit() {}

  // `table` is the address of the lane's first rotations of the chunk.
  __device__ __forceinline__ TurnedUnit(const uint4& x_in, const uint4& y_in, const char* table) {
    const uint32_t xs[4] = {x_in.x, x_in.y, x_in.z, x_in.w};
    const uint32_t ys[4] = {y_in.x, y_in.y, y_in.z, y_in.w};
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const uint4 r = Load16(table + i * 64);
      const float cos0 = __uint_as_float(r.x), sin0 = __uint_as_float(r.y);
      const float cos1 = __uint_as_float(r.z), sin1 = __uint_as_float(r.w);
      const float2 a = Unpack<Element>(xs[i]);
      const float2 b = Unpack<Element>(ys[i]);
      x[i] = pgqa::Split<Element>(a.x * cos0 - b.x * sin0, a.y * cos1 - b.y * sin1);
      y[i] = pgqa::Split<Element>(b.x * cos0 + a.x * sin0, b.y * cos1 + a.y * sin1);
    }
  }

  // To and from the lane's place in shared memory, one 16-byte word every kPitch.
  static constexpr int kWords = 4;
  static constexpr int kPitch = kWarpSize * 16;

  __device__ __forceinline__ void Store(char* place) const {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      Store16(place + 2 * i * kPitch,
              {x[2 * i].high, x[2 * i].low, x[2 * i + 1].high, x[2 * i + 1].low});
      Store16(place + (2 * i + 1) * kPitch,
              {y[2 * i].high, y[2 * i].low, y[2 * i + 1].high, y[2 * i + 1].low});
    }
  }

  __device__ __forceinline__ void Load(const char* place) {
#pragma unroll
    for (int32_t i = 0; i < 2; ++i) {
      const uint4 a = Load16(place + 2 * i * kPitch);
      const uint4 b = Load16(place + (2 * i + 1) * kPitch);
      x[2 * i] = {a.x, a.y};
      x[2 * i + 1] = {a.z, a.w};
      y[2 * i] = {b.x, b.y};
      y[2 * i + 1] = {b.z, b.w};
    }
  }
};

__device__ __forceinline__ Rotation Compose(const Rotation& a, const Rotation& b) {
  return {a.cos * b.cos - a.sin * b.sin, a.sin * b.cos + a.cos * b.sin};
}

// The rotation of q into a warp's current frame, and the CTA's table of the rotations of a frame's rows. Lanes share
// the pairs out among them: lane l has pairs l, l + 32, ...
template <class Traits>
class QueryFrame {
 public:
  __device__ __forceinline__ explicit QueryFrame(const AttentionParams& params) {
#pragma unroll
    for (int32_t i = 0; i < kPairsPerLane; ++i) turns_[i] = TurnsPerToken(params, Pair(i));
  }

  // For a share of num_tiles tiles. `table` is the warp's own, FrameBytes() large, `row_table` the CTA's. Ends with a
  // barrier.
  __device__ __forceinline__ void Prepare(int32_t tile_tokens, int64_t num_tiles, char* table,
                                          char* row_table) {
    table_ = table;
    row_table_ = row_table;
#pragma unroll
    for (int32_t i = 0; i < kPairsPerLane; ++i) {
      step_[i] = RotationOf(-tile_tokens * Traits::kTile.frame_stages * turns_[i]);
    }
    const int32_t num_stages = num_tiles < Traits::kTile.frame_stages
                                   ? static_cast<int32_t>(num_tiles)
                                   : Traits::kTile.frame_stages;
    FillRowRotations(tile_tokens, num_stages);
    __syncthreads();
  }

  // Moves to the next frame, whose first token lies `distance` before the query. A new piece restarts.
  __device__ __forceinline__ void Advance(int64_t distance, bool restart) {
    frames_since_restart_ =
        restart || frames_since_restart_ == kRestartFrames ? 0 : frames_since_restart_ + 1;
#pragma unroll
    for (int32_t i = 0; i < kPairsPerLane; ++i) {
      if (frames_since_restart_ == 0) {
        current_[i] = RotationOf(static_cast<double>(distance) * turns_[i]);
      } else {
        current_[i] = Compose(current_[i], step_[i]);
      }
      *reinterpret_cast<Rotation*>(table_ + RotationOffset(Pair(i))) = current_[i];
    }
    __syncwarp();
  }

  __device__ __forceinline__ const char* Table() const { return table_; }
  __device__ __forceinline__ char* Turned() const { return table_ + Traits::kTile.RotationBytes(); }
  // Rotations of the rows of a stage of the frame.
  __device__ __forceinline__ const char* RowsOf(int32_t stage_in_frame) const {
    return row_table_ + stage_in_frame * Traits::kTile.StageRotationBytes();
  }

 private:
  static constexpr int kPairs = Traits::kHeadDim / 2;
  static constexpr int kPairsPerLane = kPairs / kWarpSize;
  static constexpr int kRestartFrames = 64 / Traits::kTile.frame_stages - 1;

  __device__ __forceinline__ static int32_t Pair(int32_t i) {
    return static_cast<int32_t>(threadIdx.x % kWarpSize) + i * kWarpSize;
  }

  // Rows of the first num_stages stages of a frame, tile_tokens apart. A thread steps through rows of one pair at a
  // time; where there are more warps than runs of 32 pairs, the warps of a run share its rows.
  __device__ __forceinline__ void FillRowRotations(int32_t tile_tokens, int32_t num_stages) {
    const int32_t warp = threadIdx.x / kWarpSize;
    const int32_t num_warps = blockDim.x / kWarpSize;
    const int32_t row_step = max(1, num_warps / kPairsPerLane);
#pragma unroll
    for (int32_t i = 0; i < kPairsPerLane; ++i) {
      if (i % num_warps != warp % kPairsPerLane % num_warps) continue;
      const int32_t first_row = warp / kPairsPerLane;
      FillRows(turns_[i], tile_tokens, num_stages, first_row, row_step,
               row_table_ + RotationOffset(Pair(i)));
    }
  }

  __device__ __forceinline__ static void FillRows(double turns, int32_t tile_tokens,
                                                  int32_t num_stages, int32_t first_row,
                                                  int32_t row_step, char* rows) {
    const Rotation row_rotation = RotationOf(row_step * turns);
    const Rotation stage_rotation = RotationOf(tile_tokens * turns);
    Rotation first = RotationOf(first_row * turns);
#pragma unroll 1
    for (int32_t stage = 0; stage < num_stages;
         ++stage, rows += Traits::kTile.StageRotationBytes()) {
      Rotation r = first;
#pragma unroll 1
      for (int32_t row = first_row; row < kStageTokens; row += row_step) {
        *reinterpret_cast<Rotation*>(rows + row * Traits::kTile.RowRotationPitch()) = r;
        r = Compose(r, row_rotation);
      }
      first = Compose(first, stage_rotation);
    }
  }

  char* table_ = nullptr;
  char* row_table_ = nullptr;
  double turns_[kPairsPerLane] = {};
  Rotation step_[kPairsPerLane];
  Rotation current_[kPairsPerLane];
  int32_t frames_since_restart_ = 0;
};

// Stands in where there is no RoPE.
template <class Traits>
struct NoFrame {
  __device__ __forceinline__ explicit NoFrame(const AttentionParams&) {}
  __device__ __forceinline__ void Prepare(int32_t, int64_t, char*, char*) {}
};

template <class Traits>
using Frame = std::conditional_t<Traits::kRope, QueryFrame<Traits>, NoFrame<Traits>>;

}  // namespace pgqa
