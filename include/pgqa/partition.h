// The work partition: pure functions from live token counts to the pieces of every worker.
// SPDX-License-Identifier: Apache-2.0
//
// A tile is heads_per_worker heads by tile_tokens tokens of one request, the work of a worker in one
// step. A head group is heads_per_worker neighbouring heads. The tiles of all requests, in request order,
// repeated for groups_per_axis head groups, form an axis; each axis is cut into equal contiguous shares,
// one a worker. A position on the axis is called a unit. A piece is a worker's run of tiles of one
// (request, head group); a request that spans several workers leaves one partial a piece, in a slot.
// segments.h has what is otherwise in the batch-invariant mode.
#pragma once

#include <cstdint>

#include "pgqa/axis_cut.h"
#include "pgqa/divisor.h"
#include "pgqa/host_device.h"
#include "pgqa/page_table.h"

namespace pgqa {

// Half-open run of units of one worker.
template <class Index>
struct BasicShare {
  Index begin = 0;
  Index end = 0;
};

// How one batch is cut. Trivially copyable; the same on host and device.
template <class Index>
struct BasicPartition {
  int32_t heads_per_worker = 1;
  int32_t tile_tokens = 16;
  int32_t groups_per_axis = 1;
  int32_t workers_per_axis = 1;
  int32_t active_workers = 1;  // of each axis; the others own nothing
  int32_t segment_tokens = 0;  // where units are segments, see segments.h; 0: units are tiles
  Index tiles = 0;             // units of the batch in one head group
  Index share = 0;             // units of a worker; the first `extra` active ones own one more
  Index extra = 0;

  PGQA_HOST_DEVICE Index UnitsPerAxis() const { return tiles * groups_per_axis; }

  // Share of a worker, counted within its axis.
  PGQA_HOST_DEVICE BasicShare<Index> ShareOf(int32_t worker_in_axis) const {
    if (worker_in_axis >= active_workers) return {UnitsPerAxis(), UnitsPerAxis()};
    const Index w = worker_in_axis;
    const Index begin = w * share + (w < extra ? w : extra);
    return {begin, begin + share + (w < extra ? 1 : 0)};
  }

  // Head group, counted within its axis, in which a share begins; 0 for an empty share.
  PGQA_HOST_DEVICE int32_t GroupOf(const BasicShare<Index>& s) const {
    if (PGQA_LIKELY(groups_per_axis == 1) || s.begin >= s.end) return 0;
    return static_cast<int32_t>(FloorDiv(s.begin, tiles));
  }

  // The worker, counted within its axis, that owns `unit`.
  PGQA_HOST_DEVICE int32_t WorkerOf(Index unit) const {
    const Index long_units = extra * (share + 1);
    const bool in_long = unit < long_units;
    const Index quotient =
        FloorDiv(in_long ? unit : unit - long_units, in_long ? share + 1 : share);
    return static_cast<int32_t>(in_long ? quotient : extra + quotient);
  }
};

// Cuts `tiles` tiles (of every head group) for `heads_per_worker`, whose cut of the axes is `cut`.
template <class Index>
PGQA_HOST_DEVICE BasicPartition<Index> MakePartition(const PartitionConfig& config,
                                                     const AxisCut& cut, int32_t heads_per_worker,
                                                     Index tiles) {
  BasicPartition<Index> p;
  p.heads_per_worker = heads_per_worker;
  p.tile_tokens = TileTokens(config, heads_per_worker);
  p.tiles = tiles;
  p.groups_per_axis = cut.groups_per_axis;
  p.workers_per_axis = cut.workers_per_axis;
  const Index units = p.UnitsPerAxis();
  // Divisions by run-time values are slow on the device; the common cases need none.
  const int32_t min_tiles = config.min_tiles_per_worker;
  if (units >= static_cast<Index>(cut.workers_per_axis) * min_tiles) {
    p.active_workers = cut.workers_per_axis;
    p.share = cut.by_workers.Divide(units);
  } else {
    const auto wanted =
        static_cast<int32_t>(min_tiles == 1 ? units : FloorDiv(units, Index{min_tiles}));
    p.active_workers = wanted < 1 ? 1 : wanted;
    p.share = p.active_workers == units ? 1 : FloorDiv(units, Index{p.active_workers});
  }
  p.extra = units - p.share * p.active_workers;
  return p;
}

// A worker's run of tiles of one (request, head group).
template <class Index>
struct BasicPiece {
  int32_t request = 0;
  int32_t head_group = 0;
  Index first_tile = 0;         // within the request
  Index num_tiles = 0;          // of this piece
  Index request_tiles = 0;      // of the whole request
  Index request_unit = 0;       // unit of the request's tile 0 on the axis
  BasicTokenRange<Index> live;  // live tokens of the whole request

