// Checks of one partition what holds of every partition: coverage, equal shares, order and slots.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "pgqa/partition.h"
#include "pgqa/schedule.h"

namespace pgqa {

// One of each (request, head group), as its pieces come by in worker order.
struct Progress {
  int64_t tiles_done = 0;
  int64_t request_tiles = 0;
  int32_t num_pieces = 0;
  PieceSlots slots;
};
using ProgressMap = std::map<std::pair<int32_t, int32_t>, Progress>;

// Walks all workers and checks what holds of every partition. EXPECTs inside, so call it in a
// SCOPED_TRACE. `live_lengths` are the tokens that count of each request, computed by the test.
class PartitionChecker {
 public:
  PartitionChecker(const PartitionConfig& config, const PageTableView& table, int32_t window_left,
                   const std::vector<int64_t>& live_lengths)
      : config_(config),
        table_(table),
        window_left_(window_left),
        live_lengths_(live_lengths),
        plan_(PlanBatch(config, table, window_left)) {}

  void CheckAll() {
    CheckShape();
    for (int32_t worker = 0; worker < config_.num_workers; ++worker) CheckWorker(worker);
    CheckCoverage();
    CheckShares();
  }

  const BatchPlan& plan() const { return plan_; }
  const ProgressMap& progress() const { return progress_; }

 private:
  int32_t NumGroups() const { return config_.num_heads / plan_.partition.heads_per_worker; }

  int64_t TilesOf(int32_t request) const {
    const int64_t tile = plan_.partition.tile_tokens;
    return (live_lengths_[static_cast<size_t>(request)] + tile - 1) / tile;
  }

  void CheckShape() const {
    const Partition& p = plan_.partition;
    EXPECT_LE(p.heads_per_worker, config_.max_heads_per_worker);
    EXPECT_EQ(config_.num_heads % p.heads_per_worker, 0);
    EXPECT_EQ(p.tile_tokens * p.heads_per_worker, config_.stage_tokens * config_.warps_per_worker);
    EXPECT_EQ(plan_.num_axes * p.groups_per_axis, NumGroups());
    EXPECT_LE(plan_.num_axes * p.workers_per_axis, config_.num_workers);
    EXPECT_GE(plan_.num_axes * p.workers_per_axis * 10, config_.num_workers * 9);
  }

  void CheckWorker(int32_t worker) {
    SegmentCursor cursor = plan_.CursorOf(worker);
    const Share share = plan_.ShareOf(worker);
    int64_t unit = share.begin;
    int32_t num_partials = 0;
    Piece piece;
    while (cursor.Next(table_, window_left_, &piece)) {
      CheckPiece(worker, piece);
      EXPECT_EQ(piece.request_unit + piece.first_tile, unit);
      unit += piece.num_tiles;
      if (piece.IsWhole()) continue;
      EXPECT_TRUE(unit == share.end || unit - piece.num_tiles == share.begin)
          << "a partial inside the share of worker " << worker;
      ++num_partials;
    }
    EXPECT_EQ(unit, share.end);
    EXPECT_LE(num_partials, 2);
    EXPECT_FALSE(cursor.Next(table_, window_left_, &piece));
    tiles_of_worker_.push_back(share.end - share.begin);
  }

  void CheckPiece(int32_t worker, const Piece& piece) {
    ASSERT_GE(piece.request, 0);
    ASSERT_LT(piece.request, table_.batch);
    ASSERT_GE(piece.head_group, 0);
    ASSERT_LT(piece.head_group, NumGroups());
    EXPECT_EQ(piece.head_group / plan_.partition.groups_per_axis, plan_.AxisOf(worker));
    EXPECT_GT(piece.num_tiles, 0);
    EXPECT_EQ(piece.request_tiles, TilesOf(piece.request));
    EXPECT_EQ(piece.live.size(), live_lengths_[static_cast<size_t>(piece.request)]);
    EXPECT_EQ(piece.live.end, table_.KvLength(piece.request));
    Progress& progress = progress_[{piece.request, piece.head_group}];
    EXPECT_EQ(piece.first_tile, progress.tiles_done) << "worker " << worker;
    progress.tiles_done += piece.num_tiles;
    progress.request_tiles = piece.request_tiles;
    if (!piece.IsWhole()) CheckSlot(worker, piece, &progress);
    ++progress.num_pieces;
  }

  void CheckSlot(int32_t worker, const Piece& piece, Progress* progress) {
    const PieceSlots slots = SlotsOf(plan_.partition, plan_.AxisOf(worker), piece);
    if (progress->num_pieces == 0) {
      progress->slots = slots;
      EXPECT_EQ(slots.first_worker, worker);
      EXPECT_TRUE(counters_.insert(slots.first_worker).second) << "a counter used twice";
    }
    EXPECT_EQ(slots.first_worker, progress->slots.first_worker);
    EXPECT_EQ(slots.num_pieces, progress->slots.num_pieces);
    EXPECT_EQ(slots.first_slot, progress->slots.first_slot);
    EXPECT_EQ(worker, slots.first_worker + progress->num_pieces);
    const int32_t slot = slots.first_slot + progress->num_pieces;
    EXPECT_GE(slot, 0);
    EXPECT_LT(slot, 2 * config_.num_workers);
    EXPECT_TRUE(slots_.insert(slot).second) << "slot " << slot << " used twice";
  }

  void CheckCoverage() const {
    int64_t live_requests = 0;
    for (int32_t request = 0; request < table_.batch; ++request) {
      live_requests += TilesOf(request) > 0 ? 1 : 0;
    }
    EXPECT_EQ(static_cast<int64_t>(progress_.size()), live_requests * NumGroups());
    for (const auto& [key, progress] : progress_) {
      EXPECT_EQ(progress.tiles_done, progress.request_tiles);
      if (progress.num_pieces > 1) {
        EXPECT_EQ(progress.slots.num_pieces, progress.num_pieces);
      }
    }
  }

  void CheckShares() const {
    const Partition& p = plan_.partition;
    const int64_t wanted = p.UnitsPerAxis() / config_.min_tiles_per_worker;
    EXPECT_EQ(p.active_workers, std::clamp<int64_t>(wanted, 1, p.workers_per_axis));
    for (int32_t worker = 0; worker < config_.num_workers; ++worker) {
      const int32_t in_axis = worker % p.workers_per_axis;
      const bool active =
          worker / p.workers_per_axis < plan_.num_axes && in_axis < p.active_workers;
      const int64_t even = p.UnitsPerAxis() / p.active_workers;
      const int64_t tiles = tiles_of_worker_[static_cast<size_t>(worker)];
      EXPECT_GE(tiles, active ? even : 0);
      EXPECT_LE(tiles, active ? even + 1 : 0);
    }
  }

  PartitionConfig config_;
  PageTableView table_;
  int32_t window_left_;
  std::vector<int64_t> live_lengths_;
  BatchPlan plan_;
  ProgressMap progress_;
  std::vector<int64_t> tiles_of_worker_;
  std::set<int32_t> slots_;
  std::set<int32_t> counters_;
};

}  // namespace pgqa
