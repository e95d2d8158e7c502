// The work partition of a step, made once on the device for all layers that share a table and a window.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "pgqa/decode.h"
#include "pgqa/launch_plan.h"
#include "pgqa/page_table.h"

namespace pgqa {

// One record a worker, whatever the batch.
constexpr int64_t kStepRecordBytes = 128;

// Device memory that the plan of a step takes.
inline int64_t StepPlanBytes(const LaunchPlan& plan) {
  return plan.partition.num_workers * kStepRecordBytes;
}

struct StepPlanArgs {
  PageTableView table;  // device memory; batch may differ from the plan's
  int32_t window_left = -1;
  void* step_plan = nullptr;  // 16-byte aligned, StepPlanBytes(), written
  WorkspaceView workspace =
      {};  // of the step's calls, none of which may run: made as new; may be null
  Dependence dependence = Dependence::kStream;  // kStream or kAny
};

// Enqueues one launch on `stream` of the current device that plans a step. Decode() calls behind it, with the same
// launch plan, table and window_left, may be given the result as DecodeArgs::step_plan until the table changes. With
// the plan of another table their outputs are undefined, and later ones until the next PlanStep() with their workspace. May be captured; neither synchronises
// nor allocates. A batch of 0 launches nothing.
//   InvalidArgument  an argument does not fit; nothing was launched
//   Internal  the launch failed
absl::Status PlanStep(const LaunchPlan& plan, const StepPlanArgs& args, cudaStream_t stream);

}  // namespace pgqa
