// A warp's private ring of asynchronous copies: walks the worker's pieces and keeps K and V in flight.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/kernel_traits.cuh"
#include "cuda/ptx.cuh"

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
  return params.row_blocks == 1 ? block : FloorDiv(block, params.row_blocks);
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
  // The loader is at most this many tiles ahead, so at most as many pieces.
  static constexpr int32_t kCapacity = Traits::kTile.QueueCapacity();
  static_assert(Traits::kTile.num_stages + kFetchAhead <= kCapacity);
  BasicPiece<typename Traits::Index> pieces[kCapacity];
};

// What a warp keeps in shared memory beside its ring.
template <class Traits>
struct WarpScratch {
  PieceQueue<Traits> queue;
  longlong2 row_offsets[kStageTokens];  // of K and V, in bytes; of the stage that is being issued
  int32_t arrived_last;  // of a team's first warp: whether its split request is complete
};

static_assert(sizeof(BasicPiece<int64_t>) == 56 && sizeof(longlong2) == 16,
              "TileConfig::ScratchBytes");

template <class Traits>
class StageLoader {
 public:
  using Index = typename Traits::Index;
  static constexpr TileConfig kTile = Traits::kTile;

  __device__ __forceinline__ StageLoader(const AttentionParams& params,
                                         const WorkerPlan<Index>& plan, const WarpRole& role,
                                         char* ring, WarpScratch<Traits>* scratch)
      : params_(params),
        role_(role),
        cursor_(plan.partition, plan.axis, plan.share, plan.start),
        heads_per_worker_(plan.partition.heads_per_worker),
        tile_tokens_(plan.partition.tile_tokens),
        ring_(ring),
        scratch_(scratch),
        lane_(threadIdx.x % kWarpSize),
        column_(params.head_dim, lane_ % kColumns),
        k_base_(params.k_cache + column_.element * 2),
        v_base_(params.v_cache + column_.element * 2) {
    tile_pages_ = params.page_divisor.Divide(tile_tokens_);
    tile_offset_ = tile_tokens_ - tile_pages_ * params.table.page_size;
  }

  // Moves to the next tile and loads the page id of this lane's row. Begun pieces go to the queue.
  __device__ __forceinline__ void FetchPages() {
    if (tiles_left_ == 0) {
      if (!StartPiece()) {
        num_rows_ = -1;
        return;
      }
    } else {
      page_idx_ += tile_pages_;
      page_offset_ += tile_offset_;
      if (page_offset_ >= params_.table.page_size) {
        page_offset_ -= params_.table.page_size;
        ++page_idx_;
      }
      tokens_left_ -= tile_tokens_;
    }
    --tiles_left_;
    num_rows_ = static_cast<int32_t>(max(Index{0}, min(tokens_left_, Index{kStageTokens})));
    // Not looked at before Issue(): the load has a whole stage to arrive.
    page_id_ =
        Row() < num_rows_ ? ptx::LoadAhead(params_.table.EntryAddress(row_begin_, page_idx_)) : -1;
  }

  // Copies the fetched stage into the next free place of the ring and commits, also when there is nothing left,
  // so that the number of groups in flight is always num_stages.
  __device__ __forceinline__ void Issue() {
    __syncwarp();  // the place and the row offsets are free
    if (num_rows_ >= 0) {
      const bool is_live = params_.table.IsPage(page_id_);
      if (lane_ < kStageTokens) PublishRow(is_live ? page_id_ : 0);
      const uint32_t live_rows = __ballot_sync(kFullWarp, is_live);
      __syncwarp();
      const uint32_t stage =
          ptx::SharedAddress(ring_) + write_stage_ * kTile.StageBytes() + lane_ % kColumns * 16;
      if (live_rows == kFullWarp && params_.head_dim == Traits::kHeadDim) {
        CopyWholeStage(stage);
      } else {
        CopyPartialStage(stage, live_rows);
      }
      if (++write_stage_ == kTile.num_stages) write_stage_ = 0;
    }
    ptx::CommitCopies();
  }

  // Whether a piece has begun that was not popped.
  __device__ __forceinline__ bool HasPiece() const { return num_popped_ != num_pushed_; }

  // The next begun piece.
  __device__ __forceinline__ BasicPiece<Index> PopPiece() {
    __syncwarp();
    return scratch_->queue.pieces[num_popped_++ % PieceQueue<Traits>::kCapacity];
  }

