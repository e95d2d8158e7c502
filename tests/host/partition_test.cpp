// Properties of the work partition by random search, and its edge values.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/host/partition_checker.h"
#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

std::vector<int64_t> LiveLengths(std::vector<int64_t> lengths, int32_t window_left) {
  if (window_left < 0) return lengths;
  for (int64_t& length : lengths) length = std::min<int64_t>(length, int64_t{window_left} + 1);
  return lengths;
}

PartitionChecker Checked(const PartitionConfig& config, const std::vector<int64_t>& lengths,
                         int32_t page_size = 16, int32_t window_left = -1) {
  const HostTable table = TableOfLengths(lengths, page_size);
  PartitionChecker checker(config, table.View(), window_left, LiveLengths(lengths, window_left));
  checker.CheckAll();
  return checker;
}

TEST(PartitionTest, HoldsForRandomBatches) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomSource random(seed);
    const PartitionConfig config = random.Config();
    const std::vector<int64_t> lengths = random.Lengths(24);
    const auto page_size = random.Of<int32_t>({1, 3, 5, 16, 17, 96, 512});
    Checked(config, lengths, page_size, random.Window());
    if (HasFailure()) return;
  }
}

TEST(PartitionTest, HoldsForEveryNumberOfHeadsAndWorkers) {
  const std::vector<int64_t> lengths = {37, 0, 1, 260};
  for (int32_t heads = 1; heads <= 100; ++heads) {
    for (int32_t workers = 1; workers <= 150; ++workers) {
      SCOPED_TRACE(testing::Message() << heads << " heads, " << workers << " workers");
      PartitionConfig config = GpuConfig();
      config.num_heads = heads;
      config.num_workers = workers;
      config.warps_per_worker = 2;
      config.max_heads_per_worker = heads % 2 == 0 ? 2 : 1;
      config.double_heads_from = 1 + workers % 40;
      Checked(config, lengths);
      if (HasFailure()) return;
    }
  }
}

TEST(PartitionTest, WorkerOfInvertsShareOf) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    RandomSource random(seed);
    const PartitionConfig config = random.Config();
    const Partition p = MakePartition(config, CutAxes(config, 1), 1, random.In(0, 400));
    int64_t unit = 0;
    for (int32_t worker = 0; worker < p.workers_per_axis; ++worker) {
      const Share share = p.ShareOf(worker);
      ASSERT_EQ(share.begin, unit) << "seed " << seed;
      for (; unit < share.end; ++unit) ASSERT_EQ(p.WorkerOf(unit), worker) << "seed " << seed;
    }
    ASSERT_EQ(unit, p.UnitsPerAxis()) << "seed " << seed;
  }
}

TEST(PartitionTest, WorkerOfInvertsShareOfBeyond32Bits) {
  PartitionConfig config = GpuConfig();
  for (const int64_t tiles : {(int64_t{1} << 32) - 1, int64_t{1} << 32, (int64_t{1} << 52) + 7}) {
    for (const int32_t heads : {1, 3, 8}) {
      config.num_heads = heads;
      const Partition p = MakePartition(config, CutAxes(config, 1), 1, tiles);
      for (int32_t worker = 0; worker < p.workers_per_axis; ++worker) {
        const Share share = p.ShareOf(worker);
        ASSERT_EQ(p.WorkerOf(share.begin), worker);
        ASSERT_EQ(p.WorkerOf(share.end - 1), worker);
      }
      ASSERT_EQ(p.ShareOf(p.workers_per_axis - 1).end, p.UnitsPerAxis());
    }
  }
}

TEST(PartitionTest, NoRequests) { EXPECT_TRUE(Checked(GpuConfig(), {}).progress().empty()); }

TEST(PartitionTest, AllRequestsEmpty) {
  EXPECT_TRUE(Checked(GpuConfig(), std::vector<int64_t>(64, 0)).progress().empty());
}

TEST(PartitionTest, EmptyRequestsOwnNothingWhereverTheyAre) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {0, 900, 70}, {900, 0, 70}, {900, 70, 0}, {0, 0, 900, 0, 0, 70, 0, 0}, {0, 0, 0, 1}}) {
    const PartitionChecker checker = Checked(GpuConfig(), lengths);
    for (const auto& [key, progress] : checker.progress()) {
      EXPECT_GT(lengths[static_cast<size_t>(key.first)], 0);
    }
  }
}

TEST(PartitionTest, OneGiantAmongSmallIsSpreadOverNearlyAllWorkers) {
  std::vector<int64_t> lengths(63, 16);
  lengths.insert(lengths.begin() + 31, 1 << 20);
  PartitionConfig config = GpuConfig();
  config.max_heads_per_worker = 1;
  const PartitionChecker checker = Checked(config, lengths);
  for (int32_t head = 0; head < 8; ++head) {
    EXPECT_GE(checker.progress().at({31, head}).num_pieces, 15);  // of 16 workers an axis
  }
}

