// Attention kernels for head dims padded to 64.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.cuh"

namespace pgqa {

cudaError_t LaunchAttention64(const LaunchPlan& plan, const AttentionParams& params,
                              cudaStream_t stream) {
  return LaunchDType<64>(plan, params, stream);
}

}  // namespace pgqa
