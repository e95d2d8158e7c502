// Checks the tensors and scalars of a decode call and reads its shape off them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "binding/table.h"
#include "pgqa/page_table.h"
#include "pgqa/types.h"

namespace pgqa::binding {

// The arguments of one call, of the right Python types but not checked.
struct DecodeCall {
  at::Tensor q;
  at::Tensor k_cache;
  at::Tensor v_cache;
  TableTensors table;
  std::optional<double> sm_scale;  // none: head_dim^-0.5
  int64_t window_left = -1;
  double logits_soft_cap = 0.0;
  int64_t pos_encoding_mode = 0;
  double rope_scale = 1.0;
  double rope_theta = 10000.0;
  std::optional<at::Tensor> out;
  std::optional<at::Tensor> lse;  // where to write it; none: a fresh tensor if return_lse
  bool return_lse = false;
  bool batch_invariant = false;
  std::optional<at::Tensor> workspace;
};

// Everything that is wrong with the call, one text a fault, in argument order. Fills `shape` and `options`,
// which are meaningful only where there is no fault. Reads no tensor values.
std::vector<std::string> CheckCall(const DecodeCall& call, AttentionShape* shape,
                                   AttentionOptions* options);

// Of checked tensors. Strides of dimensions of size 1 are 0.
PageTableView TableOf(const DecodeCall& call);
CacheStrides CacheStridesOf(const at::Tensor& cache);

}  // namespace pgqa::binding
