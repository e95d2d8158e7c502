// The workspace pool without torch: eager and captured calls, growth, graphs that come and go.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "tests/cuda/decode_run.cuh"

namespace pgqa::testing {
namespace {

class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { Check(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Runs a problem's call through a pool.
absl::Status RunInPool(WorkspacePool& pool, const Runner& runner, const Problem& problem,
                       float* lse, cudaStream_t stream) {
  return pool.Run(runner.plan().workspace_bytes, runner.plan().num_counters, stream,
                  [&](const WorkspaceView& view) {
                    return Decode(runner.plan(), problem.Args(runner.out().data(), lse), view,
                                  stream);
                  });
}

// The partials that the pool lends to a call that does nothing.
void* PartialsOf(WorkspacePool& pool, int64_t bytes, cudaStream_t stream) {
  void* partials = nullptr;
  EXPECT_TRUE(pool.Run(bytes, 4, stream,
                       [&](const WorkspaceView& view) {
                         partials = view.partials;
                         EXPECT_GE(view.partial_bytes, bytes);
                         EXPECT_GE(view.num_counters, 4);
                         return absl::OkStatus();
                       })
                  .ok());
  return partials;
}

TEST(WorkspacePool, OneForEachStreamAndGrowing) {
  WorkspacePool pool;
  const Stream a, b;
  void* first = PartialsOf(pool, 1000, a.get());
  EXPECT_EQ(PartialsOf(pool, 500, a.get()), first);
  EXPECT_NE(PartialsOf(pool, 1000, b.get()), first);
  EXPECT_EQ(pool.GetUsage().eager_workspaces, 2);
  PartialsOf(pool, 1 << 20, a.get());
  EXPECT_EQ(pool.GetUsage().eager_workspaces, 2);
  EXPECT_LT(pool.GetUsage().bytes, 2 << 20);
}

TEST(WorkspacePool, IsBounded) {
  WorkspacePool pool(3);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 10; ++i) {
    streams.push_back(std::make_unique<Stream>());
    PartialsOf(pool, 4096, streams.back()->get());
  }
  EXPECT_EQ(pool.GetUsage().eager_workspaces, 3);
}

TEST(WorkspacePool, FailureOfTheLaunchComesBack) {
  WorkspacePool pool;
  const absl::Status status = pool.Run(
      16, 1, nullptr, [](const WorkspaceView&) { return absl::InternalError("the launch"); });
  EXPECT_EQ(status.message(), "the launch");
}

// A graph of `calls` captured calls, made from cold.
cudaGraphExec_t Capture(WorkspacePool& pool, const Runner& runner, const Problem& problem,
                        cudaStream_t stream, int calls) {
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) {
    const absl::Status status = RunInPool(pool, runner, problem, nullptr, stream);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  cudaGraph_t graph = nullptr;
  Check(cudaStreamEndCapture(stream, &graph));
  size_t num_nodes = 0;
  Check(cudaGraphGetNodes(graph, nullptr, &num_nodes));
  EXPECT_EQ(num_nodes, static_cast<size_t>(calls)) << "one kernel a call and nothing else";
  cudaGraphExec_t exec = nullptr;
  Check(cudaGraphInstantiate(&exec, graph, 0));
  Check(cudaGraphDestroy(graph));
  return exec;
}

// The driver runs the destructors of a graph's objects in its own time.
WorkspacePool::Usage UsageOnceGraphsAreGone(const WorkspacePool& pool, int32_t graphs) {
  for (int i = 0; i < 500 && pool.GetUsage().graph_workspaces > graphs; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return pool.GetUsage();
}

TEST(WorkspacePool, CapturedCallsKeepTheirsAsLongAsTheGraph) {
  WorkspacePool pool;
  const Problem problem({{700, 20}, 4, 1, 64, 16, DType::kBFloat16});
  const Runner runner(problem);
  const Stream stream;
  cudaGraphExec_t exec = Capture(pool, runner, problem, stream.get(), 3);
  EXPECT_EQ(pool.GetUsage().graph_workspaces, 1);
  for (int replay = 0; replay < 3; ++replay) {
    runner.out().Fill(0xFF);
    Check(cudaGraphLaunch(exec, stream.get()));
    Check(cudaStreamSynchronize(stream.get()));
    const std::vector<uint16_t> replayed = runner.out().Read();
    ASSERT_TRUE(runner.Launch(stream.get()).ok());
    runner.CheckResult();
    EXPECT_EQ(runner.out().Read(), replayed);
  }
  Check(cudaGraphExecDestroy(exec));
  const WorkspacePool::Usage usage = UsageOnceGraphsAreGone(pool, 0);
  EXPECT_EQ(usage.graph_workspaces, 0);
  EXPECT_EQ(usage.free_workspaces, 1);
}

TEST(WorkspacePool, GraphsThatComeAndGoReuseMemory) {
  WorkspacePool pool;
  const Problem problem({{700, 20}, 4, 1, 64, 16, DType::kFloat16});
  const Runner runner(problem);
  const Stream stream;
  for (int i = 0; i < 30; ++i) {
    cudaGraphExec_t exec = Capture(pool, runner, problem, stream.get(), 1);
    Check(cudaGraphLaunch(exec, stream.get()));
    Check(cudaStreamSynchronize(stream.get()));
    Check(cudaGraphExecDestroy(exec));
    UsageOnceGraphsAreGone(pool, 0);
  }
  EXPECT_EQ(pool.GetUsage().free_workspaces, 1);
}

TEST(WorkspacePool, GraphsOutliveThePool) {
  const Problem problem({{700, 20}, 4, 1, 64, 16, DType::kFloat16});
  const Runner runner(problem);
  const Stream stream;
  cudaGraphExec_t exec = nullptr;
  {
    WorkspacePool pool;
    exec = Capture(pool, runner, problem, stream.get(), 1);
  }
  Check(cudaGraphLaunch(exec, stream.get()));
  Check(cudaStreamSynchronize(stream.get()));
  const std::vector<uint16_t> replayed = runner.out().Read();
  ASSERT_TRUE(runner.Launch(stream.get()).ok());
  runner.CheckResult();
  EXPECT_EQ(runner.out().Read(), replayed);
  Check(cudaGraphExecDestroy(exec));
}

TEST(WorkspacePool, ThreadsShareOne) {
  WorkspacePool pool;
  const Problem problem({{900, 3, 0, 40}, 8, 2, 64, 16, DType::kBFloat16});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      const Runner runner(problem);
      const Stream stream;
      Check(cudaDeviceSynchronize());
      ASSERT_TRUE(runner.Launch(stream.get()).ok());
      Check(cudaStreamSynchronize(stream.get()));
      const std::vector<uint16_t> expected = runner.out().Read();
      for (int i = 0; i < 20; ++i) {
        runner.out().Fill(0xFF);
        Check(cudaDeviceSynchronize());
        ASSERT_TRUE(RunInPool(pool, runner, problem, nullptr, stream.get()).ok());
        Check(cudaStreamSynchronize(stream.get()));
        ASSERT_EQ(runner.out().Read(), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace pgqa::testing
