// A warp's private ring of asynchronous copies: walks the worker's pieces and keeps K and V in flight.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/kernel_traits.cuh"
#include "cuda/ptx.cuh"
#include "cuda/share_walk.cuh"

namespace pgqa {

// Where a row element of the padded layout comes from. The halves of a row are padded apart, each to half
// of the padded head dim, so that RoPE pairs keep their distance. Columns count 16-byte units.
template <class Traits>
struct PaddedColumn {
  __device__ __forceinline__ PaddedColumn(int32_t head_dim, int32_t column) {
    constexpr int32_t kHalfColumns = Traits::kHeadDim / 16;
    const int32_t half_dim = head_dim / 2;
    const int32_t half = column / kHalfColumns;
    const int32_t in_half = (column - half * kHalfColumns) * 8;
    const int32_t left = half_dim - in_half;
    num_valid = left <= 0 ? 0 : (left < 8 ? left : 8);
    element = num_valid > 0 ? half * half_dim + in_half : 0;
  }

  int32_t element;    // first source element; 0 where there is none
  int32_t num_valid;  // 0, 4 or 8 elements; the rest is padding
};

// The KV head of a block of query heads.
__device__ __forceinline__ int32_t KeyValueHead(const AttentionParams& params, int32_t block) {
  if (PGQA_LIKELY(params.row_blocks == 1)) return block;
  return FloorDiv(block, params.row_blocks);
}

// A warp's place in its team: warps of a CTA split its heads first, then the tokens of a tile.
struct WarpRole {
  int32_t team = 0;  // head within the head group
  int32_t rank = 0;  // which 16 tokens of a tile
  int32_t team_size = 1;
};

// Pieces that a warp's loader has begun and its computation has not, in order; in shared memory.
template <class Traits>
struct PieceQueue {
  // The loader is at most so many tiles ahead, and so many pieces.
  static constexpr int32_t kMostAhead = 2 * Traits::kTile.num_stages;
  static constexpr int32_t kCapacity = Traits::kTile.QueueCapacity();
  static_assert(kMostAhead <= kCapacity);
  BasicPiece<typename Traits::Index> pieces[kCapacity];
};

// Where the rows of a stage lie: the ids of their pages, which arrive asynchronously (-1: the row is zero-filled),
// and their (token in the page, KV head).
struct StageRows {
  int32_t page_ids[kStageTokens];
  int2 places[kStageTokens];
};

// What a warp keeps in shared memory beside its ring.
template <class Traits>
struct WarpScratch {
  PieceQueue<Traits> queue;
  longlong2 row_offsets[kStageTokens];  // of K and V, in bytes; of the stage that is being issued
  StageRows rows[Traits::kTile.num_stages];  // of the stages that are to be issued next
  PieceSlots slots;                          // of the piece that is computed
};

static_assert(sizeof(BasicPiece<int64_t>) == 56 && sizeof(longlong2) == 16 &&
                  sizeof(StageRows) == kStageTokens * 12 && sizeof(PieceSlots) <= 16,
              "TileConfig::ScratchBytes");

// Step t fetches the page ids of stage t and issues the copies of stage t - num_stages, whose ids have arrived: they
// are in the group of copies that the step waits for anyway, so that nothing else is ever waited for.
template <class Traits>
class StageLoader {
 public:
  using Index = typename Traits::Index;
  static constexpr TileConfig kTile = Traits::kTile;

  __device__ __forceinline__ StageLoader(const AttentionParams& params,
                                         const WorkerPlan<Index>& plan,
                                         const RowWindow<Index>& rows, const WarpRole& role,
                                         char* ring, WarpScratch<Traits>* scratch)
      : params_(params),
        role_(role),
        rows_(rows),
        cursor_(plan.partition, plan.axis, plan.share, plan.start),
        heads_per_worker_(plan.partition.heads_per_worker),
        tile_tokens_(plan.partition.tile_tokens),
        ring_(ring),
        scratch_(scratch),
        lane_(threadIdx.x % kWarpSize),
        share_tiles_(plan),
        k_base_(params.k_cache + lane_ % kColumns * 16),
        v_base_(params.v_cache + lane_ % kColumns * 16) {
    tile_pages_ = params.page_divisor.Divide(tile_tokens_);
    tile_offset_ = tile_tokens_ - tile_pages_ * params.table.page_size;
  }

