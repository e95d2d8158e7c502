// Appending: each request's new key and value row goes into the last slot of its page table row.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "pgqa/page_table.h"
#include "pgqa/types.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace pgqa {

// The tensors of one call, not owned: device memory for Append(), host memory for AppendOnCpu().
// Strides in elements, any; the last dimension is contiguous, elements are aligned to their own
// size. Caches must overlap nothing else.
struct AppendArgs {
  const void* k = nullptr;  // [batch, kv_heads, head_dim], the new tokens' keys
  const void* v = nullptr;  // [batch, kv_heads, head_dim]
  RowStrides k_strides;
  RowStrides v_strides;
  void* k_cache = nullptr;  // [table.num_pages, page_size, kv_heads, head_dim]
  void* v_cache = nullptr;
  CacheStrides k_cache_strides;
  CacheStrides v_cache_strides;
  PageTableView table;      // counts the new token: it goes to position kv_len - 1
  const void* q = nullptr;  // [batch, query_heads, head_dim]; null: no queries are turned
  void* q_out =
      nullptr;  // [batch, query_heads, head_dim]; q with q's strides, or memory of its own
  RowStrides q_strides;
  RowStrides q_out_strides;
  double rope_scale = 1.0;
  double rope_theta = 10000.0;
  Dependence dependence = Dependence::kStream;  // kStream or kAny; Append() only
};

// Writes k and v of every live request: one that has a token, whose last page is one of the caches',
// and which has no more tokens than its row of a block table holds. For the others nothing is
// written, nor read but the table, so that padding may hold anything. Where two requests end in the
// same slot, one of them wins.
//
// Where shape.pos_encoding is kRopeLlama, for engines that cache turned keys, k is turned by the
// token's position as it is written, and q likewise into q_out, with angles in fp64.
//
// Append() enqueues one launch on `stream` of the current device, may be captured, and neither
// synchronises nor allocates; a batch of 0 launches nothing. AppendOnCpu() returns when all is
// written.
//   InvalidArgument  an argument does not fit; nothing was launched or written
//   Internal  the launch failed
absl::Status Append(const AttentionShape& shape, const AppendArgs& args, CUstream_st* stream);
absl::Status AppendOnCpu(const AttentionShape& shape, const AppendArgs& args);

// What both refuse. `shape.batch` is not used: the table has it.
absl::Status ValidateAppend(const AttentionShape& shape, const AppendArgs& args);

}  // namespace pgqa
