// A decode problem bound to a captured graph, for tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "pgqa/decode_graph.h"
#include "tests/cuda/decode_run.cuh"

namespace pgqa::testing {

inline const ProblemSpec kFourRequests{{40, 33, 100, 7}, 8, 2, 64, 16, DType::kBFloat16};

// One layer that is the call of `problem`, on the caller's buffers.
inline GraphSpec SpecOf(const Problem& problem, const Runner& runner) {
  const DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
  GraphSpec spec;
  spec.shape = problem.Shape();
  spec.max_pages = args.table.num_indices;
  spec.num_pages = args.table.num_pages;
  spec.page_indptr = args.table.indptr;
  spec.page_indices = args.table.indices;
  spec.last_page_len = args.table.last_page_len;
  spec.return_lse = true;
  GraphLayer layer;
  layer.q = args.q;
  layer.q_strides = {args.q_batch_stride, args.q_head_stride};
  layer.k_cache = const_cast<void*>(args.k_cache);
  layer.v_cache = const_cast<void*>(args.v_cache);
  layer.k_cache_strides = args.k_strides;
  layer.v_cache_strides = args.v_strides;
  layer.out = args.out;
  layer.lse = args.lse;
  layer.options = args.options;
  spec.layers = {layer};
  return spec;
}

// A problem, its output and a captured graph over both.
struct Bound {
  explicit Bound(const ProblemSpec& problem_spec, bool live_batch = true)
      : problem(problem_spec), runner(problem), graph(Make(live_batch)) {}

  DecodeGraph Make(bool live_batch) {
    GraphSpec spec = SpecOf(problem, runner);
    spec.live_batch = live_batch;
    DecodeGraph made = DecodeGraph::Create(spec).value();
    EXPECT_TRUE(made.Capture(stream.get()).ok());
    Check(cudaStreamSynchronize(stream.get()));
    return made;
  }

  // Replays into outputs of 0xFF and checks them; nothing of `unspecified`.
  void ReplayAndCheck(const std::set<int32_t>& unspecified = {}) {
    runner.Forget();
    const absl::Status status = graph.Replay(stream.get());
    ASSERT_TRUE(status.ok()) << status;
    runner.CheckResult(unspecified);
  }

  CudaStream stream = CudaStream::Create().value();
  Problem problem;
  Runner runner;
  DecodeGraph graph;
};

// Rows from `live` on are empty although the table has tokens for them.
inline void ExpectLive(const Bound& bound, int32_t live) {
  std::set<int32_t> past;
  for (int32_t row = live; row < bound.problem.batch(); ++row) past.insert(row);
  bound.runner.CheckResult(past);
  const std::vector<uint16_t> out = bound.runner.out().Read();
  const std::vector<float> lse = bound.runner.lse().Read();
  const size_t row_elements = out.size() / static_cast<size_t>(bound.problem.batch());
  const size_t row_heads = lse.size() / static_cast<size_t>(bound.problem.batch());
  for (size_t i = static_cast<size_t>(live) * row_elements; i < out.size(); ++i)
    ASSERT_EQ(out[i], 0U);
  for (size_t i = static_cast<size_t>(live) * row_heads; i < lse.size(); ++i)
    ASSERT_TRUE(std::isinf(lse[i]) && lse[i] < 0);
}

}  // namespace pgqa::testing
