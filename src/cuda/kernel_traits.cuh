// Compile-time configuration of one attention kernel and the derived fragment counts.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/launch_plan.h"
#include "tile_config.h"

namespace pgqa {

template <int kPaddedHeadDim, class ElementType, RowMode kMode, bool kWithRope>
struct TileTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kPaddedHeadDim;
  static constexpr bool kRope = kWithRope;
  static constexpr bool kSplit = kMode == RowMode::kSplit;
  static constexpr TileConfig kTile =
      TileConfigFor(kPaddedHeadDim, kWithRope, kMode == RowMode::kWide);

  static constexpr int kRowSets = kSplit ? 1 : 2;  // sets of 8 query heads; one row a lane each
  static constexpr int kRowsPerBlock = 8 * kRowSets;
  static_assert(kRowsPerBlock == (kSplit ? kSplitRows : kTileRows));
  static constexpr int kMaxThreads = kTile.max_warps * 32;

  // A row is read in 16-byte pieces: lane j of a quad takes elements [32 c + 8 j, + 8) of chunk c, which feed
  // the contraction steps 2 c and 2 c + 1. The order of the contraction is free.
  static constexpr int kChunks = kHeadDim / 32;
  static constexpr int kHalfChunks = kChunks / 2;  // RoPE pairs chunk c with chunk c + kHalfChunks
  // Output columns come in blocks of 64: lane g of eight takes V elements [64 b + 8 g, + 8), one for each of
  // eight column tiles, so that lane j ends with the 16 neighbouring columns 64 b + 16 j.. of its rows.
  static constexpr int kValueBlocks = kHeadDim / 64;
};

// Index counts tokens and tiles: int32_t where FitsInt32(), else int64_t.
template <class Tile, class IndexType>
struct KernelTraits : Tile {
  using Index = IndexType;
  static constexpr bool kBatchInvariant = false;
};

// Of the kernels whose pieces are segments.
template <class Tile>
struct InvariantTraits : Tile {
  using Index = int64_t;
  static constexpr bool kBatchInvariant = true;
};

}  // namespace pgqa
