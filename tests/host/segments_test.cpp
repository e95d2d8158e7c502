// Properties of the batch-invariant partition by random search: pieces are segments, slots unique and in bounds.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/segments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pgqa/launch_plan.h"
#include "pgqa/schedule.h"
#include "pgqa/validate.h"
#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

constexpr int32_t kInt32Max = INT32_MAX;

// What of a piece the bits of its request depend on.
struct Segment {
  int64_t first_token;
  int64_t num_tokens;
  int64_t slot_in_request;

  friend bool operator==(const Segment& a, const Segment& b) {
    return a.first_token == b.first_token && a.num_tokens == b.num_tokens &&
           a.slot_in_request == b.slot_in_request;
  }
};
// By request and head group, in the order of the tokens.
using SegmentMap = std::map<std::pair<int32_t, int32_t>, std::vector<Segment>>;

// The segments of one request, from the words of the design alone.
std::vector<Segment> SegmentsOf(int64_t kv_len, int32_t window_left, int64_t segment_tokens) {
  int64_t begin = 0;
  if (window_left >= 0) begin = std::max<int64_t>(0, kv_len - 1 - window_left);
  std::vector<Segment> segments;
  for (int64_t token = begin; token < kv_len; token += segment_tokens) {
    segments.push_back(
        {token, std::min(segment_tokens, kv_len - token), static_cast<int64_t>(segments.size())});
  }
  return segments;
}

// A power of two of at least a tile's tokens.
int32_t AnySegmentTokens(const PartitionConfig& config, RandomSource* random) {
  return TileTokens(config, config.max_heads_per_worker) << random->In(0, 4);
}

// What all workers compute. Checks that shares are even, and slots unique and below `num_slots`.
SegmentMap Walk(const PartitionConfig& config, int32_t segment_tokens, const PageTableView& table,
                int32_t window_left, int64_t num_slots) {
  const BatchPlan plan = PlanBatch(config, table, window_left, segment_tokens);
  const Partition& p = plan.partition;
  SegmentMap found;
  std::set<int32_t> slots;
  for (int32_t worker = 0; worker < config.num_workers; ++worker) {
    const Share share = plan.ShareOf(worker);
    int64_t unit = share.begin;
    SegmentCursor cursor = plan.CursorOf(worker);
    Piece piece;
    for (; cursor.Next(table, window_left, &piece); ++unit) {
      const PieceSlots of_request = plan.SlotsOf(worker, piece);
      const int32_t slot = plan.SlotOf(worker, piece);
      const int64_t first_token = piece.live.begin + piece.first_tile * p.tile_tokens;
      found[{piece.request, piece.head_group}].push_back(
          {first_token, std::min(piece.num_tiles * p.tile_tokens, piece.live.end - first_token),
           slot - of_request.first_slot});
      EXPECT_EQ(piece.request_unit + SegmentOf(p, piece), unit);
      EXPECT_EQ(piece.head_group / p.groups_per_axis, plan.AxisOf(worker));
      EXPECT_EQ(piece.IsWhole(), of_request.num_pieces == 1);
      EXPECT_TRUE(slots.insert(slot).second) << "slot " << slot << " used twice";
      EXPECT_GE(slot, 0);
      if (!piece.IsWhole()) {
        EXPECT_LT(slot, num_slots);
      }
    }
    EXPECT_EQ(unit, share.end);
  }
  return found;
}

SegmentMap Expected(const std::vector<int64_t>& lengths, int32_t window_left, int32_t num_groups,
                    int64_t segment_tokens) {
  SegmentMap expected;
  for (int32_t request = 0; request < static_cast<int32_t>(lengths.size()); ++request) {
    const std::vector<Segment> segments =
        SegmentsOf(lengths[static_cast<size_t>(request)], window_left, segment_tokens);
    for (int32_t group = 0; group < num_groups && !segments.empty(); ++group) {
      expected[{request, group}] = segments;
    }
  }
  return expected;
}

