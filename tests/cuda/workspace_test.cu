// Workspaces without torch: the pool of eager calls, and graphs over memory that is anything between replays.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cuda/arrival.cuh"
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
  return pool.Run(runner.plan().workspace_bytes, stream, [&](const WorkspaceView& view) {
    return Decode(runner.plan(), problem.Args(runner.out().data(), lse), view, stream);
  });
}

// The memory that the pool lends to a call that does nothing.
void* MemoryOf(WorkspacePool& pool, int64_t bytes, cudaStream_t stream) {
  void* memory = nullptr;
  EXPECT_TRUE(pool.Run(bytes, stream,
                       [&](const WorkspaceView& view) {
                         memory = view.data;
                         EXPECT_GE(view.bytes, bytes);
                         return absl::OkStatus();
                       })
                  .ok());
  return memory;
}

TEST(WorkspacePool, OneForEachStreamAndGrowing) {
  WorkspacePool pool;
  const Stream a, b;
  void* first = MemoryOf(pool, 1000, a.get());
  EXPECT_EQ(MemoryOf(pool, 500, a.get()), first);
  EXPECT_NE(MemoryOf(pool, 1000, b.get()), first);
  EXPECT_EQ(pool.GetUsage().workspaces, 2);
  MemoryOf(pool, 1 << 20, a.get());
  EXPECT_EQ(pool.GetUsage().workspaces, 2);
  EXPECT_LT(pool.GetUsage().bytes, 2 << 20);
}

TEST(WorkspacePool, IsBounded) {
  WorkspacePool pool(3);
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 10; ++i) {
    streams.push_back(std::make_unique<Stream>());
    MemoryOf(pool, 4096, streams.back()->get());
  }
  EXPECT_EQ(pool.GetUsage().workspaces, 3);
}

TEST(WorkspacePool, FailureOfTheLaunchComesBack) {
  WorkspacePool pool;
  const absl::Status status =
      pool.Run(16, nullptr, [](const WorkspaceView&) { return absl::InternalError("the launch"); });
  EXPECT_EQ(status.message(), "the launch");
}

TEST(WorkspacePool, RefusesCaptures) {
  WorkspacePool pool;
  const Stream stream;
  Check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  const absl::Status status =
      pool.Run(16, stream.get(), [](const WorkspaceView&) { return absl::OkStatus(); });
  cudaGraph_t graph = nullptr;
  Check(cudaStreamEndCapture(stream.get(), &graph));
  Check(cudaGraphDestroy(graph));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(MemoryOf(pool, 16, stream.get()), nullptr);
}

// A graph of `calls` captured calls in the runner's workspace.
cudaGraphExec_t Capture(const Runner& runner, cudaStream_t stream, int calls) {
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) {
    const absl::Status status = runner.Launch(stream);
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

TEST(Workspace, MayHoldAnythingBetweenReplays) {
  const Problem problem({{700, 20, 3000}, 4, 1, 64, 16, DType::kBFloat16});
  const Runner runner(problem);
  const Stream stream;
  cudaGraphExec_t exec = Capture(runner, stream.get(), 3);
  ASSERT_TRUE(runner.Launch(stream.get()).ok());
  runner.CheckResult();
  const std::vector<uint16_t> expected = runner.out().Read();
  for (const int fill : {0xFF, 0x00, -1, 0x7F, -1, 0x9E, 0x3B}) {
    if (fill >= 0) runner.workspace().Fill(fill);
    runner.out().Fill(0xFF);
    Check(cudaDeviceSynchronize());
    Check(cudaGraphLaunch(exec, stream.get()));
    Check(cudaStreamSynchronize(stream.get()));
    EXPECT_EQ(runner.out().Read(), expected) << "fill " << fill;
  }
  Check(cudaGraphExecDestroy(exec));
}

// Every counter holds another value without the tag, values close to it among them.
TEST(Workspace, CountersWithoutTheTagCountAsNone) {
  const Problem problem({{9000, 40}, 8, 2, 64, 16, DType::kFloat16});
  const Runner runner(problem);
  ASSERT_TRUE(runner.Launch().ok());
  runner.CheckResult();
  const std::vector<uint16_t> expected = runner.out().Read();
  const auto num_counters = static_cast<size_t>(runner.plan().counter_bytes / 8);
  std::mt19937_64 random(5);
  std::vector<uint64_t> counters(num_counters);
  for (int round = 0; round < 50; ++round) {
    for (uint64_t& counter : counters) {
      counter = random();
      if (round % 2 == 1)
        counter = (kCounterTag ^ (uint64_t{1} << (20 + counter % 44))) + counter % 7;
    }
    Check(cudaMemcpy(runner.workspace().data(), counters.data(), num_counters * 8,
                     cudaMemcpyHostToDevice));
    for (int run = 0; run < 2; ++run) {
      runner.out().Fill(0xFF);
      ASSERT_TRUE(runner.Launch().ok());
      Check(cudaDeviceSynchronize());
      ASSERT_EQ(runner.out().Read(), expected) << "round " << round << ", run " << run;
    }
  }
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
