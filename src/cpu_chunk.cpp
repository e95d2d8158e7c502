// Walks the share of a worker in chunks, and finds where in the caches the rows of each lie.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_chunk.h"

#include <algorithm>

namespace pgqa {

void ChunkCursor::Next(Chunk* chunk) {
  chunk->begins_piece = token_ == end_;
  chunk->num_tokens = 0;
  if (chunk->begins_piece) {
    if (!pieces_.Next(args_.table, args_.options.window_left, &piece_)) return;
    token_ = piece_.live.begin + piece_.first_tile * tile_tokens_;
    end_ = std::min(piece_.live.end, token_ + piece_.num_tiles * tile_tokens_);
  }
  chunk->piece = piece_;
  chunk->first_token = token_;
  chunk->num_tokens = static_cast<int32_t>(std::min<int64_t>(kChunkTokens, end_ - token_));
  token_ += chunk->num_tokens;
  chunk->ends_piece = token_ == end_;
  FindRows(chunk);
}

void ChunkCursor::FindRows(Chunk* chunk) const {
  const PageTableView& table = args_.table;
  const CacheStrides& k = args_.k_strides;
  const CacheStrides& v = args_.v_strides;
  const int64_t head = chunk->piece.head_group * heads_per_group_;
  const char* const k_cache =
      static_cast<const char*>(args_.k_cache) + head * k.head * element_bytes_;
  const char* const v_cache =
      static_cast<const char*>(args_.v_cache) + head * v.head * element_bytes_;
  const int64_t row_begin = table.RowBegin(chunk->piece.request);
  int64_t page_idx = chunk->first_token / table.page_size;
  int64_t slot = chunk->first_token % table.page_size;  // of the token within its page
  for (int32_t t = 0; t < chunk->num_tokens; ++page_idx, slot = 0) {
    const int64_t page = table.PageId(row_begin, page_idx);
    for (; slot < table.page_size && t < chunk->num_tokens; ++slot, ++t) {
      const bool inside = page >= 0;
      chunk->keys[t] =
          inside ? k_cache + (page * k.page + slot * k.token) * element_bytes_ : nullptr;
      chunk->values[t] =
          inside ? v_cache + (page * v.page + slot * v.token) * element_bytes_ : nullptr;
    }
  }
}

}  // namespace pgqa
