// The block table that says the same as a CSR table in host memory, with poison wherever nothing may be read.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "pgqa/page_table.h"

namespace pgqa::testing {

struct BlockTableForm {
  int32_t new_tokens = 0;
  int32_t spare_columns = 2;     // past the longest row
  int32_t gap = 3;               // entries between rows, of no column
  int32_t padding = 2147480000;  // past the pages of a row, and in gaps
};

// Rows with gaps or without, spare columns, padding that a careless reader would follow.
inline constexpr BlockTableForm kForms[] = {
    {}, {.new_tokens = 1}, {.padding = -1}, {.new_tokens = 1, .spare_columns = 0, .gap = 0}};

// Every array of exact size. Empty requests have seq_lens -1.
struct BlockTableArrays {
  std::vector<int32_t> entries;   // [batch, columns], rows row_stride apart
  std::vector<int32_t> seq_lens;  // [batch]
  BlockTable table;               // on these vectors

  // The same on other memory, of the same sizes.
  BlockTable On(const int32_t* entries_address, const int32_t* seq_lens_address) const {
    BlockTable moved = table;
    moved.block_table = entries_address;
    moved.seq_lens = seq_lens_address;
    return moved;
  }
};

// `csr` has valid rows; its indices may be null, and then there are no entries.
inline BlockTableArrays BlockTableOf(const PageTableView& csr, const BlockTableForm& form = {}) {
  const auto pages_of = [&](int32_t r) {
    return static_cast<int32_t>((csr.KvLength(r) + csr.page_size - 1) / csr.page_size);
  };
  BlockTableArrays arrays;
  BlockTable& table = arrays.table;
  table.num_pages = csr.num_pages;
  table.batch = csr.batch;
  table.page_size = csr.page_size;
  table.new_tokens = form.new_tokens;
  for (int32_t r = 0; r < csr.batch; ++r) table.columns = std::max(table.columns, pages_of(r));
  table.columns += form.spare_columns;
  table.row_stride = table.columns + form.gap;
  const bool has_ids = csr.indices != nullptr && csr.batch > 0;
  const int64_t extent = has_ids ? csr.batch * table.row_stride - form.gap : 0;
  arrays.entries.assign(static_cast<size_t>(extent), form.padding);
  for (int32_t r = 0; r < csr.batch; ++r) {
    const auto kv_len = static_cast<int32_t>(csr.KvLength(r));
    arrays.seq_lens.push_back(kv_len > 0 ? kv_len - form.new_tokens : -1);
    if (!has_ids) continue;
    std::copy_n(csr.EntryAddress(csr.RowBegin(r), 0), pages_of(r),
                arrays.entries.begin() + r * table.row_stride);
  }
  arrays.table = arrays.On(arrays.entries.data(), arrays.seq_lens.data());
  return arrays;
}

}  // namespace pgqa::testing
