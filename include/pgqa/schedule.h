// The work partition of one batch on the host, as a value that can be printed and compared.
// SPDX-License-Identifier: Apache-2.0
//
// Built from the functions of partition.h alone, so it states exactly what a GPU or CPU call does
// with the same table. All of it is host memory; nothing here synchronises or touches a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pgqa/page_table.h"
#include "pgqa/partition.h"
#include "pgqa/segments.h"

namespace pgqa {

bool operator==(const PartitionConfig& a, const PartitionConfig& b);
bool operator==(const Partition& a, const Partition& b);
bool operator==(const Piece& a, const Piece& b);
bool operator==(const WorkerStart& a, const WorkerStart& b);

// The request that holds `unit` of an axis, and that request's first unit. tile_prefix [batch + 1]
// holds the tiles of one head group before each request, and all of them at its end. O(log batch).
// A unit past the axis, as idle workers have it, gives {0, 0}.
WorkerStart FindStart(const Partition& partition, absl::Span<const int64_t> tile_prefix,
                      int64_t unit);

// The cheap half of a schedule: all that a worker needs to walk its pieces with a cursor.
struct BatchPlan {
  int64_t live_tokens = 0;  // of one head
  Partition partition;
  int32_t num_axes = 1;
  std::vector<WorkerStart> starts;  // [num_workers]; {0, 0} for idle workers

  int32_t AxisOf(int32_t worker) const { return worker / partition.workers_per_axis; }

  // Share of a worker of the grid, on its axis.
  Share ShareOf(int32_t worker) const {
    const int32_t axis = AxisOf(worker);
    if (axis >= num_axes) return {0, 0};
    return partition.ShareOf(worker - axis * partition.workers_per_axis);
  }

  SegmentCursor CursorOf(int32_t worker) const {
    return {partition, AxisOf(worker), ShareOf(worker), starts[worker]};
  }

  // Where the partials of a request lie that the piece of `worker` does not hold whole.
  PieceSlots SlotsOf(int32_t worker, const Piece& piece) const {
    const int32_t axis = AxisOf(worker);
    return partition.segment_tokens == 0 ? pgqa::SlotsOf(partition, axis, piece)
                                         : SegmentSlotsOf(partition, axis, piece);
  }
  int32_t SlotOf(int32_t worker, const Piece& piece) const {
    const PieceSlots slots = SlotsOf(worker, piece);
    if (partition.segment_tokens == 0) return slots.SlotOf(worker);
    return slots.first_slot + static_cast<int32_t>(SegmentOf(partition, piece));
  }

  // Slots that SlotOf() gives lie below this. A single worker cuts a request only into segments.
  int64_t NumSlots(int64_t num_workers) const {
    if (partition.segment_tokens != 0) return num_axes * partition.UnitsPerAxis();
    return num_workers > 1 ? 2 * num_workers : 0;
  }
};

// Plans any host table, malformed ones too: rows are clamped as PageTableView does it and page ids
// are not read. `config` must be valid; segment_tokens as in a launch plan. O(batch + num_workers * log batch).
BatchPlan PlanBatch(const PartitionConfig& config, const PageTableView& host_table,
                    int32_t window_left, int32_t segment_tokens = 0);

class Schedule {
 public:
  // Plans a table whose `indices` may be null. Errors (InvalidArgument) are those of
  // ValidatePartitionConfig, ValidateSegmentTokens, ValidateWindowLeft and ValidateRows.
  static absl::StatusOr<Schedule> Make(const PartitionConfig& config,
                                       const PageTableView& host_table, int32_t window_left,
                                       int32_t segment_tokens = 0);

  const PartitionConfig& config() const { return config_; }
  const Partition& partition() const { return plan_.partition; }
  const BatchPlan& plan() const { return plan_; }
  int32_t batch() const { return batch_; }
  int32_t num_workers() const { return config_.num_workers; }
  int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }

  // Pieces of a worker of the grid in the order it computes them; empty for an idle worker.
  absl::Span<const Piece> PiecesOf(int32_t worker) const;

  // Slot of a piece of `worker`, or -1 where the piece is a whole request and leaves no partial.
  int32_t SlotOf(int32_t worker, const Piece& piece) const;

  // Where all the partials of the piece's request lie.
  PieceSlots SlotsOf(int32_t worker, const Piece& piece) const;

  // Workers that leave at least one partial.
  int32_t NumWorkersWithPartials() const;

  // A header line, then a line a worker: "w3: r0.g1 8+4/16 s5" is tiles 8 to 11 of the 16 of
  // request 0 in head group 1, left in slot 5; whole requests have no slot; an idle worker's line
  // is "w3: -".
  std::string ToString() const;

  friend bool operator==(const Schedule& a, const Schedule& b);
  friend bool operator!=(const Schedule& a, const Schedule& b) { return !(a == b); }

 private:
  Schedule() = default;

  PartitionConfig config_;
  BatchPlan plan_;
  int32_t batch_ = 0;
  std::vector<Piece> pieces_;           // of all workers, in worker order
  std::vector<int64_t> piece_offsets_;  // [num_workers + 1]
};

}  // namespace pgqa
