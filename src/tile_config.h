// Tile constants of the attention kernel, one row a padded head dim, and the shared memory they imply.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/host_device.h"

namespace pgqa {

constexpr int32_t kStageTokens = 16;  // tokens of one ring stage: the depth of one tensor-core step
constexpr int32_t kMergeRows = 8;     // query heads that the warps of a head merge in one round
constexpr int32_t kTileRows = 16;     // rows of a tensor-core tile: query heads of RowMode::kWide
constexpr int32_t kSplitRows = 8;     // rows of a tile that RowMode::kSplit fills with query heads

// Where a warp leaves its rows for the merge of its team: in the stage that it has just read, which is only then free
// for copies; in the place of the turned q, or in a place of its own, and the copies go on meanwhile.
enum class MergeArea { kStage, kTurnedQuery, kOwn };

// Row pitches are padded so that the 16-byte shared-memory reads of a warp never conflict: K rows are read
// by eight row lanes of four neighbouring columns, V rows by four row pairs of eight columns.
struct TileConfig {
  int32_t padded_head_dim;
  int32_t max_warps;
  int32_t num_stages;    // of each warp's ring
  int32_t frame_stages;  // RoPE: stages of a warp that share a rotation of q; 0: no RoPE
  bool keeps_turned_q;   // RoPE: the turned q stays in shared memory between them
  MergeArea merge_area;

  PGQA_HOST_DEVICE constexpr int32_t RowBytes() const { return padded_head_dim * 2; }
  PGQA_HOST_DEVICE constexpr int32_t KeyPitch() const { return RowBytes() + 64; }
  PGQA_HOST_DEVICE constexpr int32_t ValuePitch() const { return RowBytes() + 16; }
  PGQA_HOST_DEVICE constexpr int32_t KeyBytes() const { return kStageTokens * KeyPitch(); }
  PGQA_HOST_DEVICE constexpr int32_t StageBytes() const {
    return KeyBytes() + kStageTokens * ValuePitch();
  }
  PGQA_HOST_DEVICE constexpr int32_t RingBytes() const { return num_stages * StageBytes(); }
  // One fp32 row of a partial in shared or global memory: accumulator, maximum, sum, two words unused.
  PGQA_HOST_DEVICE constexpr int32_t PartialFloats() const { return padded_head_dim + 4; }
  // Pieces that a loader may be ahead, a power of two: one a stage of the ring, one a stage whose page ids are
  // fetched.
  PGQA_HOST_DEVICE constexpr int32_t QueueCapacity() const {
    return num_stages <= 2 ? 4 : num_stages <= 4 ? 8 : 16;
  }
  // A warp: the queue of pieces, for each stage where its rows lie in the pages, the offsets of the rows that are
  // being copied, and the slots of the piece that is computed.
  PGQA_HOST_DEVICE constexpr int32_t ScratchBytes() const {
    return QueueCapacity() * 56 + num_stages * kStageTokens * 12 + kStageTokens * 16 + 16;
  }
  // RoPE, a warp: the rotation of its current frame as (cos, sin) pairs, then the turned q of eight query heads
  // as high and low parts.
  PGQA_HOST_DEVICE constexpr int32_t RotationBytes() const { return padded_head_dim / 2 * 8; }
  PGQA_HOST_DEVICE constexpr int32_t FrameBytes() const {
    return frame_stages == 0 ? 0 : RotationBytes() + (keeps_turned_q ? 8 * padded_head_dim * 4 : 0);
  }
  PGQA_HOST_DEVICE constexpr int32_t MergeAreaBytes() const {
    return kMergeRows * PartialFloats() * 4;
  }
  // From the merge area of a warp to that of the next.
  PGQA_HOST_DEVICE constexpr int32_t MergeAreaPitch() const {
    return merge_area == MergeArea::kStage         ? RingBytes()
           : merge_area == MergeArea::kTurnedQuery ? FrameBytes()
                                                   : MergeAreaBytes();
  }
  // RoPE, a CTA: the rotation of each row of the stages of a frame. The pitch keeps the reads of two row lanes
  // apart.
  PGQA_HOST_DEVICE constexpr int32_t RowRotationPitch() const { return RotationBytes() + 64; }
  PGQA_HOST_DEVICE constexpr int32_t StageRotationBytes() const {
    return kStageTokens * RowRotationPitch();
  }

  PGQA_HOST_DEVICE constexpr int32_t SharedBytes(int32_t num_warps) const {
    const int32_t area_bytes = merge_area == MergeArea::kOwn ? MergeAreaBytes() : 0;
    return num_warps * (RingBytes() + ScratchBytes() + FrameBytes() + area_bytes) +
           frame_stages * StageRotationBytes();
  }
};

// `wide` is RowMode::kWide. Some 140 to 210 KB of K and V are in flight an SM; what is left of 227 KB holds merge areas,
// where it can, and RoPE's tables. Head dim 128: two stages; three were 1 to 2 % slower on large batches (H200, 64x8k:
// 504 against 499 us). Head dim 256: four warps, whose accumulators take the registers of two.
// A warp computes one 16-row tile: two of them, for groups above 16, spilled registers and were twice as slow (32x4k
// at group 32: 300 against 151 us), although the blocks of a group then read K and V again through the L2.
PGQA_HOST_DEVICE constexpr TileConfig TileConfigFor(int32_t head_dim, bool rope,
                                                    bool wide = false) {
  const bool keep = rope && !wide;
  const MergeArea area = keep ? MergeArea::kTurnedQuery : MergeArea::kOwn;
  if (head_dim <= 64) return {64, 8, 4, keep ? 4 : rope ? 1 : 0, keep, area};
  if (head_dim <= 128) return {128, 8, 2, keep ? 4 : rope ? 1 : 0, keep, area};
  if (rope) return {256, 4, 2, keep ? 2 : 1, keep, area};
  return {256, 4, 3, 0, false, MergeArea::kStage};
}

}  // namespace pgqa
