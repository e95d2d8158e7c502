// Checks a decode call against its plan and launches the kernel.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/decode.h"

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "cuda/attention_params.h"
#include "cuda/check_args.h"
#include "cuda/cuda_status.h"
#include "cuda/launch.h"
#include "fault.h"
#include "pgqa/softmax_state.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

constexpr int64_t kElementBytes = 2;

absl::Status CheckStride(const char* name, int64_t stride) {
  if (stride * kElementBytes % kRowAlignment == 0) return absl::OkStatus();
  return FaultStatus(name, absl::StrCat("a stride of ", stride, " elements"),
                     "a multiple of 8 (16-byte rows)");
}

absl::Status CheckArgs(const LaunchPlan& plan, const DecodeArgs& args) {
  const bool has_pages = args.table.num_pages > 0;
  const struct {
    const char* name;
    const void* pointer;
    bool required;
  } pointers[] = {{"q", args.q, true},
                  {"k_cache", args.k_cache, has_pages},
                  {"v_cache", args.v_cache, has_pages},
                  {"out", args.out, true}};
  for (const auto& p : pointers) {
    if (absl::Status s = CheckPointer(p.name, p.pointer, p.required); !s.ok()) return s;
  }
  const struct {
    const char* name;
    int64_t stride;
  } strides[] = {{"q", args.q_batch_stride},        {"q", args.q_head_stride},
                 {"k_cache", args.k_strides.page},  {"k_cache", args.k_strides.token},
                 {"k_cache", args.k_strides.head},  {"v_cache", args.v_strides.page},
                 {"v_cache", args.v_strides.token}, {"v_cache", args.v_strides.head}};
  for (const auto& s : strides) {
    if (absl::Status status = CheckStride(s.name, s.stride); !status.ok()) return status;
  }
  if (absl::Status s = CheckTable(plan, args.table); !s.ok()) return s;
  if (absl::Status s = CheckPointer("step_plan", args.step_plan, false); !s.ok()) return s;
  if (args.step_plan != nullptr && plan.segment_tokens != 0)
    return FaultStatus("step_plan", "an address", "null with batch_invariant");
  return ValidateOptions(args.options);
}

absl::Status CheckWorkspace(const WorkspaceLayout& layout, const WorkspaceView& workspace) {
  if (workspace.bytes < layout.bytes) {
    return FaultStatus("workspace", absl::StrCat(workspace.bytes, " bytes"),
                       absl::StrCat("at least ", layout.bytes));
  }
  return CheckPointer("workspace", workspace.data, layout.bytes > 0);
}

CacheStrides InBytes(const CacheStrides& s) {
  return {s.page * kElementBytes, s.token * kElementBytes, s.head * kElementBytes};
}

AttentionParams MakeParams(const LaunchPlan& plan, const DecodeArgs& args,
                           const WorkspaceLayout& layout, const WorkspaceView& workspace) {
  const AttentionOptions& options = args.options;
  AttentionParams p;
  p.q = static_cast<const char*>(args.q);
  p.k_cache = static_cast<const char*>(args.k_cache);
  p.v_cache = static_cast<const char*>(args.v_cache);
  p.out = static_cast<char*>(args.out);
  p.lse = args.lse;
  p.counters = static_cast<uint64_t*>(workspace.data);
  p.partials = reinterpret_cast<float*>(static_cast<char*>(workspace.data) + layout.counter_bytes);
  p.q_batch_stride = args.q_batch_stride * kElementBytes;
  p.q_head_stride = args.q_head_stride * kElementBytes;
  p.k_strides = InBytes(args.k_strides);
  p.v_strides = InBytes(args.v_strides);
  p.table = args.table;
  p.dependence = args.dependence;
  p.prefetch_end = NumPrefetched(args.table);
  p.prefetch_pitch = PrefetchPitch(args.table);
  p.page_divisor = Divisor(args.table.page_size);
  p.step_plan = args.step_plan;
  p.partition = plan.partition;
  p.axis_cuts = CutAxes(plan.partition);
  p.segment_tokens = plan.segment_tokens;
  p.num_query_heads = plan.shape.num_query_heads;
  p.group = plan.shape.GroupSize();
  p.head_dim = plan.shape.head_dim;
  p.row_blocks = plan.row_blocks;
  p.partial_rows = plan.partial_rows;
  p.window_left = options.window_left;
  p.score_scale = options.sm_scale * kLog2e;
  if (options.logits_soft_cap > 0.0F) {
    p.cap = options.logits_soft_cap * kLog2e;
    p.inverse_cap = options.sm_scale / options.logits_soft_cap;
  }
  p.rope.log2_step = -2.0 * std::log2(options.rope_theta) / plan.shape.head_dim;
  p.rope.turns_scale = 1.0 / (2.0 * M_PI * options.rope_scale);
  return p;
}

cudaError_t Launch(const LaunchPlan& plan, const AttentionParams& params, cudaStream_t stream) {
  switch (plan.kernel.padded_head_dim) {
    case 64:
      return LaunchAttention64(plan, params, stream);
    case 128:
      return LaunchAttention128(plan, params, stream);
    default:
      return LaunchAttention256(plan, params, stream);
  }
}

}  // namespace

absl::StatusOr<DeviceProperties> QueryDevice(int device) {
  DeviceProperties properties;
  PGQA_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&properties.num_sms, cudaDevAttrMultiProcessorCount, device));
  PGQA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(
      &properties.shared_memory_per_block_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return properties;
}

absl::Status Decode(const LaunchPlan& plan, const DecodeArgs& args, const WorkspaceView& workspace,
                    cudaStream_t stream) {
  if (absl::Status s = CheckGpuPlan(plan); !s.ok()) return s;
  if (args.table.batch == 0) return absl::OkStatus();
  if (absl::Status s = CheckBatch(plan, args.table.batch); !s.ok()) return s;
  if (absl::Status s = CheckArgs(plan, args); !s.ok()) return s;
  const absl::StatusOr<WorkspaceLayout> layout =
      WorkspaceFor(plan, args.table.batch, args.table.NumEntries());
  if (!layout.ok()) return layout.status();
  if (absl::Status s = CheckWorkspace(*layout, workspace); !s.ok()) return s;
  return CudaStatus(Launch(plan, MakeParams(plan, args, *layout, workspace), stream),
                    "attention kernel launch");
}

}  // namespace pgqa
