// The work partition of one batch on the host, as a value that can be printed and compared.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/schedule.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

auto Fields(const PartitionConfig& c) {
  return std::tie(c.num_workers, c.warps_per_worker, c.stage_tokens, c.num_heads,
                  c.max_heads_per_worker, c.min_tiles_per_worker, c.double_heads_from,
                  c.max_heads_by_work, c.min_fill_eighths);
}

auto Fields(const Partition& p) {
  return std::tie(p.heads_per_worker, p.tile_tokens, p.groups_per_axis, p.workers_per_axis,
                  p.active_workers, p.segment_tokens, p.tiles, p.share, p.extra);
}

auto Fields(const Piece& p) {
  return std::tie(p.request, p.head_group, p.first_tile, p.num_tiles, p.request_tiles,
                  p.request_unit, p.live.begin, p.live.end);
}

auto Fields(const WorkerStart& s) { return std::tie(s.request, s.request_unit); }

// Live tokens of each request, [batch + 1], the last entry 0. Returns their sum.
int64_t CountLiveTokens(const PageTableView& table, int32_t window_left,
                        std::vector<int64_t>* counts) {
  counts->assign(static_cast<size_t>(table.batch) + 1, 0);
  int64_t sum = 0;
  for (int32_t request = 0; request < table.batch; ++request) {
    const int64_t live = table.LiveTokens(request, window_left).size();
    (*counts)[request] = live;
    sum += live;
  }
  return sum;
}

int64_t SumTiles(absl::Span<const int64_t> counts, int32_t tile_tokens) {
  int64_t tiles = 0;
  for (const int64_t live : counts) tiles += NumTiles(live, tile_tokens);
  return tiles;
}

// Turns token counts into the tiles before each request, in place; the last entry is the sum.
void TokensToTilePrefix(int32_t tile_tokens, std::vector<int64_t>* counts) {
  int64_t tiles = 0;
  for (int64_t& entry : *counts) {
    const int64_t live = entry;
    entry = tiles;
    tiles += NumTiles(live, tile_tokens);
  }
}

// Turns live tokens into the prefix of units, in place, and cuts them. Returns the number of axes.
int32_t CutTiles(const PartitionConfig& config, std::vector<int64_t>* counts,
                 Partition* partition) {
  const AxisCuts cuts = CutAxes(config);
  const int32_t heads =
      cuts.HeadsPerWorker(config, SumTiles(*counts, TileTokens(config, 1)),
                          SumTiles(*counts, TileTokens(config, config.max_heads_per_worker)));
  TokensToTilePrefix(TileTokens(config, heads), counts);
  const AxisCut& cut = cuts.of_log2_heads[Log2(heads)];
  *partition = MakePartition(config, cut, heads, counts->back());
  return cut.num_axes;
}

// The same in segments.
int32_t CutSegments(const PartitionConfig& config, int32_t segment_tokens,
                    std::vector<int64_t>* counts, Partition* partition) {
  TokensToTilePrefix(segment_tokens, counts);
  const AxisCut cut = CutAxes(config, config.max_heads_per_worker);
  *partition = MakeSegmentPartition(config, cut, counts->back(), segment_tokens);
  return cut.num_axes;
}

}  // namespace

bool operator==(const PartitionConfig& a, const PartitionConfig& b) {
  return Fields(a) == Fields(b);
}
bool operator==(const Partition& a, const Partition& b) { return Fields(a) == Fields(b); }
bool operator==(const Piece& a, const Piece& b) { return Fields(a) == Fields(b); }
bool operator==(const WorkerStart& a, const WorkerStart& b) { return Fields(a) == Fields(b); }

WorkerStart FindStart(const Partition& partition, absl::Span<const int64_t> tile_prefix,
                      int64_t unit) {
  if (unit >= partition.UnitsPerAxis()) return {};
  const int64_t group_unit = FloorDiv(unit, partition.tiles) * partition.tiles;
  const auto after = std::upper_bound(tile_prefix.begin(), tile_prefix.end(), unit - group_unit);
  const auto request = after - tile_prefix.begin() - 1;
  return {static_cast<int32_t>(request), group_unit + tile_prefix[request]};
}

BatchPlan PlanBatch(const PartitionConfig& config, const PageTableView& host_table,
                    int32_t window_left, int32_t segment_tokens) {
  BatchPlan plan;
  std::vector<int64_t> tile_prefix;
  plan.live_tokens = CountLiveTokens(host_table, window_left, &tile_prefix);
  if (segment_tokens != 0) {
    segment_tokens =
        SegmentTokens(segment_tokens, host_table, SumTiles(tile_prefix, segment_tokens));
  }
  plan.num_axes = segment_tokens == 0
                      ? CutTiles(config, &tile_prefix, &plan.partition)
                      : CutSegments(config, segment_tokens, &tile_prefix, &plan.partition);
  plan.starts.resize(config.num_workers);
  for (int32_t worker = 0; worker < config.num_workers; ++worker) {
    const Share share = plan.ShareOf(worker);
    if (share.begin == share.end) continue;
    plan.starts[worker] = FindStart(plan.partition, tile_prefix, share.begin);
  }
  return plan;
}

