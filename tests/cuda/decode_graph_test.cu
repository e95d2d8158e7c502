// DecodeGraph without torch: replays, live batches, rebinding, appending, the captured nodes.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "pgqa/decode_graph.h"
#include "pgqa/decode_graph_cache.h"
#include "tests/cuda/bound_graph.cuh"

namespace pgqa::testing {
namespace {

constexpr DType kBrain = DType::kBFloat16;

TEST(DecodeGraph, ReplaysTheBitsOfAnEagerCall) {
  for (const bool live_batch : {false, true}) {
    Bound bound(kFourRequests, live_batch);
    bound.ReplayAndCheck();
    const std::vector<uint16_t> replayed = bound.runner.out().Read();
    ASSERT_TRUE(bound.runner.Launch(bound.stream.get()).ok());
    Check(cudaStreamSynchronize(bound.stream.get()));
    EXPECT_EQ(bound.runner.out().Read(), replayed);
  }
}

TEST(DecodeGraph, CaptureRunsOnEmptyRequests) {
  Bound bound(kFourRequests);
  for (const uint16_t value : bound.runner.out().Read()) ASSERT_EQ(value, 0U);
  for (const float value : bound.runner.lse().Read()) ASSERT_TRUE(std::isinf(value) && value < 0);
}

TEST(DecodeGraph, RowsPastTheLiveBatchAreEmpty) {
  Bound bound(kFourRequests);
  const cudaGraphExec_t exec = bound.graph.exec();
  for (const int32_t live : {3, 1, 0, 4, 2, 2}) {
    SCOPED_TRACE(::testing::Message() << live << " live");
    bound.runner.Forget();
    ASSERT_TRUE(bound.graph.Replay(live, bound.stream.get()).ok());
    ExpectLive(bound, live);
    bound.runner.Forget();
    ASSERT_TRUE(bound.graph.Replay(bound.stream.get()).ok());
    ExpectLive(bound, live);  // what was told last stays
  }
  EXPECT_EQ(bound.graph.exec(), exec);
}

TEST(DecodeGraph, EnqueuedReplaysKeepTheirLiveBatch) {
  Bound bound(kFourRequests);
  const DeviceArray<uint16_t> first(bound.runner.out().size());
  bound.runner.Forget();
  ASSERT_TRUE(bound.graph.Replay(2, bound.stream.get()).ok());
  Check(cudaMemcpyAsync(first.data(), bound.runner.out().data(), first.size() * 2,
                        cudaMemcpyDeviceToDevice, bound.stream.get()));
  ASSERT_TRUE(bound.graph.Replay(4, bound.stream.get()).ok());
  bound.runner.CheckResult();
  const std::vector<uint16_t> two = first.Read();
  for (size_t i = two.size() / 2; i < two.size(); ++i) ASSERT_EQ(two[i], 0U);
}

TEST(DecodeGraph, OwnsWhatTheSpecLeavesNull) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  GraphSpec spec = SpecOf(problem, runner);
  const GraphSpec bound = spec;
  spec.page_indptr = spec.page_indices = spec.last_page_len = nullptr;
  spec.layers[0].out = spec.layers[0].lse = nullptr;
  spec.layers[0].q = nullptr;
  const CudaStream stream = CudaStream::Create().value();
  DecodeGraph graph = DecodeGraph::Create(spec).value();
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  EXPECT_GE(graph.device_bytes(), static_cast<int64_t>(runner.out().size() * 4));
  const auto copy = [&](const void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(const_cast<void*>(to), from, bytes, cudaMemcpyDeviceToDevice,
                          stream.get()));
  };
  const GraphSpec& own = graph.spec();
  copy(own.page_indptr, bound.page_indptr, 5 * 4);
  copy(own.page_indices, bound.page_indices, static_cast<size_t>(spec.max_pages) * 4);
  copy(own.last_page_len, bound.last_page_len, 4 * 4);
  copy(own.layers[0].q, bound.layers[0].q, runner.out().size() * 2);
  ASSERT_TRUE(graph.Replay(stream.get()).ok());
  copy(runner.out().data(), own.layers[0].out, runner.out().size() * 2);
  copy(runner.lse().data(), own.layers[0].lse, runner.lse().size() * 4);
  runner.CheckResult();
}

