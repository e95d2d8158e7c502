// RoPE on the CPU: angles in fp64, and no sine or cosine a token.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_rope.h"

#include <cmath>

namespace pgqa {

double RopeFrequency(int32_t head_dim, int32_t pair, double rope_scale, double rope_theta) {
  return std::pow(rope_theta, -2.0 * pair / head_dim) / rope_scale;
}

void Phasors::Turn(const Phasors& step, double direction) {
  for (size_t pair = 0; pair < cosines.size(); ++pair) {
    const double cosine = cosines[pair];
    const double sine = sines[pair];
    const double step_sine = direction * step.sines[pair];
    cosines[pair] = cosine * step.cosines[pair] - sine * step_sine;
    sines[pair] = sine * step.cosines[pair] + cosine * step_sine;
  }
}

void Phasors::Narrow(float* narrow_cosines, float* narrow_sines) const {
  for (size_t pair = 0; pair < cosines.size(); ++pair) {
    narrow_cosines[pair] = static_cast<float>(cosines[pair]);
    narrow_sines[pair] = static_cast<float>(sines[pair]);
  }
}

RopeTables::RopeTables(int32_t head_dim, double rope_scale, double rope_theta)
    : frequencies_(head_dim / 2),
      key_cosines_(frequencies_.size() * kChunkTokens),
      key_sines_(frequencies_.size() * kChunkTokens),
      chunk_turn_(frequencies_.size()) {
  const size_t num_pairs = frequencies_.size();
  Phasors token_turn(num_pairs);
  for (size_t pair = 0; pair < num_pairs; ++pair) {
    frequencies_[pair] =
        RopeFrequency(head_dim, static_cast<int32_t>(pair), rope_scale, rope_theta);
    token_turn.cosines[pair] = std::cos(frequencies_[pair]);
    token_turn.sines[pair] = std::sin(frequencies_[pair]);
  }
  for (size_t offset = 0; offset < kChunkTokens; ++offset) {
    chunk_turn_.Narrow(&key_cosines_[offset * num_pairs], &key_sines_[offset * num_pairs]);
    chunk_turn_.Turn(token_turn, 1.0);
  }
}

CpuQueryFrame::CpuQueryFrame(const RopeTables& tables)
    : tables_(tables),
      turn_(tables.num_pairs()),
      cosines_(tables.num_pairs()),
      sines_(tables.num_pairs()) {}

void CpuQueryFrame::Start(int64_t distance) {
  for (int32_t pair = 0; pair < tables_.num_pairs(); ++pair) {
    const double angle = static_cast<double>(distance) * tables_.frequencies()[pair];
    turn_.cosines[pair] = std::cos(angle);
    turn_.sines[pair] = std::sin(angle);
  }
  turn_.Narrow(cosines_.data(), sines_.data());
}

// Steps in fp64: a million of them lose less than fp32 can tell.
void CpuQueryFrame::Advance() {
  turn_.Turn(tables_.chunk_turn(), -1.0);
  turn_.Narrow(cosines_.data(), sines_.data());
}

}  // namespace pgqa