absl::StatusOr<Schedule> Schedule::Make(const PartitionConfig& config,
                                        const PageTableView& host_table, int32_t window_left,
                                        int32_t segment_tokens) {
  if (absl::Status status = ValidatePartitionConfig(config); !status.ok()) return status;
  if (absl::Status status = ValidateSegmentTokens(config, segment_tokens); !status.ok()) {
    return status;
  }
  if (absl::Status status = ValidateWindowLeft(window_left); !status.ok()) return status;
  if (absl::Status status = ValidateRows(host_table); !status.ok()) return status;
  Schedule schedule;
  schedule.config_ = config;
  schedule.batch_ = host_table.batch;
  schedule.plan_ = PlanBatch(config, host_table, window_left, segment_tokens);
  const int64_t head_groups =
      int64_t{schedule.plan_.num_axes} * schedule.partition().groups_per_axis;
  schedule.pieces_.reserve(host_table.batch * head_groups + config.num_workers);
  schedule.piece_offsets_.reserve(config.num_workers + 1);
  schedule.piece_offsets_.push_back(0);
  for (int32_t worker = 0; worker < config.num_workers; ++worker) {
    SegmentCursor cursor = schedule.plan_.CursorOf(worker);
    Piece piece;
    while (cursor.Next(host_table, window_left, &piece)) schedule.pieces_.push_back(piece);
    schedule.piece_offsets_.push_back(schedule.num_pieces());
  }
  return schedule;
}

absl::Span<const Piece> Schedule::PiecesOf(int32_t worker) const {
  const int64_t begin = piece_offsets_[worker];
  return absl::MakeConstSpan(pieces_).subspan(begin, piece_offsets_[worker + 1] - begin);
}

PieceSlots Schedule::SlotsOf(int32_t worker, const Piece& piece) const {
  return plan_.SlotsOf(worker, piece);
}

int32_t Schedule::SlotOf(int32_t worker, const Piece& piece) const {
  return piece.IsWhole() ? -1 : plan_.SlotOf(worker, piece);
}

int32_t Schedule::NumWorkersWithPartials() const {
  int32_t count = 0;
  for (int32_t worker = 0; worker < num_workers(); ++worker) {
    const auto pieces = PiecesOf(worker);
    const auto is_whole = [](const Piece& piece) { return piece.IsWhole(); };
    if (!std::all_of(pieces.begin(), pieces.end(), is_whole)) ++count;
  }
  return count;
}

std::string Schedule::ToString() const {
  const Partition& p = partition();
  std::string text = absl::StrCat(
      "schedule: batch ", batch_, ", live tokens ", plan_.live_tokens, ", heads ",
      config_.num_heads, " (", p.heads_per_worker, " a worker), tile tokens ", p.tile_tokens,
      p.segment_tokens == 0 ? std::string() : absl::StrCat(", segment tokens ", p.segment_tokens),
      p.segment_tokens == 0 ? ", tiles " : ", segments ", p.tiles, ", axes ", plan_.num_axes, " x ",
      p.workers_per_axis, " workers (", p.active_workers, " active), share ", p.share,
      ", one more for ", p.extra, "\n");
  for (int32_t worker = 0; worker < num_workers(); ++worker) {
    absl::StrAppend(&text, "w", worker, ":");
    for (const Piece& piece : PiecesOf(worker)) {
      absl::StrAppend(&text, " r", piece.request, ".g", piece.head_group, " ", piece.first_tile,
                      "+", piece.num_tiles, "/", piece.request_tiles);
      if (!piece.IsWhole()) absl::StrAppend(&text, " s", SlotOf(worker, piece));
    }
    absl::StrAppend(&text, PiecesOf(worker).empty() ? " -\n" : "\n");
  }
  return text;
}

bool operator==(const Schedule& a, const Schedule& b) {
  return a.config_ == b.config_ && a.plan_.live_tokens == b.plan_.live_tokens &&
         a.plan_.partition == b.plan_.partition && a.plan_.starts == b.plan_.starts &&
         a.batch_ == b.batch_ && a.pieces_ == b.pieces_ && a.piece_offsets_ == b.piece_offsets_;
}

}  // namespace pgqa
