// The online-softmax state of one (request, query head) and its merge; empty states are settled here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "pgqa/host_device.h"

namespace pgqa {

constexpr float kLog2e = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

// 2^x; on the device to 2 ulp, with denormal results taken as 0.
PGQA_HOST_DEVICE float Exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// Scores are in base 2 (logit * log2 e): weights are exp2(score - max), sum is their total. The empty
// state is (-inf, 0) and is the identity of Merge. The matching accumulator is sum_i weight_i * v_i.
struct SoftmaxState {
  float max = -INFINITY;
  float sum = 0.0F;
};

// Factor that moves weights taken against `from` to weights against `to`, from <= to. 0 for an empty
// state, also where both are empty, so that exp2(-inf - -inf) is never formed.
PGQA_HOST_DEVICE float Rescale(float from, float to) {
  return from == -INFINITY ? 0.0F : Exp2(from - to);
}

// The state of the union. Accumulators merge as a * Rescale(a.max, m) + b * Rescale(b.max, m).
PGQA_HOST_DEVICE SoftmaxState Merge(const SoftmaxState& a, const SoftmaxState& b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * Rescale(a.max, max) + b.sum * Rescale(b.max, max)};
}

// Factor that turns an accumulator into the output, on the device to 1 ulp; 0 for the empty state, whose output is 0.
PGQA_HOST_DEVICE float OutputScale(const SoftmaxState& state) {
#ifdef __CUDA_ARCH__
  float scale;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(state.sum));
  return state.sum == 0.0F ? 0.0F : scale;
#else
  return state.sum == 0.0F ? 0.0F : 1.0F / state.sum;
#endif
}

// Natural log-sum-exp of the logits; -inf for the empty state.
PGQA_HOST_DEVICE float LogSumExp(const SoftmaxState& state) {
  return state.sum == 0.0F ? -INFINITY : kLn2 * (state.max + log2f(state.sum));
}

}  // namespace pgqa
