// What a graph refuses before it looks at a device, and which capacity serves a step.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/graph_spec.h"

#include <algorithm>
#include <limits>

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

}  // namespace

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
