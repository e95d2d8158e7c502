// Walks the share of a worker in chunks, and finds where in the caches the rows of each lie.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu_kernels.h"
#include "pgqa/cpu_executor.h"
#include "pgqa/segments.h"

namespace pgqa {

// Up to kChunkTokens neighbouring tokens of one piece.
struct Chunk {
  Piece piece;
  int64_t first_token = 0;  // counted from the request's first cached token
  int32_t num_tokens = 0;   // 0: no chunk
  bool begins_piece = false;
  bool ends_piece = false;
  // Rows of the head group's first head, one a token; null where the page lies outside the cache.
  const char* keys[kChunkTokens] = {};
  const char* values[kChunkTokens] = {};
};

class ChunkCursor {
 public:
  // `pieces` stands at the start of the worker's share. `args` must outlive the cursor.
  ChunkCursor(const CpuDecodeArgs& args, DType dtype, const Partition& partition,
              const SegmentCursor& pieces)
      : args_(args),
        element_bytes_(BytesOf(dtype)),
        heads_per_group_(partition.heads_per_worker),
        tile_tokens_(partition.tile_tokens),
        pieces_(pieces) {}

  // Writes the next chunk; one of no tokens when the share is used up.
  void Next(Chunk* chunk);

 private:
  void FindRows(Chunk* chunk) const;

  const CpuDecodeArgs& args_;
  int64_t element_bytes_;
  int64_t heads_per_group_;
  int64_t tile_tokens_;
  SegmentCursor pieces_;
  Piece piece_;
  int64_t token_ = 0;  // next of piece_
  int64_t end_ = 0;    // of piece_
};

}  // namespace pgqa
