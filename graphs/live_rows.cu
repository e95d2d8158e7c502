// Copies an indptr so that it repeats from the live batch on, or seq_lens so that they are -1 from there on.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/cuda_status.h"
#include "cuda/kernel_launch.h"
#include "cuda/ptx.cuh"
#include "graphs/live_rows.h"

namespace pgqa {
namespace {

constexpr int32_t kThreads = 256;

__global__ void LiveRowsKernel(const __grid_constant__ LiveRowsArgs args) {
  ptx::AllowDependentGrid();
  const int32_t i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  const PageTableView& table = args.table;
  if (table.IsCsr()) {
    if (i <= table.batch) args.live_rows[i] = table.indptr[min(i, args.live_batch)];
  } else if (i < table.batch) {
    args.live_rows[i] = i < args.live_batch ? table.last_page_len[i] : -1;
  }
}

}  // namespace

absl::Status LaunchLiveRows(const LiveRowsArgs& args, cudaStream_t stream) {
  return CudaStatus(
      Launch(reinterpret_cast<const void*>(&LiveRowsKernel), dim3(args.table.batch / kThreads + 1),
             dim3(kThreads), 0, false, args, stream),
      "live rows kernel launch");
}

}  // namespace pgqa
