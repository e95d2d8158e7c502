// Append calls: their tensors, checks, and the module's append_kv.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "binding/table.h"
#include "binding/tensor_checks.h"

namespace pgqa::binding {

// The arguments of one call, of the right Python types but not checked.
struct AppendCall {
  at::Tensor k, v, k_cache, v_cache;
  TableTensors table;
  std::optional<at::Tensor> q, q_out;
  int64_t pos_encoding_mode = 0;
  double rope_scale = 1.0;
  double rope_theta = 10000.0;
};

// Everything that is wrong with the tensors of a call, in argument order. Reads no tensor values.
Faults CheckAppend(const AppendCall& call);

// Checks a call and runs it: InvalidArgument with the first fault, before anything is written. A call with q and
// without q_out is given a fresh one. With or without the GIL.
absl::Status RunAppend(AppendCall* call);

void DefineAppend(pybind11::module_& m);

}  // namespace pgqa::binding
