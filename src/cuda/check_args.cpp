// Checks of launch plans, tables and addresses.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/check_args.h"

#include "absl/strings/str_cat.h"
#include "fault.h"
#include "pgqa/partition.h"
#include "pgqa/validate.h"

namespace pgqa {

absl::Status CheckGpuPlan(const LaunchPlan& plan) {
  if (plan.kernel.num_warps != 0) return absl::OkStatus();
  return FaultStatus("plan", "one of MakeCpuLaunchPlan", "one of MakeGpuLaunchPlan");
}

absl::Status CheckBatch(const LaunchPlan& plan, int32_t batch) {
  const int64_t spare = plan.kernel.shared_memory_bytes - PlanScratchBytes(0);
  const int64_t most = spare * 16 / (PlanScratchBytes(16) - PlanScratchBytes(0));
  if (batch >= 0 && batch <= most) return absl::OkStatus();
  return FaultStatus("batch", batch, absl::StrCat("0 to ", most));
}

absl::Status CheckTable(const LaunchPlan& plan, const PageTableView& table) {
  if (absl::Status s = ValidateTableLayout(table); !s.ok()) return s;
  if (table.page_size == plan.shape.page_size) return absl::OkStatus();
  return FaultStatus("page_size", table.page_size,
                     absl::StrCat(plan.shape.page_size, " as planned"));
}

absl::Status CheckPointer(const char* name, const void* pointer, bool required) {
  if (pointer == nullptr && required) return FaultStatus(name, "null", "device memory");
  if (reinterpret_cast<uintptr_t>(pointer) % kRowAlignment != 0)
    return FaultStatus(name, "an address that is not 16-byte aligned", "16-byte aligned rows");
  return absl::OkStatus();
}

}  // namespace pgqa
