// One worker of a CPU call: computes its pieces of the schedule, chunk by chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu_chunk.h"
#include "cpu_kernels.h"
#include "cpu_rope.h"
#include "pgqa/cpu_executor.h"
#include "pgqa/launch_plan.h"
#include "pgqa/schedule.h"

namespace pgqa {

// Unfinished outputs, one slot a piece that is not a whole request. A slot holds one row of row_dim
// floats for each query head of a head group. Slots have no value before they are written.
class PartialStore {
 public:
  PartialStore(int64_t num_slots, int64_t rows_per_slot, int64_t row_dim)
      : rows_per_slot_(rows_per_slot),
        row_dim_(row_dim),
        accumulators_(std::make_unique_for_overwrite<float[]>(num_slots * rows_per_slot * row_dim)),
        states_(std::make_unique_for_overwrite<SoftmaxState[]>(num_slots * rows_per_slot)) {}

  float* Accumulators(int64_t slot) {
    return accumulators_.get() + slot * rows_per_slot_ * row_dim_;
  }
  SoftmaxState* States(int64_t slot) { return states_.get() + slot * rows_per_slot_; }

 private:
  int64_t rows_per_slot_;
  int64_t row_dim_;
  std::unique_ptr<float[]> accumulators_;
  std::unique_ptr<SoftmaxState[]> states_;
};

// What all workers of a call share. Only the partials are written, each slot by one worker.
struct CpuCall {
  const LaunchPlan& plan;
  const CpuDecodeArgs& args;
  const BatchPlan& batch;
  const CpuKernels& kernels;
  const RopeTables* rope;  // null without RoPE
  PartialStore* partials;
  ScoreTransform transform;
  int32_t row_dim;  // PaddedRow(head_dim)

  const AttentionShape& shape() const { return plan.shape; }
  int32_t RowsPerGroup() const { return batch.partition.heads_per_worker * shape().GroupSize(); }
  // Writes output and LSE of one query head.
  void StoreOutput(int32_t request, int32_t query_head, const float* accumulator,
                   const SoftmaxState& state) const;
};

// Scratch for one worker at a time; may run several in turn.
class CpuWorker {
 public:
  explicit CpuWorker(const CpuCall& call);

  // Computes all pieces of `worker`: whole requests to the output, others to their slots.
  void Run(int32_t worker);

 private:
  void BeginPiece(const Chunk& chunk);
  void Attend(const Chunk& chunk, const Chunk& upcoming);
  const float* RotatedQueries();
  void EndPiece(const Piece& piece, int32_t worker);

  const CpuCall& call_;
  int32_t num_rows_;                    // query heads of a head group
  std::vector<float> queries_;          // [num_rows, row_dim]
  std::vector<float> rotated_queries_;  // as queries_, empty without RoPE
  std::vector<float> accumulators_;     // as queries_
  std::vector<SoftmaxState> states_;    // [num_rows]
  std::vector<float> scores_;           // [num_rows, kChunkTokens]
  std::vector<float> staging_;          // [kStagedTokens, row_dim]
  std::vector<float> zero_row_;         // [row_dim]
  std::vector<CpuQueryFrame> frame_;    // one with RoPE, none without
};

}  // namespace pgqa
