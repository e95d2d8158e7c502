// Owners of captures and graphs: failed captures, refused streams, order of nodes, threads.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pgqa/cuda_graph.h"
#include "tests/cuda/device_memory.cuh"

namespace pgqa::testing {
namespace {

__global__ void AddKernel(int* value, int summand) { *value += summand; }

// Adds on `stream`; whether the launch was taken.
cudaError_t Add(int* value, int summand, cudaStream_t stream) {
  void* arguments[] = {&value, &summand};
  return cudaLaunchKernel(&AddKernel, dim3(1), dim3(1), arguments, 0, stream);
}

class CudaGraphTest : public ::testing::Test {
 protected:
  // A graph that adds each of `summands` in turn.
  Graph Captured(const std::vector<int>& summands) {
    absl::StatusOr<CaptureScope> scope = CaptureScope::Begin(stream_.get());
    EXPECT_TRUE(scope.ok()) << scope.status();
    for (const int summand : summands) Check(Add(value_.data(), summand, stream_.get()));
    absl::StatusOr<Graph> graph = scope->End();
    EXPECT_TRUE(graph.ok()) << graph.status();
    return *std::move(graph);
  }

  int ValueAfter(const GraphExec& exec) {
    value_.Fill(0);
    EXPECT_TRUE(exec.Launch(stream_.get()).ok());
    Check(cudaStreamSynchronize(stream_.get()));
    return value_.Read()[0];
  }

  // That nothing of a failed capture is left: the last error is clean and the stream can be
  // captured again.
  void ExpectUsable() {
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(IsCapturing(stream_.get()).value(), false);
    const Graph graph = Captured({1, 2});
    EXPECT_EQ(ValueAfter(GraphExec::Instantiate(graph).value()), 3);
  }

  CudaStream stream_ = CudaStream::Create().value();
  DeviceArray<int> value_{1};
};

TEST_F(CudaGraphTest, ReplaysWhatWasCaptured) {
  const Graph graph = Captured({1, 10, 100});
  const GraphExec exec = GraphExec::Instantiate(graph).value();
  EXPECT_TRUE(exec.Upload(stream_.get()).ok());
  EXPECT_EQ(ValueAfter(exec), 111);
}

TEST_F(CudaGraphTest, NodesComeInOrderAndTakeOtherParameters) {
  const Graph graph = Captured({1, 10, 100, 1000});
  const std::vector<GraphNode> nodes = graph.Chain().value();
  ASSERT_EQ(nodes.size(), 4U);
  for (size_t i = 0, expected = 1; i < 4; ++i, expected *= 10) {
    EXPECT_EQ(nodes[i].type, cudaGraphNodeTypeKernel);
    EXPECT_EQ(static_cast<size_t>(*static_cast<int*>(nodes[i].kernel.kernelParams[1])), expected);
  }
  const GraphExec exec = GraphExec::Instantiate(graph).value();
  const Graph other = Captured({5, 6, 7, 8});
  const std::vector<GraphNode> others = other.Chain().value();
  EXPECT_TRUE(exec.SetKernel(nodes[1].node, others[1].kernel).ok());
  EXPECT_EQ(ValueAfter(exec), 1107);
  EXPECT_EQ(ValueAfter(GraphExec::Instantiate(graph).value()), 1111) << "the graph itself changed";
}

TEST_F(CudaGraphTest, ABranchedGraphIsNoChain) {
  const CudaStream side = CudaStream::Create().value();
  cudaEvent_t fork = nullptr, join = nullptr;
  Check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  Check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  const DeviceArray<int> other(1);
  CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
  Check(Add(value_.data(), 1, stream_.get()));
  Check(cudaEventRecord(fork, stream_.get()));
  Check(cudaStreamWaitEvent(side.get(), fork, 0));
  Check(Add(other.data(), 1, side.get()));
  Check(Add(value_.data(), 1, stream_.get()));
  Check(cudaEventRecord(join, side.get()));
  Check(cudaStreamWaitEvent(stream_.get(), join, 0));
  Check(Add(value_.data(), 1, stream_.get()));
  const Graph graph = scope.End().value();
  EXPECT_EQ(graph.Chain().status().code(), absl::StatusCode::kFailedPrecondition);
  Check(cudaEventDestroy(fork));
  Check(cudaEventDestroy(join));
}

TEST_F(CudaGraphTest, AbandonedCapturesLeaveNothing) {
  {
    const CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
    Check(Add(value_.data(), 1, stream_.get()));
  }
  ExpectUsable();
}

TEST_F(CudaGraphTest, InvalidCapturesAreReportedAndLeaveNothing) {
  {
    CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
    Check(Add(value_.data(), 1, stream_.get()));
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 16), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(IsCapturing(stream_.get()).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(scope.End().status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(scope.End().status().message(), "capture: got one that has ended");
  }
  ExpectUsable();
  {
    const CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
    EXPECT_NE(cudaStreamSynchronize(stream_.get()), cudaSuccess);
  }
  ExpectUsable();
}

TEST_F(CudaGraphTest, UnjoinedWorkIsAnError) {
  const CudaStream side = CudaStream::Create().value();
  cudaEvent_t fork = nullptr;
  Check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  {
    CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
    Check(Add(value_.data(), 1, stream_.get()));
    Check(cudaEventRecord(fork, stream_.get()));
    Check(cudaStreamWaitEvent(side.get(), fork, 0));
    Check(Add(value_.data(), 1, side.get()));
    EXPECT_EQ(scope.End().status().code(), absl::StatusCode::kFailedPrecondition);
  }
  ExpectUsable();
  Check(cudaEventDestroy(fork));
}

TEST_F(CudaGraphTest, StreamsThatCanNotBeCapturedAreRefused) {
  for (const cudaStream_t legacy : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
    EXPECT_EQ(CaptureScope::Begin(legacy).status().message(),
              "stream: got the legacy default stream, expected one that can be captured");
  }
  CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
  EXPECT_EQ(CaptureScope::Begin(stream_.get()).status().message(),
            "stream: got one that is being captured, expected one that is not");
  Check(Add(value_.data(), 4, stream_.get()));
  const Graph graph = scope.End().value();
  EXPECT_EQ(ValueAfter(GraphExec::Instantiate(graph).value()), 4)
      << "the refusal broke the capture";
  ExpectUsable();
}

TEST_F(CudaGraphTest, OtherThreadsMayAllocateMeanwhile) {
  std::atomic<bool> stop = false;
  std::thread other([&] {
    const CudaStream own = CudaStream::Create().value();
    while (!stop) {
      void* memory = nullptr;
      Check(cudaMalloc(&memory, 1 << 20));
      Check(cudaMemsetAsync(memory, 0, 1 << 20, own.get()));
      Check(cudaStreamSynchronize(own.get()));  // the device as a whole may not be waited for
      Check(cudaFree(memory));
    }
  });
  for (int i = 0; i < 200; ++i)
    EXPECT_EQ(ValueAfter(GraphExec::Instantiate(Captured({i, 1})).value()), i + 1);
  stop = true;
  other.join();
}

TEST_F(CudaGraphTest, AMovedScopeEndsOnce) {
  CaptureScope scope = CaptureScope::Begin(stream_.get()).value();
  {
    CaptureScope moved = std::move(scope);
    Check(Add(value_.data(), 2, stream_.get()));
    EXPECT_EQ(ValueAfter(GraphExec::Instantiate(moved.End().value()).value()), 2);
  }
  EXPECT_EQ(scope.End().status().code(), absl::StatusCode::kFailedPrecondition);
  ExpectUsable();
}

}  // namespace
}  // namespace pgqa::testing