  // The worker holds the whole request and writes its output directly.
  PGQA_HOST_DEVICE bool IsWhole() const { return num_tiles == request_tiles; }
};

// Shared memory in which a CTA plans a batch: live tokens of each request, a gap every 16, then sums of warps and what
// was found.
PGQA_HOST_DEVICE int64_t PlanScratchBytes(int32_t batch) {
  return (int64_t{batch} + batch / 16 + 18) * static_cast<int64_t>(sizeof(int64_t));
}

// Where the partials of a piece's request lie. The slot of the piece of worker w is first_worker + w, so
// the slots of a request are contiguous in worker order and below 2 * num_workers. They are unique: of two
// cut requests the earlier one, on workers f < l, ends no later than the later one starts, on worker g >= l,
// and f + l < 2 * g.
struct PieceSlots {
  int32_t first_worker =
      0;  // of the grid; owns the request's first piece, and lends its merge counters
  int32_t num_pieces = 1;
  int32_t first_slot = 0;

  // Slot of the piece of `worker` of the grid.
  PGQA_HOST_DEVICE int32_t SlotOf(int32_t worker) const {
    return first_slot + worker - first_worker;
  }
};

template <class Index>
PGQA_HOST_DEVICE PieceSlots SlotsOf(const BasicPartition<Index>& p, int32_t axis,
                                    const BasicPiece<Index>& piece) {
  const int32_t first = p.WorkerOf(piece.request_unit);
  int32_t last = p.WorkerOf(piece.request_unit + piece.request_tiles - 1);
  if (last >= p.workers_per_axis) last = p.workers_per_axis - 1;  // of a table that was not planned
  const int32_t first_worker = axis * p.workers_per_axis + first;
  return {first_worker, last - first + 1, 2 * first_worker};
}

// Where a worker starts: the request that holds its first unit, and that request's first unit.
template <class Index>
struct BasicWorkerStart {
  int32_t request = 0;
  Index request_unit = 0;
};

// Yields the pieces of one worker in order. Needs no prefix array: lengths are read as it goes.
template <class Index>
class BasicPieceCursor {
 public:
  PGQA_HOST_DEVICE BasicPieceCursor(const BasicPartition<Index>& partition, int32_t axis,
                                    BasicShare<Index> share, BasicWorkerStart<Index> start)
      : tile_tokens_(partition.tile_tokens),
        head_group_(axis * partition.groups_per_axis + partition.GroupOf(share)),
        end_group_((axis + 1) * partition.groups_per_axis),
        request_(start.request),
        request_unit_(start.request_unit),
        unit_(share.begin),
        end_(share.end) {}

  // Writes the next piece, or returns false when the share is used up.
  PGQA_HOST_DEVICE bool Next(const PageTableView& table, int32_t window_left,
                             BasicPiece<Index>* piece) {
    return Next(
        table.batch, [&](int32_t request) { return table.LiveTokens<Index>(request, window_left); },
        piece);
  }

  // The same for live tokens that `live_of(request)` tells, a BasicTokenRange<Index>.
  template <class LiveOf>
  PGQA_HOST_DEVICE bool Next(int32_t batch, LiveOf&& live_of, BasicPiece<Index>* piece) {
    return NextUpTo(end_, batch, live_of, piece);
  }

  // The same, cut at unit `most_end`, which lies past unit().
  template <class LiveOf>
  PGQA_HOST_DEVICE bool NextUpTo(Index most_end, int32_t batch, LiveOf&& live_of,
                                 BasicPiece<Index>* piece) {
    if (unit_ >= end_) return false;
    BasicTokenRange<Index> live;
    Index request_end = 0;
    Index tiles = 0;
    while (true) {
      live = live_of(request_);
      tiles = NumTiles(live.size(), tile_tokens_);
      request_end = request_unit_ + tiles;
      if (request_end > unit_) break;
      request_unit_ = request_end;
      if (++request_ < batch) continue;
      request_ = 0;
      if (++head_group_ < end_group_) continue;
      unit_ = end_;  // the table holds less than the one that was planned
      return false;
    }
    const Index piece_end = request_end < most_end ? request_end : most_end;
    *piece = {request_,      head_group_, unit_ - request_unit_, piece_end - unit_, tiles,
              request_unit_, live};
    unit_ = piece_end;
    return true;
  }

  // Where the next piece begins.
  PGQA_HOST_DEVICE Index unit() const { return unit_; }

 private:
  int32_t tile_tokens_;
  int32_t head_group_;
  int32_t end_group_;
  int32_t request_;
  Index request_unit_;
  Index unit_;
  Index end_;
};

using Share = BasicShare<int64_t>;
using Partition = BasicPartition<int64_t>;
using Piece = BasicPiece<int64_t>;
using WorkerStart = BasicWorkerStart<int64_t>;
using PieceCursor = BasicPieceCursor<int64_t>;

// Whether the device may count in int32_t: `table` is CSR, so that kernels of int32_t need not know block tables, and
// every sum that the functions above form for it and `config`, malformed values included, fits: tokens of a request,
// and units of an axis. Live tokens of the batch are always summed in int64_t.
inline bool FitsInt32(const PartitionConfig& config, const PageTableView& table) {
  constexpr double kLimit = 2147483647.0;
  if (!table.IsCsr()) return false;
  const double tokens = static_cast<double>(table.num_indices) * table.page_size + table.page_size;
  const double tile_heads = static_cast<double>(config.stage_tokens) * config.warps_per_worker;
  const double units = table.batch * (tokens / tile_heads + 1.0) * config.num_heads;
  return tokens + 2 * tile_heads < kLimit && units < kLimit;
}

}  // namespace pgqa
