// Decode attention on tensors in host memory: checks the call and runs it.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/cpu_executor.h"

#include <new>

#include "absl/strings/str_cat.h"
#include "cpu_kernels.h"
#include "cpu_run.h"
#include "fault.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

absl::Status CheckEqual(const char* argument, int64_t got, const char* of_plan, int64_t expected) {
  if (got == expected) return absl::OkStatus();
  return FaultStatus(argument, got, absl::StrCat(expected, ", ", of_plan, " of the plan"));
}

absl::Status CheckNotNull(const char* argument, const void* pointer) {
  if (pointer != nullptr) return absl::OkStatus();
  return FaultStatus(argument, "null", "a host address");
}

absl::Status CheckPlan(const LaunchPlan& plan) {
  if (absl::Status s = ValidateShape(plan.shape, Backend::kCpu); !s.ok()) return s;
  if (absl::Status s = ValidatePartitionConfig(plan.partition); !s.ok()) return s;
  if (absl::Status s = ValidateSegmentTokens(plan.partition, plan.segment_tokens); !s.ok())
    return s;
  if (plan.row_blocks != 1 || plan.partition.num_heads != plan.shape.num_kv_heads) {
    return FaultStatus(
        "plan",
        absl::StrCat(plan.row_blocks, " row blocks and ", plan.partition.num_heads, " heads"),
        absl::StrCat("1 and num_kv_heads (", plan.shape.num_kv_heads,
                     "), a plan of MakeCpuLaunchPlan"));
  }
  return absl::OkStatus();
}

absl::Status CheckArgs(const LaunchPlan& plan, const CpuDecodeArgs& args) {
  const PageTableView& table = args.table;
  if (absl::Status s = ValidateOptions(args.options); !s.ok()) return s;
  absl::Status fits = CheckEqual("table.batch", table.batch, "batch", plan.shape.batch);
  fits.Update(CheckEqual("table.page_size", table.page_size, "page_size", plan.shape.page_size));
  if (!fits.ok()) return fits;
  if (absl::Status s = ValidateTableLayout(table); !s.ok()) return s;
  if (table.batch == 0) return absl::OkStatus();
  if (absl::Status s = CheckNotNull("q", args.q); !s.ok()) return s;
  if (absl::Status s = CheckNotNull("out", args.out); !s.ok()) return s;
  if (table.num_pages > 0) {
    if (absl::Status s = CheckNotNull("k_cache", args.k_cache); !s.ok()) return s;
    if (absl::Status s = CheckNotNull("v_cache", args.v_cache); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DecodeOnCpu(const LaunchPlan& plan, const CpuDecodeArgs& args) {
  if (absl::Status s = CheckPlan(plan); !s.ok()) return s;
  if (absl::Status s = CheckArgs(plan, args); !s.ok()) return s;
  if (plan.shape.batch == 0) return absl::OkStatus();
  try {
    RunOnCpu(plan, args, BestCpuKernels());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("scratch memory: got none, expected some for each thread");
  }
  return absl::OkStatus();
}

}  // namespace pgqa
