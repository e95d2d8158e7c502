// Arguments of the attention kernel, passed by value as a grid constant.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/divisor.h"
#include "pgqa/page_table.h"
#include "pgqa/partition.h"
#include "pgqa/types.h"

namespace pgqa {

struct RopeParams {
  double turns_scale = 0.0;  // 1 / (2 pi rope_scale)
  double log2_step =
      0.0;  // -2 log2(theta) / head_dim: pair i turns by turns_scale * 2^(i log2_step) a token
};

constexpr uint32_t kPrefetchedIds =
    1024;  // page ids that a warp brings to the L2: a line of 128 bytes a lane

// Of the table's entries, as they lie in memory.
inline int64_t NumPrefetched(const PageTableView& table) {
  if (table.IsCsr()) return table.num_indices;
  if (table.columns == 0) return 0;
  return (table.batch - 1) * table.row_stride + table.columns;
}

// Entries from the ids that one warp brings to those of the next. A CSR table is brought whole, as far as the warps
// reach, and so is a block table of short rows. Long rows may be padding but for their first columns: each gets equally
// many warps, at equal distances from there on, so few that for up to 256 rows they bring 1 MB at most.
inline uint32_t PrefetchPitch(const PageTableView& table) {
  constexpr int64_t kMaxWarps = 256;
  if (table.IsCsr() || table.row_stride <= kPrefetchedIds) return kPrefetchedIds;
  int64_t pitch = table.row_stride;
  for (int64_t warps = 2 * int64_t{table.batch};
       warps <= kMaxWarps && pitch % 2 == 0 && pitch >= 2 * kPrefetchedIds; warps *= 2) {
    pitch /= 2;
  }
  return pitch < UINT32_MAX ? static_cast<uint32_t>(pitch) : UINT32_MAX;
}

// In the order of first use: constants are fetched line by line, and a miss stalls all warps.
struct AttentionParams {
  PageTableView table;
  Dependence dependence = Dependence::kStream;
  uint32_t prefetch_pitch = kPrefetchedIds;
  int64_t prefetch_end = 0;         // entry of the table
  const void* step_plan = nullptr;  // of PlanStep(); null: the kernel plans for itself
  PartitionConfig partition;
  AxisCuts axis_cuts;
  int32_t window_left = -1;
  int32_t row_blocks = 1;  // blocks of rows_per_block query heads that share a KV head
  int32_t head_dim = 0;
  Divisor page_divisor;  // by table.page_size

  const char* k_cache = nullptr;  // [pages, page_size, kv_heads, head_dim]; all strides in bytes
  const char* v_cache = nullptr;
  CacheStrides k_strides;
  CacheStrides v_strides;
  const char* q = nullptr;  // [batch, query_heads, head_dim]
  int64_t q_batch_stride = 0;
  int64_t q_head_stride = 0;
  int32_t num_query_heads = 0;
  int32_t group = 0;

  float score_scale = 0.0F;  // sm_scale * log2 e
  float cap = 0.0F;          // logits_soft_cap * log2 e; 0: none
  float inverse_cap = 0.0F;  // sm_scale / logits_soft_cap
  int32_t partial_rows = 0;  // rows stored a partial
  RopeParams rope;

  float* partials = nullptr;  // [slots, heads a worker, partial_rows, padded head_dim + 4]
  uint64_t* counters =
      nullptr;           // [workers, or slots of the batch-invariant mode, warps]; see arrival.cuh
  char* out = nullptr;   // [batch, query_heads, head_dim], contiguous
  float* lse = nullptr;  // [batch, query_heads], natural log; may be null

  int32_t segment_tokens = 0;  // of the batch-invariant kernels
};

}  // namespace pgqa