  // Waits for what was begun num_stages steps ago: a stage, and the page ids of the stage to be issued next.
  __device__ __forceinline__ void Wait() {
    ptx::WaitCopies<kTile.num_stages - 1>();
    __syncwarp();
  }

  // The oldest stage, after Wait(): its K rows come first, then its V rows. Valid until the next Issue().
  __device__ __forceinline__ const char* Stage() const {
    return ring_ + stage_ * kTile.StageBytes();
  }

  // Copies the stage whose page ids have arrived into the place of the oldest stage.
  __device__ __forceinline__ void Issue() {
    if (share_tiles_.AllIssued()) return;
    share_tiles_.CountIssued();
    __syncwarp();  // the place and the row offsets are free
    const int32_t page_id = scratch_->rows[stage_].page_ids[Row()];
    const bool is_live = params_.table.IsPage(page_id);
    if (lane_ < kStageTokens)
      PublishRow(is_live ? page_id : 0, scratch_->rows[stage_].places[lane_]);
    const uint32_t live_rows = __ballot_sync(kFullWarp, is_live);
    __syncwarp();
    const uint32_t stage = ptx::SharedAddress(Stage()) + lane_ % kColumns * 16;
    if (PGQA_LIKELY(live_rows == kFullWarp && params_.head_dim == Traits::kHeadDim)) {
      CopyWholeStage(stage);
    } else {
      CopyPartialStage(stage, live_rows);
    }
  }

  // Fetches the page ids of the next tile, if there is one, and ends the step. Begun pieces go to the queue.
  __device__ __forceinline__ void Fetch() {
    if (tiles_left_ != 0) {
      NextTile();
      FetchPages();
    } else if (StartPiece()) {
      FetchPages();
    } else if (lane_ < kStageTokens) {
      scratch_->rows[stage_].page_ids[lane_] = -1;
    }
    ptx::CommitCopies();
    if (++stage_ == kTile.num_stages) stage_ = 0;
  }

  // Tiles fetched so far, where units are segments.
  __device__ __forceinline__ Index NumFetched() const { return share_tiles_.NumFetched(); }

  // Whether a piece has begun that was not popped.
  __device__ __forceinline__ bool HasPiece() const { return num_popped_ != num_pushed_; }

  // The next begun piece.
  __device__ __forceinline__ BasicPiece<Index> PopPiece() {
    __syncwarp();
    return scratch_->queue.pieces[num_popped_++ % PieceQueue<Traits>::kCapacity];
  }

 private:
  static constexpr int kColumns = Traits::kHeadDim / 8;  // 16-byte units of a row
  static constexpr int kRowsPerCopy = kWarpSize / kColumns;

  __device__ __forceinline__ bool StartPiece() {
    BasicPiece<Index> piece;
    const auto live_of = [&](int32_t request) {
      return rows_.LiveTokens(params_.table, params_.window_left, request);
    };
    if (!cursor_.Next(params_.table.batch, live_of, &piece)) return false;
    if (lane_ == 0) scratch_->queue.pieces[num_pushed_ % PieceQueue<Traits>::kCapacity] = piece;
    ++num_pushed_;
    const int32_t page_size = params_.table.page_size;
    const Index token =
        piece.live.begin + piece.first_tile * tile_tokens_ + role_.rank * kStageTokens;
    page_idx_ = params_.page_divisor.Divide(token + Row());
    page_offset_ = static_cast<int32_t>(token + Row() - page_idx_ * page_size);
    head_ = KeyValueHead(params_, piece.head_group * heads_per_worker_ + role_.team);
    tokens_left_ = piece.live.end - token;
    tiles_left_ = piece.num_tiles;
    row_ = params_.table.EntryAddress(rows_.RowBegin(params_.table, piece.request), 0);
    return true;
  }

  __device__ __forceinline__ void NextTile() {
    page_idx_ += tile_pages_;
    page_offset_ += tile_offset_;
    if (page_offset_ >= params_.table.page_size) {
      page_offset_ -= params_.table.page_size;
      ++page_idx_;
    }
    tokens_left_ -= tile_tokens_;
  }

  __device__ __forceinline__ void FetchPages() {
    --tiles_left_;
    share_tiles_.CountFetched();
    if (lane_ >= kStageTokens) return;
    StageRows* rows = &scratch_->rows[stage_];
    rows->places[lane_] = make_int2(page_offset_, head_);
    if (lane_ < tokens_left_) {
      ptx::CopyWordAsync(ptx::SharedAddress(&rows->page_ids[lane_]), row_ + page_idx_);
    } else {
      rows->page_ids[lane_] = -1;
    }
  }

