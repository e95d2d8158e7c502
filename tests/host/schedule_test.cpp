// The host schedule against a naive one, unit by unit; its value semantics, text and errors.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

using testing::Message;

// One tile of one request in one head group.
struct Unit {
  int32_t request = 0;
  int32_t head_group = 0;
  int64_t tile = 0;
};

// What every worker of the grid computes, unit by unit, from the words of the design alone.
std::vector<std::vector<Unit>> NaiveUnits(const PartitionConfig& config,
                                          const std::vector<int64_t>& live_lengths) {
  const int64_t one_head_tile = int64_t{config.stage_tokens} * config.warps_per_worker;
  const auto count_tiles = [&](int64_t heads) {
    const int64_t tile = one_head_tile / heads;
    int64_t tiles = 0;
    for (const int64_t length : live_lengths) tiles += (length + tile - 1) / tile;
    return tiles;
  };
  const int64_t one_head_tiles = count_tiles(1);
  const int64_t first_doubling = static_cast<int64_t>(
      std::ceil(static_cast<double>(config.double_heads_from) * config.num_workers /
                static_cast<double>(one_head_tile * config.num_heads)));
  const int32_t most = config.max_heads_per_worker;
  int32_t heads = 1;
  while (heads < std::min(most, config.max_heads_by_work) &&
         one_head_tiles >= first_doubling * heads) {
    heads *= 2;
  }
  // Small tiles that hold tokens, of those that the one-head tiles have room for.
  const bool are_short = 8 * count_tiles(most) < config.min_fill_eighths * one_head_tiles * most;
  while (are_short && heads < most &&
         one_head_tiles * config.num_heads / heads > config.num_workers) {
    heads *= 2;
  }
  const int64_t tile_tokens = int64_t{config.stage_tokens} * config.warps_per_worker / heads;
  const int32_t num_groups = config.num_heads / heads;
  const int32_t workers_a_group = config.num_workers / num_groups;
  const bool per_group = workers_a_group * num_groups >= 0.9 * config.num_workers;
  const int32_t num_axes = per_group ? num_groups : 1;
  const int32_t num_workers = per_group ? workers_a_group : config.num_workers;

  std::vector<std::vector<Unit>> units(static_cast<size_t>(config.num_workers));
  for (int32_t axis = 0; axis < num_axes; ++axis) {
    std::vector<Unit> line;
    for (int32_t group = axis; group < (per_group ? axis + 1 : num_groups); ++group) {
      for (size_t request = 0; request < live_lengths.size(); ++request) {
        for (int64_t tile = 0; tile * tile_tokens < live_lengths[request]; ++tile) {
          line.push_back({static_cast<int32_t>(request), group, tile});
        }
      }
    }
    const auto num_units = static_cast<int64_t>(line.size());
    const int64_t active =
        std::clamp<int64_t>(num_units / config.min_tiles_per_worker, 1, num_workers);
    int64_t unit = 0;
    for (int64_t worker = 0; worker < active; ++worker) {
      const int64_t count = num_units / active + (worker < num_units % active ? 1 : 0);
      auto& own = units[static_cast<size_t>(axis * num_workers + worker)];
      own.assign(line.begin() + unit, line.begin() + unit + count);
      unit += count;
    }
  }
  return units;
}

std::vector<Unit> UnitsOf(const Schedule& schedule, int32_t worker) {
  std::vector<Unit> units;
  for (const Piece& piece : schedule.PiecesOf(worker)) {
    for (int64_t tile = piece.first_tile; tile < piece.first_tile + piece.num_tiles; ++tile) {
      units.push_back({piece.request, piece.head_group, tile});
    }
  }
  return units;
}

bool operator==(const Unit& a, const Unit& b) {
  return a.request == b.request && a.head_group == b.head_group && a.tile == b.tile;
}

PartitionConfig SmallConfig() {
  PartitionConfig config;
  config.num_workers = 6;
  config.warps_per_worker = 4;
  config.num_heads = 4;
  config.max_heads_per_worker = 4;
  config.double_heads_from = 1 << 20;
  return config;
}

const std::vector<int64_t>& SmallLengths() {
  static const std::vector<int64_t> lengths = {37, 0, 592, 1};
  return lengths;
}

Schedule MakeOrDie(const PartitionConfig& config, const HostTable& table,
                   int32_t window_left = -1) {
  absl::StatusOr<Schedule> schedule = Schedule::Make(config, table.View(), window_left);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *schedule;
}

