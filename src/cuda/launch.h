// Launchers of the attention kernels, one a padded head dim.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention_params.h"
#include "pgqa/launch_plan.h"

namespace pgqa {

// Launches one grid of plan.partition.num_workers CTAs on `stream`. Does not synchronise.
cudaError_t LaunchAttention64(const LaunchPlan& plan, const AttentionParams& params,
                              cudaStream_t stream);
cudaError_t LaunchAttention128(const LaunchPlan& plan, const AttentionParams& params,
                               cudaStream_t stream);
cudaError_t LaunchAttention256(const LaunchPlan& plan, const AttentionParams& params,
                               cudaStream_t stream);

}  // namespace pgqa