// One Decode() call of a problem, captured alone.
Graph LoneCall(const Runner& runner) {
  const CudaStream stream = CudaStream::Create().value();
  CaptureScope scope = CaptureScope::Begin(stream.get()).value();
  EXPECT_TRUE(runner.Launch(stream.get()).ok());
  return scope.End().value();
}

TEST(DecodeGraph, HoldsTheKernelsOfItsLayersAndNothingElse) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  const Graph lone = LoneCall(runner);
  const std::vector<GraphNode> call = lone.Chain().value();
  const CudaStream stream = CudaStream::Create().value();
  for (const bool head : {false, true}) {
    for (const size_t layers : {1U, 3U}) {
      GraphSpec spec = SpecOf(problem, runner);
      spec.live_batch = head;
      spec.layers.resize(layers, spec.layers[0]);
      DecodeGraph graph = DecodeGraph::Create(spec).value();
      ASSERT_TRUE(graph.Capture(stream.get()).ok());
      const std::vector<GraphNode> nodes = graph.Nodes().value();
      // Ahead of the layers: the live batch, and the plan where layers share one.
      const size_t ahead = (head ? 1 : 0) + (layers > 1 ? 1 : 0);
      ASSERT_EQ(nodes.size(), ahead + layers * call.size());
      for (size_t i = 0; i < nodes.size(); ++i) {
        ASSERT_EQ(nodes[i].type, cudaGraphNodeTypeKernel);
        if (i < ahead) continue;
        const GraphNode& same = call[(i - ahead) % call.size()];
        EXPECT_EQ(nodes[i].kernel.func, same.kernel.func);
        EXPECT_EQ(nodes[i].kernel.gridDim.x, same.kernel.gridDim.x);
        EXPECT_EQ(nodes[i].kernel.sharedMemBytes, same.kernel.sharedMemBytes);
      }
    }
  }
}

TEST(DecodeGraph, RebindingEqualsAFreshCapture) {
  Bound a(kFourRequests);
  const Bound b({{3, 90, 0, 61}, 8, 2, 64, 16, kBrain, false, 20, 5.0F});
  const cudaGraphExec_t exec = a.graph.exec();
  ASSERT_TRUE(a.graph.Replay(3, a.stream.get()).ok());
  ASSERT_TRUE(a.graph.Rebind(SpecOf(b.problem, b.runner)).ok());
  EXPECT_EQ(a.graph.exec(), exec);
  b.runner.Forget();
  ASSERT_TRUE(a.graph.Replay(a.stream.get()).ok());
  ExpectLive(b, 3);  // the live batch stays
  ASSERT_TRUE(a.graph.Replay(4, a.stream.get()).ok());
  b.runner.CheckResult();
  const std::vector<uint16_t> rebound = b.runner.out().Read();
  Bound fresh({{3, 90, 0, 61}, 8, 2, 64, 16, kBrain, false, 20, 5.0F});
  fresh.ReplayAndCheck();
  EXPECT_EQ(fresh.runner.out().Read(), rebound);
  ASSERT_TRUE(a.graph.Rebind(SpecOf(a.problem, a.runner)).ok());
  a.ReplayAndCheck();
}

// The rows of the last token of each request, taken out of a cache and replaced by NaN.
std::vector<uint16_t> TakeLastRows(const Problem& problem, const void* cache) {
  const ProblemSpec& spec = problem.spec();
  const std::vector<int32_t> indptr = problem.indptr.Read(), indices = problem.indices.Read();
  const size_t row = static_cast<size_t>(spec.kv_heads) * spec.head_dim;
  std::vector<uint16_t> rows(spec.kv_lens.size() * row, 0xFFFF);
  for (size_t request = 0; request < spec.kv_lens.size(); ++request) {
    const int32_t position = spec.kv_lens[request] - 1;
    if (position < 0) continue;
    const int32_t page = indices[static_cast<size_t>(indptr[request] + position / spec.page_size)];
    const size_t slot = static_cast<size_t>(page) * spec.page_size + position % spec.page_size;
    auto* address = static_cast<uint16_t*>(const_cast<void*>(cache)) + slot * row;
    Check(cudaMemcpy(&rows[request * row], address, row * 2, cudaMemcpyDeviceToHost));
    Check(cudaMemset(address, 0xFF, row * 2));
  }
  return rows;
}