int32_t NumGroups(const PartitionConfig& config) {
  return config.num_heads / config.max_heads_per_worker;
}

int64_t NumSlots(const PartitionConfig& config, int32_t segment_tokens,
                 const PageTableView& table) {
  return MaxSegments(table.batch, table.num_indices, table.page_size, segment_tokens) *
         NumGroups(config);
}

TEST(SegmentsTest, PiecesAreSegmentsOfTheirRequestAlone) {
  for (uint32_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomSource random(seed);
    const PartitionConfig config = random.Config();
    const int32_t tokens = AnySegmentTokens(config, &random);
    const std::vector<int64_t> lengths = random.Lengths(24);
    const int32_t window_left = random.Window();
    const HostTable table = TableOfLengths(lengths, random.Of<int32_t>({1, 3, 5, 16, 17, 96, 512}));
    const PageTableView view = table.View();
    EXPECT_EQ(Walk(config, tokens, view, window_left, NumSlots(config, tokens, view)),
              Expected(lengths, window_left, NumGroups(config), tokens));
    if (HasFailure()) return;
  }
}

TEST(SegmentsTest, LengthsAtTheLimitOf32Bits) {
  RandomSource random(1);
  const PartitionConfig config = random.Config();
  const int32_t tokens = 1 << 30;
  for (const int32_t window_left : {-1, 0, kInt32Max - 1, kInt32Max}) {
    for (const int32_t page_size : {1, 512}) {
      const std::vector<int64_t> lengths = {int64_t{kInt32Max - 1} * page_size - 7, 0, 1};
      const HostTable table = TableOfLengths(lengths, page_size);
      const PageTableView view = table.View();
      EXPECT_EQ(Walk(config, tokens, view, window_left, NumSlots(config, tokens, view)),
                Expected(lengths, window_left, NumGroups(config), tokens));
    }
  }
}

// Rows of malformed tables overlap, so that no workspace for the table holds all of their segments.
TEST(SegmentsTest, NoRequestIsCutWhereSlotsWouldNotDo) {
  PartitionConfig config = GpuConfig();
  config.max_heads_per_worker = 1;
  HostTable table;
  table.page_size = 16;
  table.num_indices = 400;
  table.indptr = {0};
  for (int32_t request = 0; request < 9; ++request) {
    table.indptr.push_back(request % 2 == 0 ? 400 : 0);
    table.last_page_len.push_back(16);
  }
  const SegmentMap found = Walk(config, 1024, table.View(), -1, 0);
  EXPECT_EQ(found.size(), 5 * 8);
  for (const auto& [key, segments] : found) {
    EXPECT_EQ(segments, (std::vector<Segment>{{0, 6400, 0}}));
  }
  table.indptr = {0, 400, 400, 400, 400, 400, 400, 400, 400, 400};
  const int64_t num_slots = NumSlots(config, 1024, table.View());
  EXPECT_EQ((Walk(config, 1024, table.View(), -1, num_slots).at({0, 3}).size()), 7);
}

TEST(SegmentsTest, RandomMalformedTablesStayInBounds) {
  const std::vector<int32_t> extremes = {0, 1, -1, kInt32Max, INT32_MIN};
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
    for (int64_t i = random.In(1, 12); i > 0; --i) {
      table.indptr.push_back(value());
      table.last_page_len.push_back(value());
    }
    const PartitionConfig config = random.Config();
    const int32_t tokens = AnySegmentTokens(config, &random);
    Walk(config, tokens, table.View(), random.Window(), NumSlots(config, tokens, table.View()));
    if (HasFailure()) return;
  }
}

