// The partition of the batch-invariant mode: pieces are segments of a fixed number of tokens, never cut.
// SPDX-License-Identifier: Apache-2.0
//
// A segment is segment_tokens tokens of one request, a power of two of at least a tile's, counted from the
// request's first live token; its last one may be shorter. The units of an axis are segments instead of tiles, a
// piece is one segment, and every worker takes max_heads_per_worker heads. So where pieces begin and end, and how
// many partials are merged in index order, depends on the live tokens of the request alone: not on the rest of
// the batch, on where pages lie, or on the number of workers. Segments do not count from token 0 of a request
// with a window: that would cut one more piece from most windows, and tiles at both ends of one.
#pragma once

#include <cstdint>

#include "pgqa/partition.h"

namespace pgqa {

// More tokens than a request has that a device can hold.
constexpr int32_t kUncutTokens = 1 << 30;

// Of one head, in the tables that a workspace is made for: as many as a merge counter counts, and so few that no
// request has kUncutTokens tokens.
constexpr int64_t kMostSegments = (1 << 20) - 1;

// Most segments of one head that the requests of a well-formed table of this capacity have: less than one each
// beyond those that their tokens fill.
PGQA_HOST_DEVICE int64_t MaxSegments(int32_t batch, int64_t num_indices, int32_t page_size,
                                     int32_t segment_tokens) {
  const int64_t entries = num_indices < INT32_MAX ? num_indices : INT32_MAX;  // where rows end
  return (entries * page_size >> Log2(segment_tokens)) + batch;
}

// Tokens a segment for a batch that has `segments` of `segment_tokens`. The rows of a malformed table may
// overlap, and have more segments than the workspace has slots: then no request is cut.
PGQA_HOST_DEVICE int32_t SegmentTokens(int32_t segment_tokens, const PageTableView& table,
                                       int64_t segments) {
  const int64_t most =
      MaxSegments(table.batch, table.NumEntries(), table.page_size, segment_tokens);
  return PGQA_LIKELY(segments <= most) ? segment_tokens : kUncutTokens;
}

// Cuts `segments` segments (of every head group), each of `segment_tokens`. `cut` is that of
// max_heads_per_worker.
template <class Index>
PGQA_HOST_DEVICE BasicPartition<Index> MakeSegmentPartition(const PartitionConfig& config,
                                                            const AxisCut& cut, Index segments,
                                                            int32_t segment_tokens) {
  BasicPartition<Index> p = MakePartition(config, cut, config.max_heads_per_worker, segments);
  p.segment_tokens = segment_tokens;
  return p;
}

// Which segment of its request a piece is.
template <class Index>
PGQA_HOST_DEVICE Index SegmentOf(const BasicPartition<Index>& p, const BasicPiece<Index>& piece) {
  return piece.first_tile >> (Log2(p.segment_tokens) - Log2(p.tile_tokens));
}

// Where the partials of a piece's request lie: the slot of a segment is its unit, counted over all axes, so that
// slots are unique and below the segments of the batch times head groups. The request's merge counters are
// those of its first slot; first_worker has no meaning.
template <class Index>
PGQA_HOST_DEVICE PieceSlots SegmentSlotsOf(const BasicPartition<Index>& p, int32_t axis,
                                           const BasicPiece<Index>& piece) {
  PieceSlots slots;
  slots.num_pieces = static_cast<int32_t>(NumTiles(piece.live.size(), p.segment_tokens));
  slots.first_slot = static_cast<int32_t>(axis * p.UnitsPerAxis() + piece.request_unit);
  return slots;
}

// Yields the pieces of one worker in order: segment by segment, or those of a PieceCursor where the partition
// has no segments.
template <class Index>
class BasicSegmentCursor {
 public:
  PGQA_HOST_DEVICE BasicSegmentCursor(const BasicPartition<Index>& partition, int32_t axis,
                                      BasicShare<Index> share, BasicWorkerStart<Index> start)
      : tile_tokens_(partition.tile_tokens),
        segment_tokens_(partition.segment_tokens),
        units_(InUnits(partition), axis, share, start) {}

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
    if (segment_tokens_ == 0) return units_.Next(batch, live_of, piece);
    if (!units_.NextUpTo(units_.unit() + 1, batch, live_of, piece)) return false;
    const Index segment_tiles = segment_tokens_ >> Log2(tile_tokens_);
    piece->request_tiles = NumTiles(piece->live.size(), tile_tokens_);
    piece->first_tile *= segment_tiles;
    const Index tiles_left = piece->request_tiles - piece->first_tile;
    piece->num_tiles = tiles_left < segment_tiles ? tiles_left : segment_tiles;
    return true;
  }

 private:
  PGQA_HOST_DEVICE static BasicPartition<Index> InUnits(BasicPartition<Index> partition) {
    if (partition.segment_tokens != 0) partition.tile_tokens = partition.segment_tokens;
    return partition;
  }

  int32_t tile_tokens_;
  int32_t segment_tokens_;
  BasicPieceCursor<Index> units_;  // takes segments for tiles
};

using SegmentCursor = BasicSegmentCursor<int64_t>;

}  // namespace pgqa
