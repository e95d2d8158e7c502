// Runs decode calls on CUDA tensors: cached plans, workspaces, the current stream.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "binding/backend.h"
#include "binding/tensor_checks.h"
#include "fault.h"
#include "pgqa/decode.h"
#include "pgqa/workspace.h"

namespace pgqa::binding {
namespace {

// Everything that a plan depends on; the batch is not among it.
using PlanKey = std::tuple<int, int32_t, int32_t, int32_t, int32_t, DType, PosEncoding, bool>;

PlanKey KeyOf(const AttentionShape& s, int device) {
  return {device,      s.num_query_heads, s.num_kv_heads, s.head_dim,
          s.page_size, s.dtype,           s.pos_encoding, s.batch_invariant};
}

// Never destroyed: calls may still run while the process ends.
WorkspacePool& Pool() {
  static auto* pool = new WorkspacePool();
  return *pool;
}

// Plans live for ever: a process has few shapes, and each takes some 200 bytes. The mutex guards the map.
absl::StatusOr<const LaunchPlan*> CachedPlan(const AttentionShape& shape, int device) {
  static auto* mutex = new std::mutex();
  static auto* plans = new std::map<PlanKey, LaunchPlan>();
  const std::lock_guard lock(*mutex);
  const PlanKey key = KeyOf(shape, device);
  if (const auto it = plans->find(key); it != plans->end()) return &it->second;
  const absl::StatusOr<DeviceProperties> properties = QueryDevice(device);
  if (!properties.ok()) return properties.status();
  absl::StatusOr<LaunchPlan> plan = MakeGpuLaunchPlan(shape, *properties);
  if (!plan.ok()) return plan.status();
  plan->shape.batch = 0;  // the plan serves every batch
  return &plans->emplace(key, *std::move(plan)).first->second;
}

WorkspaceView ViewOf(const at::Tensor& workspace) {
  return {workspace.data_ptr(), static_cast<int64_t>(workspace.nbytes())};
}

}  // namespace

DecodeArgs DecodeArgsOf(const DecodeCall& call, const AttentionOptions& options,
                        const at::Tensor& out, const at::Tensor& lse) {
  DecodeArgs args;
  args.q = call.q.data_ptr();
  args.q_batch_stride = StrideOf(call.q, 0);
  args.q_head_stride = StrideOf(call.q, 1);
  args.k_cache = call.k_cache.data_ptr();
  args.v_cache = call.v_cache.data_ptr();
  args.k_strides = CacheStridesOf(call.k_cache);
  args.v_strides = CacheStridesOf(call.v_cache);
  args.table = TableOf(call);
  args.out = out.data_ptr();
  args.lse = lse.defined() ? static_cast<float*>(lse.data_ptr()) : nullptr;
  args.options = options;
  return args;
}

absl::StatusOr<LaunchPlan> GpuPlan(const AttentionShape& shape, int device) {
  const absl::StatusOr<const LaunchPlan*> plan = CachedPlan(shape, device);
  if (!plan.ok()) return plan.status();
  return **plan;
}

absl::Status RunOnGpu(const DecodeCall& call, const AttentionShape& shape,
                      const AttentionOptions& options, at::Tensor* out, at::Tensor* lse) {
  const c10::Device device = call.q.device();
  const c10::cuda::OptionalCUDAGuard guard(device);
  const absl::StatusOr<const LaunchPlan*> plan = CachedPlan(shape, device.index());
  if (!plan.ok()) return plan.status();
  const absl::StatusOr<WorkspaceLayout> layout =
      WorkspaceFor(**plan, shape.batch, TableOf(call).NumEntries());
  if (!layout.ok()) return layout.status();
  if (call.workspace.has_value()) {
    const auto bytes = static_cast<int64_t>(call.workspace->nbytes());
    if (bytes < layout->bytes) {
      return FaultStatus("workspace", absl::StrCat(bytes, " bytes"),
                         absl::StrCat("at least ", layout->bytes));
    }
  }
  if (!out->defined())
    *out = at::detail::empty_cuda(call.q.sizes(), call.q.scalar_type(), device, std::nullopt);
  if (call.return_lse && !lse->defined()) {
    *lse = at::detail::empty_cuda({shape.batch, shape.num_query_heads}, at::kFloat, device,
                                  std::nullopt);
  }
  if (shape.batch == 0) return absl::OkStatus();
  const DecodeArgs args = DecodeArgsOf(call, options, *out, *lse);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  if (call.workspace.has_value()) return Decode(**plan, args, ViewOf(*call.workspace), stream);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    // From the pool of the graph that torch captures: it lives as long as the graph, and what else the graph puts
    // there does no harm. Other captures have to bring a workspace.
    const at::Tensor workspace =
        at::detail::empty_cuda({layout->bytes}, at::kByte, device, std::nullopt);
    return Decode(**plan, args, ViewOf(workspace), stream);
  }
  return Pool().Run(layout->bytes, stream,
                    [&](const WorkspaceView& view) { return Decode(**plan, args, view, stream); });
}

PoolUsage GetPoolUsage() {
  const WorkspacePool::Usage usage = Pool().GetUsage();
  return {usage.workspaces, usage.bytes};
}

}  // namespace pgqa::binding
