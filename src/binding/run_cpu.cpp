// Runs decode calls on CPU tensors through the CPU executor.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <pybind11/pybind11.h>

#include <optional>

#include "binding/backend.h"
#include "binding/tensor_checks.h"
#include "pgqa/cpu_executor.h"

namespace pgqa::binding {

absl::Status RunOnCpu(const DecodeCall& call, const AttentionShape& shape,
                      const AttentionOptions& options, const at::Tensor& out,
                      const at::Tensor& lse) {
  const absl::StatusOr<LaunchPlan> plan = MakeCpuLaunchPlan(shape, at::get_num_threads());
  if (!plan.ok()) return plan.status();
  CpuDecodeArgs args;
  args.q = call.q.data_ptr();
  args.k_cache = call.k_cache.data_ptr();
  args.v_cache = call.v_cache.data_ptr();
  args.out = out.data_ptr();
  args.lse = lse.defined() ? lse.data_ptr<float>() : nullptr;
  args.q_strides = {StrideOf(call.q, 0), StrideOf(call.q, 1)};
  args.out_strides = {StrideOf(out, 0), StrideOf(out, 1)};
  args.k_strides = CacheStridesOf(call.k_cache);
  args.v_strides = CacheStridesOf(call.v_cache);
  args.table = TableOf(call);
  args.options = options;
  // Operators are called with and without it.
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check() != 0) no_gil.emplace();
  return DecodeOnCpu(*plan, args);
}

}  // namespace pgqa::binding
