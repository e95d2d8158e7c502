// Checks a decode call and hands it to the backend of its tensors.
// SPDX-License-Identifier: Apache-2.0
#include "binding/args.h"
#include "binding/backend.h"

namespace pgqa::binding {
namespace {

absl::Status RunOnDevice(const DecodeCall& call, const AttentionShape& shape,
                         const AttentionOptions& options, at::Tensor* out, at::Tensor* lse) {
  if (call.q.is_cuda()) {
#if PGQA_WITH_CUDA
    return RunOnGpu(call, shape, options, out, lse);
#else
    return absl::InvalidArgumentError(WithoutCudaText("q"));
#endif
  }
  if (!out->defined()) *out = at::empty(call.q.sizes(), call.q.options().requires_grad(false));
  if (call.return_lse && !lse->defined())
    *lse = at::empty({shape.batch, shape.num_query_heads}, at::kFloat);
  return RunOnCpu(call, shape, options, *out, *lse);
}

}  // namespace

absl::Status RunCall(const DecodeCall& call, at::Tensor* out, at::Tensor* lse) {
  AttentionShape shape;
  AttentionOptions options;
  const std::vector<std::string> faults = CheckCall(call, &shape, &options);
  if (!faults.empty()) return absl::InvalidArgumentError(faults.front());
  if (call.out.has_value()) *out = *call.out;
  if (call.lse.has_value()) *lse = *call.lse;
  return RunOnDevice(call, shape, options, out, lse);
}

}  // namespace pgqa::binding
