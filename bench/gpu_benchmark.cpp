// Times of single kernels in a captured graph, and what each way into a call costs the host.
// SPDX-License-Identifier: Apache-2.0
//
// `kernel/...`: a graph holds many launches, one after another through the pages of a pool larger
// than the L2 cache; the time between the events around its replay, for each launch. A launch
// overlaps with the end of the one before it, so this is less than a call takes on its own, which
// bench.py measures.
// `host/...`: wall time of a call in a hot loop that begins on an idle GPU and makes fewer calls
// than the launch queue holds.
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "bench/gpu_workload.h"
#include "graphs/live_rows.h"
#include "pgqa/append.h"
#include "pgqa/cuda_graph.h"
#include "pgqa/decode.h"
#include "pgqa/decode_graph.h"
#include "pgqa/launch_plan.h"

namespace pgqa::bench {
namespace {

constexpr int32_t kLaunches = 16;  // in a graph
constexpr int32_t kHostCalls = 200;

// A launch of number `launch` on `stream`.
using Launch = absl::FunctionRef<absl::Status(int32_t launch, cudaStream_t stream)>;

class Event {
 public:
  Event() { Check(cudaEventCreate(&event_)); }
  ~Event() { (void)cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Seconds of one launch among those of a graph, as the manual time of each iteration.
void TimeInGraph(benchmark::State& state, Launch launch) {
  const CudaStream stream = Value(CudaStream::Create());
  Check(launch(0, stream.get()));  // loads the kernel
  CaptureScope scope = Value(CaptureScope::Begin(stream.get()));
  for (int32_t i = 0; i < kLaunches; ++i) Check(launch(i, stream.get()));
  const Graph graph = Value(scope.End());
  const GraphExec exec = Value(GraphExec::Instantiate(graph));
  Check(exec.Upload(stream.get()));
  const Event begin, end;
  for (auto _ : state) {
    Check(cudaEventRecord(begin.get(), stream.get()));
    Check(exec.Launch(stream.get()));
    Check(cudaEventRecord(end.get(), stream.get()));
    Check(cudaEventSynchronize(end.get()));
    float milliseconds = 0.0F;
    Check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    state.SetIterationTime(milliseconds / 1e3 / kLaunches);
  }
}

// Seconds of host time of one call, as the manual time of each iteration.
void TimeOnHost(benchmark::State& state, Launch call) {
  const CudaStream stream = Value(CudaStream::Create());
  Check(call(0, stream.get()));
  for (auto _ : state) {
    Check(cudaStreamSynchronize(stream.get()));
    const auto begin = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < kHostCalls; ++i) {
      if (!call(i, stream.get()).ok()) Fail("a call failed");
    }
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    state.SetIterationTime(elapsed.count() / kHostCalls);
  }
  Check(cudaStreamSynchronize(stream.get()));
}

void DecodeKernel(benchmark::State& state, const AttentionShape& shape, int32_t kv_len) {
  const Workload work(shape, kv_len);
  TimeInGraph(state, [&](int32_t launch, cudaStream_t stream) {
    return Decode(work.plan(), work.Decode(launch), work.workspace(), stream);
  });
  state.SetBytesProcessed(state.iterations() * work.LiveBytesPerCall());
}

void AppendKernel(benchmark::State& state, const AttentionShape& shape) {
  const Workload work(shape, /*kv_len=*/64);
  TimeInGraph(state, [&](int32_t launch, cudaStream_t stream) {
    return Append(shape, work.Append(launch), stream);
  });
}

void LiveRowsKernel(benchmark::State& state, int32_t batch) {
  const DeviceBytes indptr((int64_t{batch} + 1) * int64_t{sizeof(int32_t)}, 0);
  const DeviceBytes live((int64_t{batch} + 1) * int64_t{sizeof(int32_t)}, 0);
  LiveRowsArgs args;
  args.table.indptr = indptr.ints();
  args.table.batch = batch;
  args.live_rows = static_cast<int32_t*>(live.data());
  args.live_batch = batch / 2;
  TimeInGraph(state, [&](int32_t, cudaStream_t stream) { return LaunchLiveRows(args, stream); });
}

void HostDecode(benchmark::State& state, const AttentionShape& shape, int32_t kv_len) {
  const Workload work(shape, kv_len);
  TimeOnHost(state, [&](int32_t, cudaStream_t stream) {
    return Decode(work.plan(), work.Decode(0), work.workspace(), stream);
  });
}

void HostAppend(benchmark::State& state, const AttentionShape& shape, int32_t kv_len) {
  const Workload work(shape, kv_len);
  TimeOnHost(state,
             [&](int32_t, cudaStream_t stream) { return Append(shape, work.Append(0), stream); });
}

enum class GraphCall { kReplay, kReplayLiveBatch, kRebind };

// kReplayLiveBatch: another live batch each time. kRebind: alternates between two outputs.
void HostGraph(benchmark::State& state, const AttentionShape& shape, int32_t kv_len,
               GraphCall path) {
  const Workload work(shape, kv_len);
  const GraphSpec specs[] = {work.Step(/*other_out=*/false), work.Step(/*other_out=*/true)};
  DecodeGraph graph = Value(DecodeGraph::Create(specs[0]));
  {
    const CudaStream stream = Value(CudaStream::Create());
    Check(graph.Capture(stream.get()));
    Check(cudaStreamSynchronize(stream.get()));
  }
  TimeOnHost(state, [&](int32_t call, cudaStream_t stream) {
    switch (path) {
      case GraphCall::kReplayLiveBatch:
        return graph.Replay(shape.batch - call % 2, stream);
      case GraphCall::kRebind:
        return graph.Rebind(specs[call % 2]);
      case GraphCall::kReplay:
        break;
    }
    return graph.Replay(stream);
  });
}

void HostLaunchPlan(benchmark::State& state, const AttentionShape& shape) {
  const DeviceProperties device = Value(QueryDevice(0));
  for (auto _ : state) benchmark::DoNotOptimize(MakeGpuLaunchPlan(shape, device));
}

AttentionShape ShapeOf(int32_t batch, int32_t query_heads = 32, int32_t kv_heads = 8,
                       int32_t head_dim = 128, int32_t page_size = 16,
                       PosEncoding pos_encoding = PosEncoding::kNone) {
  return {batch, query_heads, kv_heads, head_dim, page_size, DType::kBFloat16, pos_encoding};
}

template <class... Args>
benchmark::internal::Benchmark* Register(const std::string& name, Args&&... args) {
  return benchmark::RegisterBenchmark(name.c_str(), std::forward<Args>(args)...)
      ->Unit(benchmark::kMicrosecond);
}

void RegisterKernels() {
  const struct {
    const char* name;
    AttentionShape shape;
    int32_t kv_len;
  } decodes[] = {
      {"1x1024", ShapeOf(1), 1024},
      {"1x32768", ShapeOf(1), 32768},
      {"32x4096", ShapeOf(32), 4096},
      {"64x64", ShapeOf(64), 64},
      {"32x4096/rope", ShapeOf(32, 32, 8, 128, 16, PosEncoding::kRopeLlama), 4096},
      {"32x4096/group_8", ShapeOf(32, 64), 4096},
      {"32x4096/page_1", ShapeOf(32, 32, 8, 128, 1), 4096},
      {"32x4096/head_dim_64", ShapeOf(32, 32, 8, 64), 4096},
      {"32x4096/head_dim_256", ShapeOf(32, 32, 4, 256), 4096},
  };
  for (const auto& decode : decodes) {
    Register(std::string("kernel/decode/") + decode.name, DecodeKernel, decode.shape, decode.kv_len)
        ->UseManualTime();
  }
  for (const int32_t batch : {1, 64, 256}) {
    Register("kernel/append/" + std::to_string(batch), AppendKernel, ShapeOf(batch))
        ->UseManualTime();
  }
  for (const int32_t batch : {64, 4096}) {
    Register("kernel/live_rows/" + std::to_string(batch), LiveRowsKernel, batch)->UseManualTime();
  }
}

void RegisterHostCosts() {
  const AttentionShape shape = ShapeOf(64);
  constexpr int32_t kKvLen = 64;
  Register("host/Decode", HostDecode, shape, kKvLen)->UseManualTime();
  Register("host/Append", HostAppend, shape, kKvLen)->UseManualTime();
  Register("host/Replay", HostGraph, shape, kKvLen, GraphCall::kReplay)->UseManualTime();
  Register("host/Replay_live_batch", HostGraph, shape, kKvLen, GraphCall::kReplayLiveBatch)
      ->UseManualTime();
  Register("host/Rebind", HostGraph, shape, kKvLen, GraphCall::kRebind)->UseManualTime();
  Register("host/MakeGpuLaunchPlan", HostLaunchPlan, shape);
}

}  // namespace
}  // namespace pgqa::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  int num_devices = 0;
  if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices == 0) {
    std::cout << "gpu_benchmark skipped: it needs a GPU\n";
    return 0;
  }
  pgqa::bench::RegisterKernels();
  pgqa::bench::RegisterHostCosts();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
