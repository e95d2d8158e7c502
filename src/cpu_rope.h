// RoPE on the CPU: angles in fp64, and no sine or cosine a token.
// SPDX-License-Identifier: Apache-2.0
//
// Scores depend on differences of positions only. So the query is turned by its distance to the
// first token of a chunk, and key j of the chunk by j, the same for every chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu_kernels.h"

namespace pgqa {

// Radians by which each token advances pair (i, i + head_dim / 2), i = `pair`.
double RopeFrequency(int32_t head_dim, int32_t pair, double rope_scale, double rope_theta);

// Cosines and sines of one angle a pair, in fp64.
struct Phasors {
  explicit Phasors(size_t num_pairs) : cosines(num_pairs, 1.0), sines(num_pairs, 0.0) {}

  // Adds (direction 1) or takes away (-1) the angles of `step`.
  void Turn(const Phasors& step, double direction);
  // Rounds to fp32, [num_pairs] each.
  void Narrow(float* narrow_cosines, float* narrow_sines) const;

  std::vector<double> cosines;
  std::vector<double> sines;
};

// What all workers of a call share.
class RopeTables {
 public:
  // head_dim is even.
  RopeTables(int32_t head_dim, double rope_scale, double rope_theta);

  int32_t num_pairs() const { return static_cast<int32_t>(frequencies_.size()); }
  const std::vector<double>& frequencies() const { return frequencies_; }

  // Turns of the keys of a chunk, [kChunkTokens, num_pairs].
  RowRotations KeyRotations() const { return {key_cosines_.data(), key_sines_.data()}; }

  // Turn by a whole chunk.
  const Phasors& chunk_turn() const { return chunk_turn_; }

 private:
  std::vector<double> frequencies_;
  std::vector<float> key_cosines_;  // [kChunkTokens, num_pairs]
  std::vector<float> key_sines_;
  Phasors chunk_turn_;
};

// The turn of a query, from chunk to chunk.
class CpuQueryFrame {
 public:
  explicit CpuQueryFrame(const RopeTables& tables);

  // `distance`: the query's position less that of the chunk's first token, exact up to 2^53.
  void Start(int64_t distance);

  // Moves on to the next chunk, kChunkTokens nearer.
  void Advance();

  RowRotations rotation() const { return {cosines_.data(), sines_.data()}; }

 private:
  const RopeTables& tables_;
  Phasors turn_;
  std::vector<float> cosines_;  // [num_pairs]
  std::vector<float> sines_;
};

}  // namespace pgqa
