// Attention kernels for head dims padded to 128.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.cuh"

namespace pgqa {

cudaError_t LaunchAttention128(const LaunchPlan& plan, const AttentionParams& params,
                               cudaStream_t stream) {
  return LaunchDType<128>(plan, params, stream);
}

}  // namespace pgqa