  // Tells the warp where this lane's row lies.
  __device__ __forceinline__ void PublishRow(int64_t page, const int2& place) {
    const auto offset = [&](const CacheStrides& strides) {
      return page * strides.page + place.x * strides.token + place.y * strides.head;
    };
    scratch_->row_offsets[lane_] =
        make_longlong2(offset(params_.k_strides), offset(params_.v_strides));
  }

  // All rows live and no padding. Offsets are read ahead of the copies.
  __device__ __forceinline__ void CopyWholeStage(uint32_t stage) {
    constexpr int32_t kCopies = kStageTokens / kRowsPerCopy;
    constexpr int32_t kBatch = kCopies < 4 ? kCopies : 4;
#pragma unroll
    for (int32_t first = 0; first < kCopies; first += kBatch) {
      longlong2 offsets[kBatch];
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        offsets[i] = scratch_->row_offsets[(first + i) * kRowsPerCopy + lane_ / kColumns];
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const int32_t row = (first + i) * kRowsPerCopy + lane_ / kColumns;
        ptx::CopyAsync<16>(stage + row * kTile.KeyPitch(), k_base_ + offsets[i].x, 16);
        ptx::CopyAsync<16>(stage + kTile.KeyBytes() + row * kTile.ValuePitch(),
                           v_base_ + offsets[i].y, 16);
      }
    }
  }

  // Stages with dead rows or padded columns; padding and dead rows are zero-filled. Half rows whose size is not
  // a multiple of 16 bytes are copied in units of 8 bytes.
  __device__ __forceinline__ void CopyPartialStage(uint32_t stage, uint32_t live_rows) {
    const PaddedColumn<Traits> column(params_.head_dim, lane_ % kColumns);
#pragma unroll 1
    for (int32_t first = 0; first < kStageTokens; first += kRowsPerCopy) {
      const int32_t row = first + lane_ / kColumns;
      const longlong2 offsets = scratch_->row_offsets[row];
      const bool live = (live_rows >> row & 1) != 0;
      if (params_.head_dim % 16 == 0) {
        CopyPart<16>(stage, row, offsets, column.element, live && column.num_valid != 0);
      } else {
        CopyPart<8>(stage, row, offsets, column.element, live && column.num_valid >= 4);
        CopyPart<8>(stage + 8, row, offsets, column.element + 4, live && column.num_valid == 8);
      }
    }
  }

  // Copies kBytes of a row's K and V from element `element` on, or zeros.
  template <int kBytes>
  __device__ __forceinline__ void CopyPart(uint32_t stage, int32_t row, const longlong2& offsets,
                                           int32_t element, bool live) {
    const int32_t bytes = live ? kBytes : 0;
    ptx::CopyAsync<kBytes>(stage + row * kTile.KeyPitch(),
                           params_.k_cache + (live ? offsets.x + element * 2 : 0), bytes);
    ptx::CopyAsync<kBytes>(stage + kTile.KeyBytes() + row * kTile.ValuePitch(),
                           params_.v_cache + (live ? offsets.y + element * 2 : 0), bytes);
  }

  __device__ __forceinline__ int32_t Row() const { return lane_ % kStageTokens; }

  const AttentionParams& params_;
  const WarpRole role_;
  RowWindow<Index> rows_;
  ShareCursor<Traits> cursor_;
  const int32_t heads_per_worker_;
  const int32_t tile_tokens_;
  char* const ring_;
  WarpScratch<Traits>* const scratch_;
  const int32_t lane_;
  ShareTiles<Traits> share_tiles_;
  const char* const k_base_;  // of this lane's column, page 0, token 0, head 0
  const char* const v_base_;
  const int32_t* row_ = nullptr;  // the request's entries in the page table
  Index page_idx_ = 0;            // page of this lane's row, within the request
  Index tokens_left_ = 0;         // from the first row of the stage to the end of the request
  Index tiles_left_ = 0;          // of the piece, after the fetched one
  int32_t page_offset_ = 0;       // of this lane's row in its page
  int32_t head_ = 0;              // KV head
  int32_t tile_pages_;            // pages and tokens that a row moves by from tile to tile
  int32_t tile_offset_;
  uint32_t num_pushed_ = 0;  // pieces
  uint32_t num_popped_ = 0;
  int32_t stage_ =
      0;  // place in the ring of the oldest stage, of the next one to issue and to fetch
};

}  // namespace pgqa