TEST(SegmentsTest, ScheduleShowsThem) {
  PartitionConfig config = GpuConfig();
  config.num_workers = 2;
  config.num_heads = 1;
  config.max_heads_per_worker = 1;
  const HostTable table = TableOfLengths({2100, 0, 700}, 16);
  const auto schedule = Schedule::Make(config, table.View(), -1, 1024);
  ASSERT_TRUE(schedule.ok()) << schedule.status();
  EXPECT_EQ(schedule->ToString(),
            "schedule: batch 3, live tokens 2800, heads 1 (1 a worker), tile tokens 128, "
            "segment tokens 1024, segments 4, axes 1 x 2 workers (2 active), share 2, one more "
            "for 0\n"
            "w0: r0.g0 0+8/17 s0 r0.g0 8+8/17 s1\n"
            "w1: r0.g0 16+1/17 s2 r2.g0 0+6/6\n");
  EXPECT_EQ(schedule->NumWorkersWithPartials(), 2);
}

TEST(SegmentsTest, SegmentsOfOtherThanPowersOfTwoOrLessThanATileAreRefused) {
  PartitionConfig config = GpuConfig();
  config.max_heads_per_worker = 1;
  const HostTable table = TableOfLengths({5}, 16);
  for (const int32_t tokens : {-1, 1, 64, 1000}) {
    const auto refused = Schedule::Make(config, table.View(), -1, tokens).status();
    EXPECT_NE(refused.message().find("segment_tokens: got"), std::string::npos) << refused;
  }
  EXPECT_TRUE(Schedule::Make(config, table.View(), -1, 128).ok());
}

LaunchPlan PlanOf(int32_t num_query_heads, int32_t num_kv_heads, bool batch_invariant) {
  AttentionShape shape{.batch = 0,
                       .num_query_heads = num_query_heads,
                       .num_kv_heads = num_kv_heads,
                       .head_dim = 128,
                       .page_size = 16};
  shape.batch_invariant = batch_invariant;
  return *MakeGpuLaunchPlan(shape, {132, 232448});
}

TEST(SegmentsTest, LaunchPlanTakesOneHeadAWorkerAndAsksForTheTable) {
  const LaunchPlan plan = PlanOf(32, 8, true);
  EXPECT_EQ(plan.partition.max_heads_per_worker, 1);
  EXPECT_EQ(plan.segment_tokens % TileTokens(plan.partition, 1), 0);
  EXPECT_TRUE(ValidatePartitionConfig(plan.partition).ok());
  EXPECT_EQ(plan.workspace_bytes, 0);
  EXPECT_EQ(PlanOf(32, 8, false).segment_tokens, 0);
}

TEST(SegmentsTest, WorkspaceIsSlotsAndCountersOfTheTable) {
  const LaunchPlan plan = PlanOf(80, 2, true);  // 40 query heads a KV head: 3 row blocks of 16
  const auto layout = WorkspaceFor(plan, 5, 6400);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(layout->num_slots, (6400 * 16 / plan.segment_tokens + 5) * 2 * 3);
  EXPECT_EQ(plan.slot_bytes, 16 * (128 + 4) * 4);
  EXPECT_GE(layout->counter_bytes, layout->num_slots * plan.kernel.num_warps * 8);
  EXPECT_EQ(layout->counter_bytes % 256, 0);
  EXPECT_EQ(layout->bytes, layout->counter_bytes + layout->num_slots * plan.slot_bytes);
  EXPECT_LE(WorkspaceFor(plan, 4, 6400)->bytes, layout->bytes);
  EXPECT_LE(WorkspaceFor(plan, 5, 6399)->bytes, layout->bytes);
  const LaunchPlan normal = PlanOf(80, 2, false);
  EXPECT_EQ(WorkspaceFor(normal, 5, 6400)->bytes, normal.workspace_bytes);
}

TEST(SegmentsTest, WorkspacesOfTooManySegmentsAreRefused) {
  const LaunchPlan plan = PlanOf(32, 8, true);
  const int64_t entries = kMostSegments * plan.segment_tokens / 16;
  EXPECT_TRUE(WorkspaceFor(plan, 0, entries).ok());
  for (const int64_t num_indices : {entries + 64, int64_t{kInt32Max}, INT64_MAX}) {
    const auto refused = WorkspaceFor(plan, 0, num_indices).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(refused.message().find("page_indices: got"), std::string::npos) << refused;
  }
}

}  // namespace
}  // namespace pgqa
