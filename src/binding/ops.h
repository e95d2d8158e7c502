// The calls as operators of torch, for torch.compile and for callers in C++.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace pgqa::binding {

// Defines pgqa::decode, pgqa::decode_with_lse, pgqa::decode_out and pgqa::append_kv for CPU and CUDA tensors; once a
// process, further calls do nothing. Not done when the module is loaded: a process may load two copies of it, and a
// namespace of operators has one owner. Fake implementations are in python/pgqa/ops.py.
void RegisterOps();

}  // namespace pgqa::binding
