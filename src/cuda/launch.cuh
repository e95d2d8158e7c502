// From a kernel configuration to the instantiated kernel of one padded head dim.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/attention_kernel.cuh"
#include "cuda/kernel_launch.h"
#include "cuda/launch.h"

namespace pgqa {

template <class Traits>
cudaError_t LaunchKernel(const LaunchPlan& plan, const AttentionParams& params,
                         cudaStream_t stream) {
  const auto kernel = AttentionKernel<Traits>;
  // A function attribute belongs to a device; setting it costs less than remembering where it was set.
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.kernel.shared_memory_bytes);
  if (status != cudaSuccess) return status;
  return Launch(reinterpret_cast<const void*>(kernel), dim3(plan.partition.num_workers),
                dim3(plan.kernel.num_warps * kWarpSize), plan.kernel.shared_memory_bytes,
                params.dependence != Dependence::kStream, params, stream);
}

template <class Tile>
cudaError_t LaunchIndex(const LaunchPlan& plan, const AttentionParams& params,
                        cudaStream_t stream) {
  if (plan.segment_tokens != 0) return LaunchKernel<InvariantTraits<Tile>>(plan, params, stream);
  return FitsInt32(params.partition, params.table)
             ? LaunchKernel<KernelTraits<Tile, int32_t>>(plan, params, stream)
             : LaunchKernel<KernelTraits<Tile, int64_t>>(plan, params, stream);
}

template <int kHeadDim, class Element, RowMode kMode>
cudaError_t LaunchRope(const LaunchPlan& plan, const AttentionParams& params, cudaStream_t stream) {
  return plan.kernel.rope
             ? LaunchIndex<TileTraits<kHeadDim, Element, kMode, true>>(plan, params, stream)
             : LaunchIndex<TileTraits<kHeadDim, Element, kMode, false>>(plan, params, stream);
}

template <int kHeadDim, class Element>
cudaError_t LaunchMode(const LaunchPlan& plan, const AttentionParams& params, cudaStream_t stream) {
  return plan.kernel.row_mode == RowMode::kSplit
             ? LaunchRope<kHeadDim, Element, RowMode::kSplit>(plan, params, stream)
             : LaunchRope<kHeadDim, Element, RowMode::kWide>(plan, params, stream);
}

template <int kHeadDim>
cudaError_t LaunchDType(const LaunchPlan& plan, const AttentionParams& params,
                        cudaStream_t stream) {
  return plan.kernel.dtype == DType::kBFloat16
             ? LaunchMode<kHeadDim, __nv_bfloat16>(plan, params, stream)
             : LaunchMode<kHeadDim, __half>(plan, params, stream);
}

}  // namespace pgqa
