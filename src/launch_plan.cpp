// The launch plan: kernel configuration, grid and workspace from a shape and a device.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/launch_plan.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "fault.h"
#include "pgqa/segments.h"
#include "pgqa/validate.h"
#include "tile_config.h"

namespace pgqa {
namespace {

// Live tokens times heads a worker from which a worker of the GPU takes two heads. Measured on an H200 at head
// dim 128 (us at 1, 2, 4 heads): 8x4k, work 1986: 41, 41, 43; 24 ragged 1-5k of group 8, 2840: 58, 61, 61; 32x4k, 7944:
// 134, 135, 137; 200 ragged 1-700, 4240: 97, 82, 82; 64x8k, 31775: 508, 498, 500; 1x128k, 7944: 135, 136, 143. Eight
// heads were never the best for their reads; they are for short requests, whose pieces each warp ends alone (us with as
// many heads as fill three quarters of the warps, and with eight: 512x80 81, 57; 4096 ragged 1-64 289, 191; equal from
// 96 tokens on).
constexpr int32_t kDoubleHeadsFrom = 4000;
constexpr int32_t kGpuMaxHeadsByWork = 2;
constexpr int32_t kGpuMaxHeads = 8;
constexpr int32_t kGpuMinFillEighths = 6;
// Of a worker of the CPU: several heads, since neighbouring heads make one long read of each token.
constexpr int32_t kCpuStageTokens = 32;
constexpr int32_t kCpuMaxHeads = 8;

// Batch-invariant mode: tokens of a segment. Partials add 1 % to what is read at head dim 128 and group 4, and an H200
// reads a segment in some 15 us a worker, of which the end of a piece takes one or two. Workers differ by one segment:
// half as many tokens would halve that, and double the rest; 131,072 tokens would be merged from 256 partials, not 128.
constexpr int32_t kSegmentTokens = 1024;
static_assert(kMostSegments * kSegmentTokens < kUncutTokens);

// The most warps, halving from the row's maximum, whose rings fit `limit` bytes; 0 if one does not.
int32_t WarpsThatFit(const TileConfig& tile, int32_t limit) {
  int32_t warps = tile.max_warps;
  while (warps > 0 && tile.SharedBytes(warps) > limit) warps /= 2;
  return warps;
}

int32_t MaxHeadsPerWorker(int32_t num_heads, int32_t warps) {
  int32_t heads = 1;
  while (heads * 2 <= warps && num_heads % (heads * 2) == 0) heads *= 2;
  return heads;
}

int64_t CounterBytes(const LaunchPlan& plan, int64_t num_counters_a_warp) {
  return AlignedBytes(num_counters_a_warp * plan.kernel.num_warps * 8);
}

// Sizes of the workspace, once partition and partial_rows are known.
void SizeWorkspace(int32_t partial_floats, LaunchPlan* plan) {
  const PartitionConfig& partition = plan->partition;
  plan->slot_bytes = int64_t{partition.max_heads_per_worker} * plan->partial_rows * partial_floats *
                     static_cast<int64_t>(sizeof(float));
  if (plan->segment_tokens != 0) return;
  plan->num_slots = 2 * partition.num_workers;
  plan->counter_bytes = CounterBytes(*plan, partition.num_workers);
  plan->workspace_bytes = plan->counter_bytes + plan->num_slots * plan->slot_bytes;
}

// What the batch-invariant mode changes: workers always take as many heads.
void CutIntoSegments(int32_t heads_per_worker, LaunchPlan* plan) {
  if (!plan->shape.batch_invariant) return;
  plan->partition.max_heads_per_worker = heads_per_worker;
  plan->segment_tokens = kSegmentTokens;
}

}  // namespace

absl::StatusOr<LaunchPlan> MakeGpuLaunchPlan(const AttentionShape& shape,
                                             const DeviceProperties& device) {
  if (absl::Status status = ValidateShape(shape, Backend::kGpu); !status.ok()) return status;
  if (absl::Status status = ValidateNumWorkers("num_sms", device.num_sms); !status.ok())
    return status;
  const bool rope = shape.pos_encoding == PosEncoding::kRopeLlama;
  const RowMode row_mode = shape.GroupSize() <= kSplitRows ? RowMode::kSplit : RowMode::kWide;
  const TileConfig tile = TileConfigFor(shape.head_dim, rope, row_mode == RowMode::kWide);
  const int32_t warps = WarpsThatFit(tile, device.shared_memory_per_block_optin);
  if (warps == 0) {
    return FaultStatus("shared_memory_per_block_optin",
                       absl::StrCat(device.shared_memory_per_block_optin, " bytes"),
                       absl::StrCat("at least ", tile.SharedBytes(1), " for head_dim ",
                                    shape.head_dim, rope ? " with RoPE" : ""));
  }

  LaunchPlan plan;
  plan.shape = shape;
  KernelConfig& kernel = plan.kernel;
  kernel.padded_head_dim = tile.padded_head_dim;
  kernel.row_mode = row_mode;
  kernel.rope = rope;
  kernel.dtype = shape.dtype;
  kernel.num_warps = warps;
  kernel.num_stages = tile.num_stages;
  kernel.rows_per_block = row_mode == RowMode::kSplit ? kSplitRows : kTileRows;
  kernel.shared_memory_bytes = tile.SharedBytes(warps);

  plan.row_blocks = (shape.GroupSize() + kernel.rows_per_block - 1) / kernel.rows_per_block;
  plan.partial_rows = std::min(shape.GroupSize(), kernel.rows_per_block);
  PartitionConfig& partition = plan.partition;
  partition.num_workers = device.num_sms;  // one CTA an SM
  partition.warps_per_worker = warps;
  partition.stage_tokens = kStageTokens;
  partition.num_heads = shape.num_kv_heads * plan.row_blocks;
  partition.max_heads_per_worker =
      MaxHeadsPerWorker(partition.num_heads, std::min(warps, kGpuMaxHeads));
  partition.min_tiles_per_worker = 1;
  partition.double_heads_from = kDoubleHeadsFrom;
  partition.max_heads_by_work = kGpuMaxHeadsByWork;
  partition.min_fill_eighths = kGpuMinFillEighths;
  CutIntoSegments(1, &plan);
  SizeWorkspace(tile.PartialFloats(), &plan);
  return plan;
}

absl::StatusOr<LaunchPlan> MakeCpuLaunchPlan(const AttentionShape& shape, int32_t num_threads) {
  if (absl::Status status = ValidateShape(shape, Backend::kCpu); !status.ok()) return status;
  if (absl::Status status = ValidateNumWorkers("num_threads", num_threads); !status.ok())
    return status;
  LaunchPlan plan;
  plan.shape = shape;
  plan.kernel.dtype = shape.dtype;
  plan.partial_rows = shape.GroupSize();
  plan.partition.num_workers = num_threads;
  plan.partition.stage_tokens = kCpuStageTokens;
  plan.partition.num_heads = shape.num_kv_heads;
  plan.partition.max_heads_per_worker = MaxHeadsPerWorker(shape.num_kv_heads, kCpuMaxHeads);
  plan.partition.warps_per_worker = plan.partition.max_heads_per_worker;
  CutIntoSegments(plan.partition.max_heads_per_worker, &plan);
  SizeWorkspace(shape.head_dim + 4, &plan);  // accumulator, maximum, sum, two words unused
  return plan;
}

absl::StatusOr<WorkspaceLayout> WorkspaceFor(const LaunchPlan& plan, int32_t batch,
                                             int64_t num_indices) {
  if (plan.segment_tokens == 0) {
    return WorkspaceLayout{plan.num_slots, plan.counter_bytes, plan.workspace_bytes};
  }
  const int64_t segments =
      MaxSegments(batch, num_indices, plan.shape.page_size, plan.segment_tokens);
  const int32_t groups = plan.partition.num_heads / plan.partition.max_heads_per_worker;
  const int64_t most = std::min(kMostSegments, int64_t{INT32_MAX} / groups);
  if (segments > most) {
    return FaultStatus("page_indices",
                       absl::StrCat(num_indices, " entries of ", plan.shape.page_size,
                                    " tokens for ", batch, " requests, ", segments, " segments"),
                       absl::StrCat("at most ", most, " with batch_invariant"));
  }
  WorkspaceLayout layout;
  layout.num_slots = segments * groups;
  layout.counter_bytes = CounterBytes(plan, layout.num_slots);
  layout.bytes = layout.counter_bytes + layout.num_slots * plan.slot_bytes;
  return layout;
}

}  // namespace pgqa
