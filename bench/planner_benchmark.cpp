// Host cost of planning a batch: launch plan, batch plan, whole schedule and validation.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "pgqa/launch_plan.h"
#include "pgqa/schedule.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

constexpr int32_t kPageSize = 16;
constexpr DeviceProperties kDevice{132, 232448};

// A page table of `batch` requests of 1 to max_len tokens, pages in order.
struct RaggedTable {
  std::vector<int32_t> indptr{0};
  std::vector<int32_t> indices;
  std::vector<int32_t> last_page_len;

  RaggedTable(int32_t batch, int32_t max_len) {
    std::mt19937 random(1);
    std::uniform_int_distribution<int32_t> length(1, max_len);
    for (int32_t request = 0; request < batch; ++request) {
      const int32_t pages = (length(random) + kPageSize - 1) / kPageSize;
      indptr.push_back(indptr.back() + pages);
      last_page_len.push_back(1 + request % kPageSize);
    }
    for (int32_t page = 0; page < indptr.back(); ++page) indices.push_back(page);
  }

  PageTableView View() const {
    PageTableView view;
    view.indptr = indptr.data();
    view.indices = indices.data();
    view.last_page_len = last_page_len.data();
    view.num_indices = static_cast<int64_t>(indices.size());
    view.num_pages = view.num_indices;
    view.batch = static_cast<int32_t>(last_page_len.size());
    view.page_size = kPageSize;
    return view;
  }
};

AttentionShape Shape(int32_t batch) {
  AttentionShape shape;
  shape.batch = batch;
  shape.num_query_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_dim = 128;
  shape.page_size = kPageSize;
  return shape;
}

void LaunchPlanGpu(benchmark::State& state) {
  const AttentionShape shape = Shape(64);
  for (auto _ : state) benchmark::DoNotOptimize(MakeGpuLaunchPlan(shape, kDevice));
}
BENCHMARK(LaunchPlanGpu);

// Arguments of all below: requests, longest length.
void PlanBatchHost(benchmark::State& state) {
  const RaggedTable table(static_cast<int32_t>(state.range(0)),
                          static_cast<int32_t>(state.range(1)));
  const PageTableView view = table.View();
  const PartitionConfig config = MakeGpuLaunchPlan(Shape(view.batch), kDevice)->partition;
  for (auto _ : state) benchmark::DoNotOptimize(PlanBatch(config, view, -1));
}

void MakeSchedule(benchmark::State& state) {
  const RaggedTable table(static_cast<int32_t>(state.range(0)),
                          static_cast<int32_t>(state.range(1)));
  const PageTableView view = table.View();
  const PartitionConfig config = MakeGpuLaunchPlan(Shape(view.batch), kDevice)->partition;
  int64_t num_pieces = 0;
  for (auto _ : state) {
    const absl::StatusOr<Schedule> schedule = Schedule::Make(config, view, -1);
    num_pieces = schedule->num_pieces();
  }
  state.counters["pieces"] = static_cast<double>(num_pieces);
}

void ValidateTable(benchmark::State& state) {
  const RaggedTable table(static_cast<int32_t>(state.range(0)),
                          static_cast<int32_t>(state.range(1)));
  const PageTableView view = table.View();
  for (auto _ : state) benchmark::DoNotOptimize(ValidatePageTable(view));
  state.counters["entries"] = static_cast<double>(view.num_indices);
}

void Batches(benchmark::internal::Benchmark* benchmark) {
  for (const int64_t batch : {64, 4096}) {
    for (const int64_t max_len : {32, 1024, 8192}) benchmark->Args({batch, max_len});
  }
  benchmark->Unit(benchmark::kMicrosecond);
}
BENCHMARK(PlanBatchHost)->Apply(Batches);
BENCHMARK(MakeSchedule)->Apply(Batches);
BENCHMARK(ValidateTable)->Apply(Batches);

}  // namespace
}  // namespace pgqa

BENCHMARK_MAIN();