TEST(PartitionTest, ManyRequests) {
  std::vector<int64_t> lengths(4096);
  RandomSource random(7);
  for (int64_t& length : lengths) length = random.In(0, 3) == 0 ? 0 : random.In(1, 3000);
  EXPECT_EQ(Checked(GpuConfig(), lengths).plan().partition.heads_per_worker, 8);
  // Requests of one token still fill a tile of a head each.
  for (int64_t& length : lengths) length = std::min<int64_t>(length, 1);
  EXPECT_EQ(Checked(GpuConfig(), lengths).plan().partition.heads_per_worker, 8);
  EXPECT_EQ(Checked(GpuConfig(), std::vector<int64_t>(515, 1)).plan().partition.heads_per_worker,
            1);
  EXPECT_EQ(Checked(GpuConfig(), std::vector<int64_t>(516, 1)).plan().partition.heads_per_worker,
            2);
}

TEST(PartitionTest, SharesOfOneTile) {
  PartitionConfig config = GpuConfig();
  config.max_heads_per_worker = 1;
  const int64_t tile = 128;
  const PartitionChecker checker = Checked(config, {16 * tile});  // 16 workers an axis
  EXPECT_EQ(checker.plan().partition.share, 1);
  EXPECT_EQ(checker.plan().partition.extra, 0);
  EXPECT_EQ(checker.progress().at({0, 0}).num_pieces, 16);
}

TEST(PartitionTest, WindowSmallerThanATileLeavesOneTileARequest) {
  for (const int32_t window_left : {0, 1, 15, 126, 127}) {
    const PartitionChecker checker = Checked(GpuConfig(), {5, 100000, 0, 128}, 16, window_left);
    EXPECT_EQ(checker.plan().partition.tiles, 3) << "window_left " << window_left;
  }
  EXPECT_EQ(Checked(GpuConfig(), {5, 100000, 0, 128}, 16, 128).plan().partition.tiles, 4);
}

TEST(PartitionTest, LengthsAtTheLimitOf32Bits) {
  const int64_t most = kInt32Max;
  for (const int32_t window_left : {-1, 0, kInt32Max - 1, kInt32Max}) {
    SCOPED_TRACE(window_left);
    Checked(GpuConfig(), {most}, 1, window_left);
    Checked(GpuConfig(), {0, most - 5, 0, 1, 4, 0}, 1, window_left);
    Checked(GpuConfig(), {most * 512}, 512, window_left);
    Checked(GpuConfig(), {most * 256 + 1, most * 128, 77}, 512, window_left);
  }
}

TEST(PartitionTest, MalformedTablesAreCutLikeAnyOther) {
  const std::vector<int32_t> extremes = {0, 1, -1, kInt32Max, std::numeric_limits<int32_t>::min()};
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomSource random(seed);
    const auto value = [&]() -> int32_t {
      return random.In(0, 2) == 0 ? random.Of(extremes) : static_cast<int32_t>(random.In(-40, 90));
    };
    HostTable table;
    table.page_size = static_cast<int32_t>(random.In(1, 40));
    table.num_indices = random.In(0, 60);
    table.indptr = {value()};
    const int64_t batch = random.In(1, 12);
    std::vector<int64_t> live_lengths;
    const int32_t window_left = random.Window();
    for (int64_t request = 0; request < batch; ++request) {
      const int64_t begin = std::max<int64_t>(table.indptr.back(), 0);
      table.indptr.push_back(value());
      table.last_page_len.push_back(value());
      const int64_t pages =
          std::max<int64_t>(std::min<int64_t>(table.indptr.back(), table.num_indices) - begin, 0);
      const int64_t length = (pages - 1) * table.page_size + table.last_page_len.back();
      live_lengths.push_back(pages == 0 ? 0
                                        : std::clamp<int64_t>(length, 0, pages * table.page_size));
    }
    PartitionChecker(random.Config(), table.View(), window_left,
                     LiveLengths(live_lengths, window_left))
        .CheckAll();
    if (HasFailure()) return;
  }
}

TEST(FloorDivTest, IsExactOnBothSidesOf32Bits) {
  for (const int64_t a :
       {int64_t{0}, int64_t{1}, (int64_t{1} << 32) - 1, int64_t{1} << 32, (int64_t{1} << 62) + 5}) {
    for (const int64_t b :
         {int64_t{1}, int64_t{3}, (int64_t{1} << 32) - 1, (int64_t{1} << 33) + 1}) {
      const int64_t quotient = FloorDiv(a, b);
      EXPECT_LE(quotient * b, a);
      EXPECT_LT(a - quotient * b, b);
    }
  }
}

}  // namespace
}  // namespace pgqa
