// The page table of a call as tensors, CSR or padded block table: reading, checking, viewing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/types.h>

#include <cstdint>

#include "binding/tensor_checks.h"
#include "pgqa/page_table.h"

namespace pgqa::binding {

// Of the right Python types but not checked. int32 all.
struct TableTensors {
  at::Tensor indptr;       // [batch + 1]; undefined for a block table
  at::Tensor indices;      // page_indices [entries], or block_table [batch, columns]
  at::Tensor lengths;      // [batch]: last_page_len, or seq_lens
  int64_t new_tokens = 0;  // of a block table

  bool IsCsr() const { return indptr.defined(); }
};

TableTensors ReadCsr(pybind11::handle page_indptr, pybind11::handle page_indices,
                     pybind11::handle last_page_len);
TableTensors ReadBlockTable(pybind11::handle block_table, pybind11::handle seq_lens,
                            pybind11::handle new_tokens);

// All that is wrong with the table but its device and batch. Reads no values.
void CheckTableLayout(const TableTensors& table, Faults* faults);

// The same, and that it is one of the requests of `like` [batch, heads, head_dim], on its device.
void CheckTable(const TableTensors& table, const at::Tensor& like, const char* like_name,
                Faults* faults);

// The view of a checked table, for caches of `num_pages` pages.
PageTableView TableOf(const TableTensors& table, int64_t num_pages, int64_t page_size);

}  // namespace pgqa::binding
