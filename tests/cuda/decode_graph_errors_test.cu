// What a decode graph refuses, and that captures that fail and other threads leave it usable.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pgqa/decode_graph.h"
#include "tests/cuda/bound_graph.cuh"

namespace pgqa::testing {
namespace {

TEST(DecodeGraphErrors, AFailedCaptureLeavesAllUsable) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  GraphSpec spec = SpecOf(problem, runner);
  spec.layers.clear();
  enum { kFine, kStatus, kAllocates } mode = kStatus;
  DecodeGraph graph = DecodeGraph::Create(spec, [&](const GraphStep& step) {
                        if (mode == kStatus) return absl::InvalidArgumentError("layer: of no use");
                        DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
                        args.table = step.table;
                        absl::Status status =
                            Decode(runner.plan(), args, step.workspace, step.stream);
                        void* memory = nullptr;
                        if (mode == kAllocates && cudaMalloc(&memory, 16) == cudaSuccess)
                          Check(cudaFree(memory));
                        return status;
                      }).value();
  const CudaStream stream = CudaStream::Create().value();
  EXPECT_EQ(graph.Capture(stream.get()).message(), "layer: of no use");
  mode = kAllocates;
  EXPECT_EQ(graph.Capture(stream.get()).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_TRUE(runner.Launch(stream.get()).ok());
  runner.CheckResult();
  mode = kFine;
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  ASSERT_TRUE(graph.Replay(stream.get()).ok());
  runner.CheckResult();
}

TEST(DecodeGraphErrors, RefusalsLaunchNothingAndLeaveItUsable) {
  Bound bound(kFourRequests);
  const GraphSpec good = SpecOf(bound.problem, bound.runner);
  bound.runner.Forget();
  const std::vector<uint16_t> before = bound.runner.out().Read();
  const auto expect = [&](const absl::Status& status, const std::string& start) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(std::string(status.message()).substr(0, start.size()), start);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  };
  expect(bound.graph.Replay(5, bound.stream.get()), "live_batch: got 5, expected 0 to 4");
  expect(bound.graph.Replay(-1, bound.stream.get()), "live_batch: got -1, expected 0 to 4");
  expect(bound.graph.CheckStep(4, good.max_pages + 1), "num_pages: got ");

  GraphSpec spec = good;
  spec.shape.dtype = DType::kFloat16;
  expect(bound.graph.Rebind(spec), "spec: got another shape");
  spec = good;
  spec.return_lse = false;
  expect(bound.graph.Rebind(spec), "spec: got another shape");
  spec = good;
  spec.layers.push_back(good.layers[0]);
  expect(bound.graph.Rebind(spec), "layers: got 2, expected 1");
  spec = good;
  spec.layers[0].q = nullptr;
  expect(bound.graph.Rebind(spec), "q of layer 0: got null");
  spec = good;
  const int32_t on_host[8] = {};
  spec.page_indptr = on_host;
  expect(bound.graph.Rebind(spec), "page_indptr: got memory that CUDA does not know");
  spec = good;
  void* freed = nullptr;
  Check(cudaMalloc(&freed, 64 << 20));
  Check(cudaFree(freed));
  spec.layers[0].k_cache = freed;
  expect(bound.graph.Rebind(spec), "k_cache of layer 0: got memory that CUDA does not know");
  spec = good;
  spec.layers[0].out = static_cast<char*>(good.layers[0].out) + 2;
  expect(bound.graph.Rebind(spec), "out: got an address that is not 16-byte aligned");
  expect(DecodeGraph::Create(spec).status(), "out: got an address that is not 16-byte aligned");

  Check(cudaDeviceSynchronize());
  EXPECT_EQ(bound.runner.out().Read(), before) << "a refused call wrote";
  bound.ReplayAndCheck();
}

TEST(DecodeGraphErrors, ReplayNeedsACaptureAndALiveGraph) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  const CudaStream stream = CudaStream::Create().value();
  GraphSpec spec = SpecOf(problem, runner);
  spec.live_batch = false;
  DecodeGraph graph = DecodeGraph::Create(spec).value();
  EXPECT_EQ(graph.Replay(stream.get()).message(),
            "graph: got no capture, expected Capture() before");
  EXPECT_EQ(graph.Rebind(spec).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(graph.exec(), nullptr);
  {
    CaptureScope scope = CaptureScope::Begin(stream.get()).value();
    EXPECT_EQ(graph.Capture(stream.get()).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(scope.End().ok());
  }
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  EXPECT_EQ(graph.Replay(1, stream.get()).message(),
            "live_batch: got 1, expected none: the graph was made without a head node");
  DecodeGraph moved = std::move(graph);
  EXPECT_EQ(graph.Replay(stream.get()).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(moved.Replay(stream.get()).ok());
  runner.CheckResult();
}

TEST(DecodeGraphErrors, AnotherDeviceIsRefused) {
  int devices = 0;
  Check(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two CUDA devices";
  Bound bound(kFourRequests);
  Check(cudaSetDevice(1));
  EXPECT_EQ(bound.graph.Replay(bound.stream.get()).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DecodeGraph::Create(SpecOf(bound.problem, bound.runner)).status().code(),
            absl::StatusCode::kInvalidArgument);
  Check(cudaSetDevice(0));
  bound.ReplayAndCheck();
}

TEST(DecodeGraphErrors, OtherThreadsMayAllocateDuringCapture) {
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) {
      void* memory = nullptr;
      Check(cudaMalloc(&memory, 1 << 20));
      Check(cudaFree(memory));
    }
  });
  Bound bound(kFourRequests);
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(bound.graph.Capture(bound.stream.get()).ok());
    ASSERT_TRUE(bound.graph.Rebind(SpecOf(bound.problem, bound.runner)).ok());
  }
  stop = true;
  other.join();
  bound.ReplayAndCheck();
}

}  // namespace
}  // namespace pgqa::testing
