// Decode attention on the GPU: one call, one kernel launch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pgqa/launch_plan.h"
#include "pgqa/page_table.h"
#include "pgqa/types.h"

namespace pgqa {

// Device pointers of one call. Element types as LaunchPlan::shape.dtype; strides in elements.
struct DecodeArgs {
  const void* q = nullptr;  // [batch, query_heads, head_dim], last dimension contiguous
  int64_t q_batch_stride = 0;
  int64_t q_head_stride = 0;
  const void* k_cache =
      nullptr;  // [pages, page_size, kv_heads, head_dim], last dimension contiguous
  const void* v_cache = nullptr;
  CacheStrides k_strides;
  CacheStrides v_strides;
  PageTableView table;   // device memory; batch may differ from the plan's
  void* out = nullptr;   // [batch, query_heads, head_dim], contiguous, 16-byte aligned
  float* lse = nullptr;  // [batch, query_heads] natural log-sum-exp; null: not written
  AttentionOptions options;
  const void* step_plan = nullptr;  // of PlanStep(), step_plan.h; null: the call plans for itself
  Dependence dependence = Dependence::kStream;
};

// Memory that a call works in; valid until the call's kernel has run. Whatever it holds does no harm, before a call and
// between calls and replays. Launches that may run at the same time need different workspaces.
struct WorkspaceView {
  void* data = nullptr;  // 16-byte aligned
  int64_t bytes = 0;     // at least those of WorkspaceFor() the call's table
};

// The properties of CUDA device `device` that plans depend on. Does not synchronise.
absl::StatusOr<DeviceProperties> QueryDevice(int device);

// Enqueues the call on `stream` of the current device; may be captured. Never synchronises, allocates or
// reads device memory on the host. A batch of 0 launches nothing.
//   InvalidArgument  an argument or the workspace does not fit the plan; nothing was launched
//   Internal, ResourceExhausted  the launch failed
// The page table may be rewritten between calls and graph replays, but not while the call's kernel runs.
absl::Status Decode(const LaunchPlan& plan, const DecodeArgs& args, const WorkspaceView& workspace,
                    cudaStream_t stream);

}  // namespace pgqa
