// Plans a step on the device: each CTA the worker of its number.
// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"
#include "cuda/arrival.cuh"
#include "cuda/check_args.h"
#include "cuda/cuda_status.h"
#include "cuda/device_planner.cuh"
#include "cuda/kernel_launch.h"
#include "cuda/ptx.cuh"
#include "fault.h"
#include "pgqa/step_plan.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

constexpr int32_t kThreads = kMaxWarps * kWarpSize;

struct StepPlanParams {
  PageTableView table;
  PartitionConfig partition;
  AxisCuts axis_cuts;
  int32_t window_left;
  void* step_plan;
  uint64_t* counters;  // [workers, num_warps], or null
  int32_t num_warps;   // of the calls
};

template <class Index>
__global__ void __launch_bounds__(kThreads)
    StepPlanKernel(const __grid_constant__ StepPlanParams params) {
  extern __shared__ __align__(16) char shared[];
  ptx::WaitForPrecedingGrid();
  ptx::AllowDependentGrid();
  RowWindow<Index> rows;
  rows.Load(params.table, 0);
  const auto plan = PlanWorker(params.partition, params.axis_cuts, params.table, params.window_left,
                               shared, &rows);
  if (threadIdx.x == 0) *StepRecord<Index>(params.step_plan) = plan;
  // A call with an older plan than its table may have left counts that no later one completes.
  if (params.counters != nullptr && threadIdx.x < params.num_warps)
    params.counters[blockIdx.x * params.num_warps + threadIdx.x] = kCounterTag;
}

absl::Status CheckArgs(const LaunchPlan& plan, const StepPlanArgs& args) {
  if (absl::Status s = CheckGpuPlan(plan); !s.ok()) return s;
  if (plan.segment_tokens != 0) {
    return FaultStatus("plan", "one of a batch-invariant shape",
                       "another: batch-invariant calls plan for themselves");
  }
  if (absl::Status s = CheckBatch(plan, args.table.batch); !s.ok()) return s;
  if (absl::Status s = CheckTable(plan, args.table); !s.ok()) return s;
  AttentionOptions options;
  options.window_left = args.window_left;
  if (absl::Status s = ValidateOptions(options); !s.ok()) return s;
  if (args.dependence > Dependence::kAny)
    return FaultStatus("dependence", static_cast<int32_t>(args.dependence), "kStream or kAny");
  if (args.workspace.data != nullptr && args.workspace.bytes < plan.workspace_bytes) {
    return FaultStatus("workspace", absl::StrCat(args.workspace.bytes, " bytes"),
                       absl::StrCat("at least ", plan.workspace_bytes));
  }
  if (absl::Status s = CheckPointer("workspace", args.workspace.data, false); !s.ok()) return s;
  return CheckPointer("step_plan", args.step_plan, true);
}

}  // namespace

absl::Status PlanStep(const LaunchPlan& plan, const StepPlanArgs& args, cudaStream_t stream) {
  if (absl::Status s = CheckArgs(plan, args); !s.ok()) return s;
  if (args.table.batch == 0) return absl::OkStatus();
  const StepPlanParams params{
      args.table,           plan.partition, CutAxes(plan.partition),
      args.window_left,     args.step_plan, static_cast<uint64_t*>(args.workspace.data),
      plan.kernel.num_warps};
  const void* kernel = FitsInt32(plan.partition, args.table)
                           ? reinterpret_cast<const void*>(&StepPlanKernel<int32_t>)
                           : reinterpret_cast<const void*>(&StepPlanKernel<int64_t>);
  const auto bytes = static_cast<int32_t>(PlanScratchBytes(args.table.batch));
  PGQA_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return CudaStatus(Launch(kernel, dim3(plan.partition.num_workers), dim3(kThreads), bytes,
                           args.dependence != Dependence::kStream, params, stream),
                    "step plan kernel launch");
}

}  // namespace pgqa
