// Runs a checked CPU call with given kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu_kernels.h"
#include "pgqa/cpu_executor.h"
#include "pgqa/launch_plan.h"

namespace pgqa {

// DecodeOnCpu without its checks. Throws std::bad_alloc where scratch memory is short. `kernels`
// must be runnable.
void RunOnCpu(const LaunchPlan& plan, const CpuDecodeArgs& args, const CpuKernels& kernels);

}  // namespace pgqa
