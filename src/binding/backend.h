// Runs checked calls on the device of their tensors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/types.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "binding/checks.h"
#include "pgqa/launch_plan.h"
#if PGQA_WITH_CUDA
#include "pgqa/decode.h"
#endif

namespace pgqa::binding {

// Checks a call and runs it: InvalidArgument with the first fault, before anything is launched. `out` is
// call.out or a fresh tensor; `lse` is call.lse, or fresh where the call returns it, or undefined.
absl::Status RunCall(const DecodeCall& call, at::Tensor* out, at::Tensor* lse);

// Writes `out`, and `lse` where it is defined. Without the GIL, whoever calls; returns when done.
absl::Status RunOnCpu(const DecodeCall& call, const AttentionShape& shape,
                      const AttentionOptions& options, const at::Tensor& out,
                      const at::Tensor& lse);

#if PGQA_WITH_CUDA
// Enqueues the call on the current stream of q's device. `out` and `lse` are allocated where undefined; lse
// only if the call returns it. Does not synchronise.
absl::Status RunOnGpu(const DecodeCall& call, const AttentionShape& shape,
                      const AttentionOptions& options, at::Tensor* out, at::Tensor* lse);

// The device's view of a checked call.
DecodeArgs DecodeArgsOf(const DecodeCall& call, const AttentionOptions& options,
                        const at::Tensor& out, const at::Tensor& lse);

// The plan of a call on CUDA device `device`, cached.
absl::StatusOr<LaunchPlan> GpuPlan(const AttentionShape& shape, int device);

struct PoolUsage {
  int32_t workspaces = 0;
  int64_t bytes = 0;
};
PoolUsage GetPoolUsage();
#endif

}  // namespace pgqa::binding
