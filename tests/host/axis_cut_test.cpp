// Heads a worker for much and little work, and axes of the grid.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/axis_cut.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "pgqa/schedule.h"
#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

TEST(HeadsPerWorkerTest, DoublesEachTimeTheWorkDoubles) {
  const PartitionConfig config = GpuConfig();
  const AxisCuts cuts = CutAxes(config);
  // 4000 tokens * heads a worker: 516 tiles of 128 tokens of 8 heads for 132 workers, rounded up.
  const int64_t first = 516;
  const std::vector<std::pair<int64_t, int32_t>> expected = {{0, 1},
                                                             {first - 1, 1},
                                                             {first, 2},
                                                             {2 * first - 1, 2},
                                                             {2 * first, 4},
                                                             {4 * first - 1, 4},
                                                             {4 * first, 8},
                                                             {1024 * first, 8},
                                                             {int64_t{1} << 50, 8}};
  for (const auto& [tiles, heads] : expected) {
    EXPECT_EQ(cuts.HeadsPerWorker(config, tiles, 8 * tiles), heads) << tiles;
    if (tiles > kInt32Max) continue;
    EXPECT_EQ(cuts.HeadsPerWorker(config, static_cast<int32_t>(tiles), int32_t{0}), heads) << tiles;
  }
}

TEST(HeadsPerWorkerTest, StaysWithinTheMaximum) {
  PartitionConfig config = GpuConfig();
  for (const int32_t most : {1, 2, 4}) {
    config.max_heads_per_worker = most;
    EXPECT_EQ(CutAxes(config).HeadsPerWorker(config, int64_t{1} << 50, int64_t{1} << 50), most);
  }
}

// 132 workers, 8 heads, tiles of 128 tokens for one head down to 16 for eight.
TEST(HeadsPerWorkerTest, ShortRequestsTakeMoreHeads) {
  PartitionConfig config = GpuConfig();
  config.max_heads_by_work = 4;
  config.min_fill_eighths = 6;
  const auto heads_for = [&](size_t batch, int64_t tokens) {
    const HostTable table = TableOfLengths(std::vector<int64_t>(batch, tokens), 16);
    return PlanBatch(config, table.View(), -1).partition.heads_per_worker;
  };
  EXPECT_EQ(heads_for(16, 16), 1);  // one tile a worker as it is
  EXPECT_EQ(heads_for(17, 16), 2);
  EXPECT_EQ(heads_for(64, 16), 4);
  EXPECT_EQ(heads_for(67, 16), 8);
  EXPECT_EQ(heads_for(4096, 16), 8);
  EXPECT_EQ(heads_for(100, 80), 8);  // five of eight warps
  EXPECT_EQ(heads_for(100, 96), 1);  // six
  EXPECT_EQ(heads_for(64, 80), 4);
  EXPECT_EQ(heads_for(17, 80), 2);
  EXPECT_EQ(heads_for(4096, 2000), 4);
}

TEST(HeadsPerWorkerTest, ThresholdsOfAnySizeDoNotOverflow) {
  PartitionConfig config = GpuConfig();
  config.double_heads_from = kInt32Max;
  config.num_workers = kInt32Max;
  config.stage_tokens = 1;
  EXPECT_EQ(CutAxes(config).HeadsPerWorker(config, (1 << 27) - 1, 1), 1);
  EXPECT_EQ(CutAxes(config).HeadsPerWorker(config, kInt32Max, 1), 8);
}

TEST(CutAxesTest, OneAxisAHeadGroupOnlyWhereNineTenthsOfTheWorkersStayBusy) {
  PartitionConfig config = GpuConfig();
  struct Case {
    int32_t workers, heads, axes, workers_per_axis;
  };
  for (const Case& c : std::vector<Case>{{132, 8, 8, 16},
                                         {132, 1, 1, 132},
                                         {132, 100, 1, 132},
                                         {132, 120, 120, 1},
                                         {20, 18, 18, 1},
                                         {20, 17, 1, 20},
                                         {2, 8, 1, 2},
                                         {132, 50, 1, 132},
                                         {148, 8, 8, 18}}) {
    SCOPED_TRACE(testing::Message() << c.workers << " workers, " << c.heads << " heads");
    config.num_workers = c.workers;
    config.num_heads = c.heads;
    const AxisCut cut = CutAxes(config, 1);
    EXPECT_EQ(cut.num_axes, c.axes);
    EXPECT_EQ(cut.workers_per_axis, c.workers_per_axis);
    EXPECT_EQ(cut.groups_per_axis * c.axes, c.heads);
  }
}

}  // namespace
}  // namespace pgqa
