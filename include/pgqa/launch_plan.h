// The launch plan: everything of a call that depends on shape and device alone, never on lengths.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "pgqa/partition.h"
#include "pgqa/types.h"

namespace pgqa {

// What the GPU plan needs of a device. Plain numbers, so that plans are made and tested without one.
struct DeviceProperties {
  int32_t num_sms = 0;
  int32_t shared_memory_per_block_optin = 0;  // bytes
};

// One compiled kernel. padded_head_dim is 64, 128 or 256; row_mode below.
//   kSplit  groups up to 8: query heads in rows 0-7 of the tensor-core tile, low parts in rows 8-15
//   kWide   larger groups: 16 rows a tile
enum class RowMode : int32_t { kSplit, kWide };

struct KernelConfig {
  int32_t padded_head_dim = 0;
  RowMode row_mode = RowMode::kSplit;
  bool rope = false;
  DType dtype = DType::kBFloat16;
  int32_t num_warps = 0;
  int32_t num_stages = 0;      // of each warp's ring
  int32_t rows_per_block = 0;  // query heads that a warp computes together
  int32_t shared_memory_bytes = 0;
};

// Of a part of an allocation, up to where the next part may begin.
constexpr int64_t AlignedBytes(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct LaunchPlan {
  AttentionShape shape;
  KernelConfig kernel;  // GPU plans only
  PartitionConfig partition;
  int32_t segment_tokens = 0;  // with shape.batch_invariant, see segments.h; else 0
  int32_t row_blocks = 1;      // blocks of query heads that a group is cut into; each reads K and V
  int32_t partial_rows = 0;    // query heads of one (slot, head): min(group, rows a block)
  int64_t slot_bytes = 0;      // partials of one slot, heads_per_worker at its most
  // The next three are 0 with shape.batch_invariant: then they depend on the table, see WorkspaceFor().
  int32_t num_slots = 0;        // 2 * workers
  int64_t workspace_bytes = 0;  // merge counters, then partials; a pure function of this plan
  int64_t counter_bytes = 0;    // of them the counters, one of 8 bytes a warp of each worker
};

// The workspace of a call: merge counters, then the partials of `num_slots` slots.
struct WorkspaceLayout {
  int64_t num_slots = 0;
  int64_t counter_bytes = 0;
  int64_t bytes = 0;
};

// The workspace of calls whose page tables hold at most `batch` requests and `num_indices` entries. Without
// shape.batch_invariant that of the plan, whatever the table. With it, for S = segment_tokens,
//   num_slots = (num_indices * page_size / S + batch) * head groups (on the GPU num_kv_heads * row_blocks)
// each of slot_bytes and, on the GPU, of 8 bytes a warp for counters; it grows with either number. InvalidArgument
// for a table of 2^20 segments of a head or more, or more slots than an int32_t counts.
absl::StatusOr<WorkspaceLayout> WorkspaceFor(const LaunchPlan& plan, int32_t batch,
                                             int64_t num_indices);

// Plan of a GPU call. Errors (InvalidArgument) name the argument, what it got and what was expected.
absl::StatusOr<LaunchPlan> MakeGpuLaunchPlan(const AttentionShape& shape,
                                             const DeviceProperties& device);

// Plan of a CPU call on `num_threads` threads. Any head_dim; float16, bfloat16 and float32.
absl::StatusOr<LaunchPlan> MakeCpuLaunchPlan(const AttentionShape& shape, int32_t num_threads);

}  // namespace pgqa
