// Checks that calls with a launch plan share. Each returns InvalidArgument with the argument's name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "pgqa/launch_plan.h"
#include "pgqa/page_table.h"

namespace pgqa {

constexpr int64_t kRowAlignment = 16;

absl::Status CheckGpuPlan(const LaunchPlan& plan);

// A batch is planned in the attention kernel's shared memory.
absl::Status CheckBatch(const LaunchPlan& plan, int32_t batch);

// The arrays of a table and its page size.
absl::Status CheckTable(const LaunchPlan& plan, const PageTableView& table);

// Null only where it is not required; kRowAlignment.
absl::Status CheckPointer(const char* name, const void* pointer, bool required);

}  // namespace pgqa