TEST(ScheduleTest, IsTheNaiveOne) {
  for (uint32_t seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE(Message() << "seed " << seed);
    RandomSource random(seed);
    PartitionConfig config = random.Config();
    config.num_heads = std::min(config.num_heads, 8 * config.max_heads_per_worker);
    std::vector<int64_t> lengths = random.Lengths(16);
    for (int64_t& length : lengths) length = std::min<int64_t>(length, 4000);
    const int32_t window_left = random.Window();
    const HostTable table = TableOfLengths(lengths, random.Of<int32_t>({1, 7, 16}));
    if (window_left >= 0) {
      for (int64_t& length : lengths) length = std::min<int64_t>(length, int64_t{window_left} + 1);
    }
    const Schedule schedule = MakeOrDie(config, table, window_left);
    const std::vector<std::vector<Unit>> expected = NaiveUnits(config, lengths);
    for (int32_t worker = 0; worker < config.num_workers; ++worker) {
      ASSERT_EQ(UnitsOf(schedule, worker) == expected[static_cast<size_t>(worker)], true)
          << "worker " << worker << " of\n"
          << schedule.ToString();
    }
  }
}

TEST(ScheduleTest, StartsHoldTheFirstUnitOfEachShare) {
  for (uint32_t seed = 0; seed < 500; ++seed) {
    RandomSource random(seed);
    const Schedule schedule =
        MakeOrDie(random.Config(), TableOfLengths(random.Lengths(24), 16), random.Window());
    for (int32_t worker = 0; worker < schedule.num_workers(); ++worker) {
      const WorkerStart& start = schedule.plan().starts[static_cast<size_t>(worker)];
      const auto pieces = schedule.PiecesOf(worker);
      const WorkerStart expected =
          pieces.empty() ? WorkerStart{} : WorkerStart{pieces[0].request, pieces[0].request_unit};
      ASSERT_EQ(start == expected, true) << "seed " << seed << ", worker " << worker;
    }
  }
}

TEST(ScheduleTest, SlotsOfARequestFollowEachOther) {
  const Schedule schedule = MakeOrDie(SmallConfig(), TableOfLengths(SmallLengths(), 16));
  // Request 2 spans workers 0 and 1 in head group 0, and workers 1 and 2 in head group 1.
  const auto first = schedule.PiecesOf(0);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(schedule.SlotOf(0, first[0]), -1);
  EXPECT_EQ(schedule.SlotOf(0, first[1]), 0);
  EXPECT_EQ(schedule.SlotsOf(0, first[1]).num_pieces, 2);
  const auto second = schedule.PiecesOf(1);
  ASSERT_EQ(second.size(), 4U);
  EXPECT_EQ(schedule.SlotOf(1, second[0]), 1);
  EXPECT_EQ(schedule.SlotOf(1, second[3]), 2);
  EXPECT_EQ(schedule.SlotsOf(1, second[3]).first_worker, 1);
  EXPECT_EQ(schedule.SlotOf(2, schedule.PiecesOf(2)[0]), 3);
  EXPECT_EQ(schedule.NumWorkersWithPartials(), 6);
}

TEST(ScheduleTest, CountsWorkersWithPartials) {
  PartitionConfig config = SmallConfig();
  config.num_heads = config.max_heads_per_worker = 1;
  EXPECT_EQ(MakeOrDie(config, TableOfLengths({}, 16)).NumWorkersWithPartials(), 0);
  EXPECT_EQ(MakeOrDie(config, TableOfLengths({64, 64, 64}, 16)).NumWorkersWithPartials(), 0);
  EXPECT_EQ(MakeOrDie(config, TableOfLengths({64, 128, 64}, 16)).NumWorkersWithPartials(), 2);
  EXPECT_EQ(MakeOrDie(config, TableOfLengths({384}, 16)).NumWorkersWithPartials(), 6);
}

TEST(ScheduleTest, PrintsOneLineAWorker) {
  const Schedule schedule = MakeOrDie(SmallConfig(), TableOfLengths(SmallLengths(), 16));
  EXPECT_EQ(schedule.ToString(),
            "schedule: batch 4, live tokens 630, heads 4 (1 a worker), tile tokens 64, tiles 12, "
            "axes 1 x 6 workers (6 active), share 8, one more for 0\n"
            "w0: r0.g0 0+1/1 r2.g0 0+7/10 s0\n"
            "w1: r2.g0 7+3/10 s1 r3.g0 0+1/1 r0.g1 0+1/1 r2.g1 0+3/10 s2\n"
            "w2: r2.g1 3+7/10 s3 r3.g1 0+1/1\n"
            "w3: r0.g2 0+1/1 r2.g2 0+7/10 s6\n"
            "w4: r2.g2 7+3/10 s7 r3.g2 0+1/1 r0.g3 0+1/1 r2.g3 0+3/10 s8\n"
            "w5: r2.g3 3+7/10 s9 r3.g3 0+1/1\n");
}