  // Waits for the oldest stage: its K rows come first, then its V rows. Valid until the next Issue().
  __device__ __forceinline__ const char* Wait() {
    ptx::WaitCopies<kTile.num_stages - 1>();
    __syncwarp();
    const char* stage = ring_ + read_stage_ * kTile.StageBytes();
    if (++read_stage_ == kTile.num_stages) read_stage_ = 0;
    return stage;
  }

 private:
  static constexpr int kColumns = Traits::kHeadDim / 8;  // 16-byte units of a row
  static constexpr int kRowsPerCopy = kWarpSize / kColumns;

  __device__ __forceinline__ bool StartPiece() {
    BasicPiece<Index> piece;
    if (!cursor_.Next(params_.table, params_.window_left, &piece)) return false;
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
    row_begin_ = params_.table.RowBegin(piece.request);
    return true;
  }

  // Tells the warp where this lane's row lies.
  __device__ __forceinline__ void PublishRow(int64_t page) {
    const auto offset = [&](const CacheStrides& strides) {
      return page * strides.page + page_offset_ * strides.token + head_ * strides.head;
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
        CopyRow<16>(stage, (first + i) * kRowsPerCopy + lane_ / kColumns, offsets[i], 0, true);
      }
    }
  }

  // Stages with dead rows or padded columns; padding and dead rows are zero-filled. Half rows whose size is not
  // a multiple of 16 bytes are copied in units of 8 bytes.
  __device__ __forceinline__ void CopyPartialStage(uint32_t stage, uint32_t live_rows) {
#pragma unroll 1
    for (int32_t first = 0; first < kStageTokens; first += kRowsPerCopy) {
      const int32_t row = first + lane_ / kColumns;
      const longlong2 offsets = scratch_->row_offsets[row];
      const bool live = (live_rows >> row & 1) != 0;
      if (params_.head_dim % 16 == 0) {
        CopyRow<16>(stage, row, offsets, 0, live && column_.num_valid != 0);
      } else {
        CopyRow<8>(stage, row, offsets, 0, live && column_.num_valid >= 4);
        CopyRow<8>(stage, row, offsets, 1, live && column_.num_valid == 8);
      }
    }
  }

  // Copies part `part` of kBytes of this lane's 16-byte column of a row's K and V, or zeros.
  template <int kBytes>
  __device__ __forceinline__ void CopyRow(uint32_t stage, int32_t row, const longlong2& offsets,
                                          int32_t part, bool live) {
    const int32_t bytes = live ? kBytes : 0;
    const int32_t shift = part * kBytes;
    ptx::CopyAsync<kBytes>(stage + row * kTile.KeyPitch() + shift,
                           k_base_ + (live ? offsets.x + shift : 0), bytes);
    ptx::CopyAsync<kBytes>(stage + kTile.KeyBytes() + row * kTile.ValuePitch() + shift,
                           v_base_ + (live ? offsets.y + shift : 0), bytes);
  }

  __device__ __forceinline__ int32_t Row() const { return lane_ % kStageTokens; }

  const AttentionParams& params_;
  const WarpRole role_;
  BasicPieceCursor<Index> cursor_;
  const int32_t heads_per_worker_;
  const int32_t tile_tokens_;
  char* const ring_;
  WarpScratch<Traits>* const scratch_;
  const int32_t lane_;
  const PaddedColumn<Traits> column_;
  const char* const k_base_;  // of this lane's column, page 0, token 0, head 0
  const char* const v_base_;
  int64_t row_begin_ = 0;    // of the request in page_indices
  Index page_idx_ = 0;       // page of this lane's row, within the request
  Index tokens_left_ = 0;    // from the first row of the stage to the end of the request
  Index tiles_left_ = 0;     // of the piece, after the fetched one
  int32_t page_id_ = -1;     // of this lane's row; -1: the row is zero-filled
  int32_t page_offset_ = 0;  // of this lane's row in its page
  int32_t head_ = 0;         // KV head
  int32_t num_rows_ = -1;    // live rows of the fetched stage; -1: there is none
  int32_t tile_pages_;       // pages and tokens that a row moves by from tile to tile
  int32_t tile_offset_;
  uint32_t num_pushed_ = 0;  // pieces
  uint32_t num_popped_ = 0;
  int32_t write_stage_ = 0;
  int32_t read_stage_ = 0;
};

}  // namespace pgqa
