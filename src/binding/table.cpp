// The page table of a call as tensors, CSR or padded block table: reading, checking, viewing.
// SPDX-License-Identifier: Apache-2.0
#include "binding/table.h"

#include <limits>
#include <string>

#include "binding/args.h"

namespace pgqa::binding {
namespace {

void CheckBlockTable(const at::Tensor& block_table, Faults* faults) {
  constexpr char kName[] = "block_table";
  if (!CheckIntTensor(kName, block_table, 2, faults)) return;
  CheckContiguousRows(kName, block_table, faults);
  if (block_table.size(1) > std::numeric_limits<int32_t>::max())
    faults->push_back(FaultText(kName, ShapeText(block_table), "columns below 2^31"));
}

void CheckCsr(const TableTensors& table, const at::Tensor& like, const char* like_name,
              Faults* faults) {
  CheckDevice("page_indptr", table.indptr, like, like_name, faults);
  CheckDevice("page_indices", table.indices, like, like_name, faults);
  CheckDevice("last_page_len", table.lengths, like, like_name, faults);
  if (like.dim() != 3) return;
  CheckSize("page_indptr", table.indptr, like.size(0) + 1, "batch + 1", faults);
  CheckSize("last_page_len", table.lengths, like.size(0), "batch", faults);
}

void CheckBlockTableOf(const TableTensors& table, const at::Tensor& like, const char* like_name,
                       Faults* faults) {
  CheckDevice("block_table", table.indices, like, like_name, faults);
  CheckDevice("seq_lens", table.lengths, like, like_name, faults);
  if (like.dim() != 3) return;
  if (table.indices.dim() == 2 && table.indices.size(0) != like.size(0)) {
    faults->push_back(FaultText("block_table", ShapeText(table.indices),
                                std::to_string(like.size(0)) + " rows (batch)"));
  }
  CheckSize("seq_lens", table.lengths, like.size(0), "batch", faults);
}

}  // namespace

TableTensors ReadCsr(pybind11::handle page_indptr, pybind11::handle page_indices,
                     pybind11::handle last_page_len) {
  return {.indptr = ToTensor("page_indptr", page_indptr),
          .indices = ToTensor("page_indices", page_indices),
          .lengths = ToTensor("last_page_len", last_page_len),
          .new_tokens = 0};
}

TableTensors ReadBlockTable(pybind11::handle block_table, pybind11::handle seq_lens,
                            pybind11::handle new_tokens) {
  return {.indptr = {},
          .indices = ToTensor("block_table", block_table),
          .lengths = ToTensor("seq_lens", seq_lens),
          .new_tokens = ToInt("new_tokens", new_tokens)};
}

void CheckTableLayout(const TableTensors& table, Faults* faults) {
  if (table.IsCsr()) {
    CheckIndexTensor("page_indptr", table.indptr, faults);
    CheckIndexTensor("page_indices", table.indices, faults);
    CheckIndexTensor("last_page_len", table.lengths, faults);
    return;
  }
  CheckBlockTable(table.indices, faults);
  CheckIndexTensor("seq_lens", table.lengths, faults);
  if (table.new_tokens != 0 && table.new_tokens != 1)
    faults->push_back(FaultText("new_tokens", std::to_string(table.new_tokens), "0 or 1"));
}

void CheckTable(const TableTensors& table, const at::Tensor& like, const char* like_name,
                Faults* faults) {
  CheckTableLayout(table, faults);
  if (table.IsCsr()) {
    CheckCsr(table, like, like_name, faults);
  } else {
    CheckBlockTableOf(table, like, like_name, faults);
  }
}

PageTableView TableOf(const TableTensors& table, int64_t num_pages, int64_t page_size) {
  const auto* indices = static_cast<const int32_t*>(table.indices.data_ptr());
  const auto* lengths = static_cast<const int32_t*>(table.lengths.data_ptr());
  const auto batch = static_cast<int32_t>(table.lengths.numel());
  const auto page = static_cast<int32_t>(page_size);
  if (table.IsCsr()) {
    return {.indptr = static_cast<const int32_t*>(table.indptr.data_ptr()),
            .indices = indices,
            .last_page_len = lengths,
            .num_indices = table.indices.numel(),
            .num_pages = num_pages,
            .batch = batch,
            .page_size = page};
  }
  return ViewOf({.block_table = indices,
                 .seq_lens = lengths,
                 .row_stride = StrideOf(table.indices, 0),
                 .num_pages = num_pages,
                 .batch = batch,
                 .columns = static_cast<int32_t>(table.indices.size(1)),
                 .page_size = page,
                 .new_tokens = static_cast<int32_t>(table.new_tokens)});
}

}  // namespace pgqa::binding