TEST(ScheduleTest, PrintsIdleWorkers) {
  PartitionConfig config = SmallConfig();
  config.num_workers = 2;
  config.num_heads = config.max_heads_per_worker = 1;
  EXPECT_EQ(MakeOrDie(config, TableOfLengths({0, 3}, 16)).ToString(),
            "schedule: batch 2, live tokens 3, heads 1 (1 a worker), tile tokens 64, tiles 1, "
            "axes 1 x 2 workers (1 active), share 1, one more for 0\n"
            "w0: r1.g0 0+1/1\n"
            "w1: -\n");
}

TEST(ScheduleTest, EqualsOnlyTheSchedulesOfTheSameWork) {
  const PartitionConfig config = SmallConfig();
  const HostTable table = TableOfLengths({37, 0, 592, 1}, 16);
  const Schedule schedule = MakeOrDie(config, table);
  EXPECT_TRUE(schedule == MakeOrDie(config, table));
  const Schedule copy = schedule;
  EXPECT_TRUE(copy == schedule);
  // Same lengths on other pages are the same work.
  EXPECT_TRUE(schedule == MakeOrDie(config, TableOfLengths({37, 0, 592, 1}, 5, 9)));

  EXPECT_TRUE(schedule != MakeOrDie(config, TableOfLengths({37, 0, 592, 2}, 16)));
  EXPECT_TRUE(schedule != MakeOrDie(config, TableOfLengths({37, 592, 0, 1}, 16)));
  EXPECT_TRUE(schedule != MakeOrDie(config, TableOfLengths({37, 0, 592, 1, 0}, 16)));
  EXPECT_TRUE(schedule != MakeOrDie(config, table, 100));
  PartitionConfig other = config;
  other.num_workers = 7;
  EXPECT_TRUE(schedule != MakeOrDie(other, table));
  other = config;
  ++other.double_heads_from;  // cuts this batch the same way
  EXPECT_TRUE(schedule != MakeOrDie(other, table));
  other = config;
  other.num_workers = 1;  // the totals and the one start are the same, the pieces are not
  EXPECT_TRUE(MakeOrDie(other, TableOfLengths({64, 128}, 16)) !=
              MakeOrDie(other, TableOfLengths({128, 64}, 16)));
}

TEST(ScheduleTest, ReadsNoPageIdsAndTakesAnyFirstEntry) {
  HostTable table = TableOfLengths({100, 200}, 16, 1000);
  ASSERT_TRUE(table.indices.empty());
  const Schedule schedule = MakeOrDie(SmallConfig(), table);
  EXPECT_EQ(schedule.plan().live_tokens, 300);
}

TEST(ScheduleTest, RefusesBadInputByName) {
  const HostTable table = TableOfLengths({100, 200}, 16);
  const auto message = [](const PartitionConfig& config, const HostTable& host_table,
                          int32_t window) {
    const absl::StatusOr<Schedule> schedule = Schedule::Make(config, host_table.View(), window);
    EXPECT_EQ(schedule.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(schedule.status().message());
  };
  EXPECT_EQ(message(SmallConfig(), table, -2),
            "window_left: got -2, expected -1 (no window) or more");
  PartitionConfig config = SmallConfig();
  config.num_workers = 0;
  EXPECT_EQ(message(config, table, -1), "num_workers: got 0, expected 1 to 1048576");
  HostTable decreasing = table;
  decreasing.indptr[2] = 3;
  EXPECT_EQ(message(SmallConfig(), decreasing, -1),
            "page_indptr of request 1: got 7 to 3, expected a row that does not decrease");
}

TEST(FindStartTest, SkipsEmptyRequestsAndRepeatsForEachHeadGroup) {
  Partition p;
  p.tiles = 7;
  p.groups_per_axis = 3;
  const std::vector<int64_t> tile_prefix = {0, 0, 2, 2, 2, 6, 7, 7};  // tiles 0 2 0 0 4 1 0
  const std::vector<int32_t> holder = {1, 1, 4, 4, 4, 4, 5};
  for (int64_t unit = 0; unit < 21; ++unit) {
    const WorkerStart start = FindStart(p, tile_prefix, unit);
    EXPECT_EQ(start.request, holder[static_cast<size_t>(unit % 7)]);
    EXPECT_EQ(start.request_unit, unit / 7 * 7 + tile_prefix[static_cast<size_t>(start.request)]);
  }
  EXPECT_TRUE(FindStart(p, tile_prefix, 21) == WorkerStart{});
  EXPECT_TRUE(FindStart(Partition{}, {{0}}, 0) == WorkerStart{});
}

}  // namespace
}  // namespace pgqa
