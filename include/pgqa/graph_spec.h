// What a captured decode step has baked in, as a value, and what fits its capacity.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pgqa/types.h"

namespace pgqa {

// One layer of a step. Addresses are of device memory; strides in elements; the last dimension is
// contiguous. A null address of anything but a cache stands for memory of the graph's own,
// contiguous; its strides are ignored.
struct GraphLayer {
  const void* q = nullptr;  // [batch, query_heads, head_dim]
  RowStrides q_strides;
  void* k_cache = nullptr;  // [pages, page_size, kv_heads, head_dim]; written only by appending
  void* v_cache = nullptr;
  CacheStrides k_cache_strides;
  CacheStrides v_cache_strides;
  const void* k =
      nullptr;  // [batch, kv_heads, head_dim], the new tokens' rows; only with GraphSpec::append
  const void* v = nullptr;
  RowStrides k_strides;
  RowStrides v_strides;
  void* out = nullptr;   // [batch, query_heads, head_dim], contiguous
  float* lse = nullptr;  // [batch, query_heads] natural log; only with GraphSpec::return_lse
  AttentionOptions options;
};

// A decode step for up to shape.batch requests over one page table: CSR, or a padded block table
// where max_columns is not kCsr. Null addresses as in GraphLayer.
struct GraphSpec {
  static constexpr int32_t kCsr = -1;

  AttentionShape shape;                    // batch: the capacity, at least 1
  int64_t num_pages = 0;                   // pages of the caches; ids live in [0, num_pages)
  int64_t max_pages = 0;                   // entries of page_indices, the capacity of a CSR table
  const int32_t* page_indptr = nullptr;    // [shape.batch + 1]
  const int32_t* page_indices = nullptr;   // [max_pages]
  const int32_t* last_page_len = nullptr;  // [shape.batch]
  int32_t max_columns = kCsr;              // of the block table, its capacity
  const int32_t* block_table = nullptr;    // [shape.batch, max_columns]
  int64_t block_table_stride = 0;          // entries from row to row
  const int32_t* seq_lens = nullptr;       // [shape.batch]; the graph's own begin as -1
  int32_t new_tokens = 0;                  // as in BlockTable; 0 with CSR
  bool live_batch = true;   // a head node that takes a live batch; costs one small kernel
  bool return_lse = false;  // LSE of every layer
  bool append =
      false;  // writes k and v into the caches before each layer; the table counts the new token
  bool rotate_appended =
      false;  // appends keys turned by RoPE and turns q alike; shape.pos_encoding is kNone
  bool dependent_launch = true;    // launches of a step begin before the one before has ended
  std::vector<GraphLayer> layers;  // at least 1

  bool IsCsr() const { return max_columns == kCsr; }
};

// Equality and hash of everything that a graph has baked in.
struct GraphKey {
  int32_t device = 0;
  GraphSpec spec;
};

// How many requests a graph holds, and how many pages: entries of page_indices, or columns of a block
// table.
struct GraphCapacity {
  int32_t max_batch = 0;
  int64_t max_pages = 0;
};

GraphCapacity CapacityOf(const GraphSpec& spec);

// All that is wrong with a spec apart from its addresses, which have no meaning here:
// InvalidArgument.
absl::Status ValidateGraphSpec(const GraphSpec& spec);

// Whether a layer reads memory that a layer writes: its q or caches overlap an output or LSE.
bool LayersReadOutputs(const GraphSpec& spec);

// InvalidArgument unless a step of `live_batch` requests and `num_pages` pages fits `capacity`.
absl::Status CheckFits(const GraphCapacity& capacity, int32_t live_batch, int64_t num_pages);

// The capacity of the graph that serves such a step: both numbers rounded up to powers of two, at
// least 1 and at most those of `limit`. InvalidArgument where the step does not fit `limit`.
absl::StatusOr<GraphCapacity> BucketFor(const GraphCapacity& limit, int32_t live_batch,
                                        int64_t num_pages);

// The fields of each struct in one place, for equality and hash alike.
namespace graph_key_internal {

inline auto Fields(const AttentionShape& s) {
  return std::tie(s.batch, s.num_query_heads, s.num_kv_heads, s.head_dim, s.page_size, s.dtype,
                  s.pos_encoding, s.batch_invariant);
}
inline auto Fields(const AttentionOptions& o) {
  return std::tie(o.sm_scale, o.window_left, o.logits_soft_cap, o.rope_scale, o.rope_theta);
}
inline auto Fields(const RowStrides& s) { return std::tie(s.batch, s.head); }
inline auto Fields(const CacheStrides& s) { return std::tie(s.page, s.token, s.head); }
inline auto Fields(const GraphLayer& l) {
  return std::tuple_cat(std::tie(l.q, l.k_cache, l.v_cache, l.k, l.v, l.out, l.lse),
                        Fields(l.q_strides), Fields(l.k_cache_strides), Fields(l.v_cache_strides),
                        Fields(l.k_strides), Fields(l.v_strides), Fields(l.options));
}
inline auto Fields(const GraphSpec& s) {
  return std::tuple_cat(
      Fields(s.shape),
      std::tie(s.num_pages, s.max_pages, s.page_indptr, s.page_indices, s.last_page_len),
      std::tie(s.max_columns, s.block_table, s.block_table_stride, s.seq_lens, s.new_tokens),
      std::tie(s.live_batch, s.return_lse, s.append, s.rotate_appended, s.dependent_launch));
}

}  // namespace graph_key_internal

inline bool operator==(const GraphLayer& a, const GraphLayer& b) {
  return graph_key_internal::Fields(a) == graph_key_internal::Fields(b);
}
inline bool operator==(const GraphSpec& a, const GraphSpec& b) {
  return graph_key_internal::Fields(a) == graph_key_internal::Fields(b) && a.layers == b.layers;
}
inline bool operator==(const GraphKey& a, const GraphKey& b) {
  return a.device == b.device && a.spec == b.spec;
}

// For absl::Hash.
template <class H>
H AbslHashValue(H state, const GraphLayer& layer) {
  return H::combine(std::move(state), graph_key_internal::Fields(layer));
}
template <class H>
H AbslHashValue(H state, const GraphSpec& spec) {
  return H::combine(std::move(state), graph_key_internal::Fields(spec), spec.layers);
}
template <class H>
H AbslHashValue(H state, const GraphKey& key) {
  return H::combine(std::move(state), key.device, key.spec);
}

}  // namespace pgqa
