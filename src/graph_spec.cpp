// What a graph refuses before it looks at a device, and which capacity serves a step.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/graph_spec.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fault.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

absl::Status CheckInside(const char* argument, int64_t value, int64_t least, int64_t most,
                         const char* meaning) {
  if (value >= least && value <= most) return absl::OkStatus();
  return FaultStatus(argument, value, absl::StrCat(least, " to ", most, meaning));
}

// That the arrays of one kind of table alone are named, and its sizes are right.
absl::Status ValidateTableOf(const GraphSpec& spec) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // what an indptr can say
  if (spec.IsCsr()) {
    if (spec.block_table != nullptr || spec.seq_lens != nullptr)
      return FaultStatus("max_columns", "none", "that of block_table and seq_lens");
    if (spec.new_tokens != 0)
      return FaultStatus("new_tokens", spec.new_tokens,
                         "0 without max_columns: a CSR table counts the step's token");
    return CheckInside("max_pages", spec.max_pages, 0, kMost, "");
  }
  if (spec.page_indptr != nullptr || spec.page_indices != nullptr || spec.last_page_len != nullptr)
    return FaultStatus("page_indptr, page_indices, last_page_len", "an address with max_columns",
                       "none");
  if (spec.max_pages != 0)
    return FaultStatus("max_pages", spec.max_pages,
                       "0 with max_columns: the table has rows of its own");
  if (absl::Status s = CheckInside("max_columns", spec.max_columns, 0, kMost, ""); !s.ok())
    return s;
  if (spec.block_table_stride < 0)
    return FaultStatus("block_table_stride", spec.block_table_stride, "at least 0");
  return CheckInside("new_tokens", spec.new_tokens, 0, 1, "");
}

template <class Number>
Number RoundedUp(Number value, Number most) {
  Number rounded = 1;
  while (rounded < value && rounded <= most / 2) rounded *= 2;
  return rounded < value ? most : std::min(rounded, most);
}

// Half-open run of addresses.
struct Memory {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

// From the first to the last element of a tensor of 2-byte elements with the sizes and strides given and a contiguous
// row of `columns`; empty without elements.
Memory Span(const void* address, std::initializer_list<std::pair<int64_t, int64_t>> dimensions,
            int64_t columns) {
  int64_t first = 0;
  int64_t last = 0;
  for (const auto& [size, stride] : dimensions) {
    if (size == 0 || address == nullptr) return {};
    (stride < 0 ? first : last) += (size - 1) * stride;
  }
  const auto base = reinterpret_cast<uintptr_t>(address);
  return {base + first * 2, base + (last + columns) * 2};
}

bool Overlap(const Memory& a, const Memory& b) { return a.begin < b.end && b.begin < a.end; }

}  // namespace

bool LayersReadOutputs(const GraphSpec& spec) {
  const AttentionShape& s = spec.shape;
  std::vector<Memory> written;
  for (const GraphLayer& layer : spec.layers) {
    const int64_t rows = int64_t{s.batch} * s.num_query_heads;
    written.push_back(Span(layer.out, {{rows, s.head_dim}}, s.head_dim));
    written.push_back(Span(layer.lse, {{2 * rows, 1}}, 1));
  }
  const auto is_written = [&](const Memory& memory) {
    return std::any_of(written.begin(), written.end(),
                       [&](const Memory& other) { return Overlap(memory, other); });
  };
  const auto cache = [&](const void* address, const CacheStrides& strides) {
    return Span(address,
                {{spec.num_pages, strides.page},
                 {s.page_size, strides.token},
                 {s.num_kv_heads, strides.head}},
                s.head_dim);
  };
  return std::any_of(spec.layers.begin(), spec.layers.end(), [&](const GraphLayer& layer) {
    return is_written(
               Span(layer.q,
                    {{s.batch, layer.q_strides.batch}, {s.num_query_heads, layer.q_strides.head}},
                    s.head_dim)) ||
           is_written(cache(layer.k_cache, layer.k_cache_strides)) ||
           is_written(cache(layer.v_cache, layer.v_cache_strides));
  });
}

absl::Status ValidateGraphSpec(const GraphSpec& spec) {
  if (absl::Status s = ValidateShape(spec.shape, Backend::kGpu); !s.ok()) return s;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (spec.shape.batch < 1) return FaultStatus("max_batch", spec.shape.batch, "at least 1");
  if (absl::Status s = ValidateTableOf(spec); !s.ok()) return s;
  if (absl::Status s = CheckInside("num_pages", spec.num_pages, 0, kMost, ""); !s.ok()) return s;
  if (spec.rotate_appended && !spec.append) {
    return FaultStatus("rotate_appended", "true without append", "append, whose keys are turned");
  }
  if (spec.rotate_appended && spec.shape.pos_encoding != PosEncoding::kNone) {
    return FaultStatus("rotate_appended", "true with pos_encoding_mode 1 (ROPE_LLAMA)",
                       "one of the two: keys are turned once");
  }
  for (const GraphLayer& layer : spec.layers) {
    if (absl::Status s = ValidateOptions(layer.options); !s.ok()) return s;
  }
  return absl::OkStatus();
}

GraphCapacity CapacityOf(const GraphSpec& spec) {
  return {spec.shape.batch, spec.IsCsr() ? spec.max_pages : spec.max_columns};
}

absl::Status CheckFits(const GraphCapacity& capacity, int32_t live_batch, int64_t num_pages) {
  absl::Status s =
      CheckInside("live_batch", live_batch, 0, capacity.max_batch, " (the capacity of the graph)");
  s.Update(
      CheckInside("num_pages", num_pages, 0, capacity.max_pages, " (the capacity of the graph)"));
  return s;
}

absl::StatusOr<GraphCapacity> BucketFor(const GraphCapacity& limit, int32_t live_batch,
                                        int64_t num_pages) {
  if (absl::Status s = CheckFits(limit, live_batch, num_pages); !s.ok()) return s;
  return GraphCapacity{RoundedUp(live_batch, limit.max_batch),
                       RoundedUp(num_pages, limit.max_pages)};
}

}  // namespace pgqa