TEST(DecodeGraph, AppendsBeforeItAttends) {
  const Problem problem({{40, 0, 1, 17}, 8, 2, 64, 16, kBrain});
  const Runner runner(problem);
  GraphSpec spec = SpecOf(problem, runner);
  const DeviceArray<uint16_t> k(TakeLastRows(problem, spec.layers[0].k_cache));
  const DeviceArray<uint16_t> v(TakeLastRows(problem, spec.layers[0].v_cache));
  spec.append = true;
  spec.layers[0].k = k.data();
  spec.layers[0].v = v.data();
  spec.layers[0].k_strides = spec.layers[0].v_strides = {2 * 64, 64};
  const CudaStream stream = CudaStream::Create().value();
  DecodeGraph graph = DecodeGraph::Create(spec).value();
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  for (int replay = 0; replay < 2; ++replay) {
    ASSERT_TRUE(graph.Replay(stream.get()).ok());
    runner.CheckResult();
  }
  EXPECT_EQ(graph.Nodes().value().size(), LoneCall(runner).Chain().value().size() + 2);
}

TEST(DecodeGraph, IsRecordedIntoAnotherCapture) {
  Bound bound(kFourRequests);
  const CudaStream outer = CudaStream::Create().value();
  CaptureScope scope = CaptureScope::Begin(outer.get()).value();
  ASSERT_TRUE(bound.graph.Replay(3, outer.get()).ok());
  const Graph graph = scope.End().value();
  EXPECT_EQ(graph.Chain().value().size(), bound.graph.Nodes().value().size());
  const GraphExec exec = GraphExec::Instantiate(graph).value();
  bound.runner.Forget();
  ASSERT_TRUE(exec.Launch(outer.get()).ok());
  ExpectLive(bound, 3);
  bound.ReplayAndCheck();  // was not told of three
}

TEST(DecodeGraph, AFunctionMayIssueTheLayers) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  GraphSpec spec = SpecOf(problem, runner);
  spec.layers.clear();
  int calls = 0;
  DecodeGraph graph = DecodeGraph::Create(spec, [&](const GraphStep& step) {
                        ++calls;
                        DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
                        args.table = step.table;
                        return Decode(runner.plan(), args, step.workspace, step.stream);
                      }).value();
  const CudaStream stream = CudaStream::Create().value();
  EXPECT_EQ(calls, 0);
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  EXPECT_EQ(calls, 2);
  ASSERT_TRUE(graph.Replay(4, stream.get()).ok());
  runner.CheckResult();
  EXPECT_EQ(calls, 2);
}

TEST(DecodeGraphCache, CapturesABucketOnceAndRefusesMoreThanItsLimit) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  const CudaStream stream = CudaStream::Create().value();
  DecodeGraphCache cache(SpecOf(problem, runner), {.max_count = 2});
  const auto get = [&](int32_t live, int64_t pages) {
    return cache.Get(live, pages, stream.get()).value();
  };
  const std::shared_ptr<DecodeGraph> whole = get(3, 13);
  EXPECT_EQ(get(4, 13), whole);
  EXPECT_NE(get(1, 3), whole);
  EXPECT_EQ(cache.GetUsage().count, 2);
  EXPECT_EQ(cache.GetUsage().hits, 1);
  EXPECT_GT(cache.GetUsage().bytes, 0);
  get(2, 13);
  EXPECT_EQ(cache.GetUsage().count, 2);
  EXPECT_EQ(cache.GetUsage().evictions, 1);
  EXPECT_EQ(cache.Get(5, 1, stream.get()).status().message(),
            "live_batch: got 5, expected 0 to 4 (the capacity of the graph)");
  ASSERT_TRUE(whole->Replay(stream.get()).ok());  // lives on although it fell out
  runner.CheckResult();
}

}  // namespace
}  // namespace pgqa::testing
