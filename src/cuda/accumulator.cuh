// The online softmax of a warp over the stages of a piece and its weighted sum of values.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/element.cuh"
#include "cuda/scores.cuh"
#include "pgqa/softmax_state.h"

namespace pgqa {

// fp32 state of the rows of a block. In split mode fragment rows 8-15 take the low parts of the weights, so
// that P enters the product as high + low; they are folded into rows 0-7 at the end.
template <class Traits>
struct Accumulator {
  using Element = typename Traits::Element;
  static constexpr int kColumnTiles = Traits::kHeadDim / 8;

  float out[kColumnTiles][4];
  float max[Traits::kRowSets];  // base-2 scores
  float sum[Traits::kRowSets];  // of this lane's tokens until Finish()

  // Empty state.
  __device__ __forceinline__ void Reset() {
#pragma unroll
    for (int32_t column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) out[column][i] = 0.0F;
    }
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) {
      max[set] = -INFINITY;
      sum[set] = 0.0F;
    }
  }

  // Adds one stage: `scores` raw products, `values` the address of its V rows, num_rows > 0 live tokens.
  __device__ __forceinline__ void Add(const AttentionParams& params, StageScores& scores,
                                      const char* values, int32_t num_rows) {
    ScaleScores(params, scores);
    if (num_rows < kStageTokens) MaskScores(scores, num_rows);
    UpdateMax(scores);
    uint32_t weights[4];
    TakeWeights(scores, weights);
    AddValues(values, weights);
  }

  // Completes the sums over the quad and folds the low parts in.
  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) {
      sum[set] += __shfl_xor_sync(kFullWarp, sum[set], 1);
      sum[set] += __shfl_xor_sync(kFullWarp, sum[set], 2);
    }
    if constexpr (Traits::kSplit) {
#pragma unroll
      for (int32_t column = 0; column < kColumnTiles; ++column) {
        out[column][0] += out[column][2];
        out[column][1] += out[column][3];
      }
    }
  }

 private:
  // Elements of a score fragment that hold scores: rows g, and unless split g + 8, of two tokens.
  static constexpr int kElements = 2 * Traits::kRowSets;

  static __device__ __forceinline__ void ScaleScores(const AttentionParams& params,
                                                     StageScores& scores) {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (int32_t i = 0; i < kElements; ++i) {
        float& s = scores[half][i];
        s = params.cap > 0.0F ? SoftCap(params, s) : s * params.score_scale;
      }
    }
  }

  // cap * tanh(s * inverse_cap). The exponential form saturates at +-cap; near 0, where it would cancel, two
  // terms of the series are exact to 1e-8.
  static __device__ __forceinline__ float SoftCap(const AttentionParams& params, float s) {
    const float x = s * params.inverse_cap;
    const float series = x - x * x * x * (1.0F / 3.0F);
    const float tanh_x = 1.0F - 2.0F * ptx::Reciprocal(1.0F + Exp2(x * (2.0F * kLog2e)));
    return params.cap * (fabsf(x) < 0.015625F ? series : tanh_x);
  }

  static __device__ __forceinline__ void MaskScores(StageScores& scores, int32_t num_rows) {
    const int32_t token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
#pragma unroll
      for (int32_t i = 0; i < kElements; ++i) {
        if (half * 8 + token + i % 2 >= num_rows) scores[half][i] = -INFINITY;
      }
    }
  }

  // Raises the maxima and rescales what was summed against the old ones, if any lane's rose.
  __device__ __forceinline__ void UpdateMax(const StageScores& scores) {
    float scale[Traits::kRowSets];
    bool rose = false;
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) {
      float top = fmaxf(fmaxf(scores[0][2 * set], scores[0][2 * set + 1]),
                        fmaxf(scores[1][2 * set], scores[1][2 * set + 1]));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
      top = fmaxf(top, max[set]);
      scale[set] = max[set] == -INFINITY ? 0.0F : Exp2(max[set] - top);
      rose |= top != max[set];
      max[set] = top;
    }
    if (!__any_sync(kFullWarp, rose)) return;
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) sum[set] *= scale[set];
#pragma unroll
    for (int32_t column = 0; column < kColumnTiles; ++column) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) out[column][i] *= scale[i / 2 % Traits::kRowSets];
    }
  }

  // Turns scores into weights and packs them as the left operand of the value product. Rows whose scores are
  // all -inf keep weight 0.
  __device__ __forceinline__ void TakeWeights(StageScores& scores, uint32_t (&weights)[4]) {
#pragma unroll
    for (int32_t set = 0; set < Traits::kRowSets; ++set) {
      const float base = max[set] == -INFINITY ? 0.0F : max[set];
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float* s = &scores[half][2 * set];
        s[0] = Exp2(s[0] - base);
        s[1] = Exp2(s[1] - base);
        sum[set] += s[0] + s[1];
      }
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      if constexpr (Traits::kSplit) {
        const SplitPair p = pgqa::Split<Element>(scores[half][0], scores[half][1]);
        weights[2 * half] = p.high;
        weights[2 * half + 1] = p.low;
      } else {
        weights[2 * half] = Pack<Element>(scores[half][0], scores[half][1]);
        weights[2 * half + 1] = Pack<Element>(scores[half][2], scores[half][3]);
      }
    }
  }

  // out += weights . V. Lane (g, j) reads 16 bytes of V rows 2j, 2j + 1, 2j + 8, 2j + 9; element e of them is
  // column g of column tile e, so that no transposition is needed.
  __device__ __forceinline__ void AddValues(const char* values, const uint32_t (&w)[4]) {
    constexpr int32_t kPitch = Traits::kTile.ValuePitch();
    const int32_t lane = threadIdx.x % kWarpSize;
    const char* base = values + lane % 4 * 2 * kPitch + lane / 4 * 16;
#pragma unroll
    for (int32_t block = 0; block < Traits::kValueBlocks; ++block) {
      const uint4 r0 = Load16(base + block * 128);
      const uint4 r1 = Load16(base + block * 128 + kPitch);
      const uint4 r2 = Load16(base + block * 128 + 8 * kPitch);
      const uint4 r3 = Load16(base + block * 128 + 9 * kPitch);
      const uint32_t v0[4] = {r0.x, r0.y, r0.z, r0.w}, v1[4] = {r1.x, r1.y, r1.z, r1.w};
      const uint32_t v2[4] = {r2.x, r2.y, r2.z, r2.w}, v3[4] = {r3.x, r3.y, r3.z, r3.w};
#pragma unroll
      for (int32_t e = 0; e < 4; ++e) {
        const uint32_t even0 = __byte_perm(v0[e], v1[e], 0x5410),
                       even1 = __byte_perm(v2[e], v3[e], 0x5410);
        const uint32_t odd0 = __byte_perm(v0[e], v1[e], 0x7632),
                       odd1 = __byte_perm(v2[e], v3[e], 0x7632);
        const int32_t column = block * 8 + 2 * e;
        ptx::Mma<Element>(out[column], w[0], w[1], w[2], w[3], even0, even1);
        ptx::Mma<Element>(out[column + 1], w[0], w[1], w[2], w[3], odd0, odd1);
      }
    }
  }
};

}  // namespace pgqa
