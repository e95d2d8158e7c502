// Every rule on page tables, in one place each.
// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fault.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

const char* IndicesName(const PageTableView& table) {
  return table.IsCsr() ? "page_indices" : "block_table";
}

std::string OfRequest(const char* argument, int32_t request) {
  return absl::StrCat(argument, " of request ", request);
}

void CheckArray(const char* argument, const int32_t* array, int64_t num_entries,
                std::vector<std::string>* faults) {
  if (array == nullptr && num_entries > 0)
    faults->push_back(Fault(argument, "null", absl::StrCat(num_entries, " entries")));
}

void CheckBlockTableSizes(const PageTableView& table, std::vector<std::string>* faults) {
  CheckAtLeast("columns", table.columns, 0, faults);
  CheckAtLeast("row_stride", table.row_stride, 0, faults);
  if (table.new_tokens != 0 && table.new_tokens != 1)
    faults->push_back(Fault("new_tokens", table.new_tokens, "0 or 1"));
}

// All but the array of page ids.
std::vector<std::string> LayoutFaults(const PageTableView& table) {
  std::vector<std::string> faults;
  CheckAtLeast("batch", table.batch, 0, &faults);
  CheckAtLeast("page_size", table.page_size, 1, &faults);
  CheckAtLeast("num_pages", table.num_pages, 0, &faults);
  CheckAtLeast("num_indices", table.num_indices, 0, &faults);
  if (!table.IsCsr()) CheckBlockTableSizes(table, &faults);
  if (table.batch < 1) return faults;
  if (table.IsCsr()) CheckArray("page_indptr", table.indptr, int64_t{table.batch} + 1, &faults);
  CheckArray(table.IsCsr() ? "last_page_len" : "seq_lens", table.last_page_len, table.batch,
             &faults);
  return faults;
}

absl::Status ValidateCsrRow(const PageTableView& table, int32_t request) {
  const auto [begin, end, last_len] = table.ReadRow(request);
  if (begin < 0) {
    return FaultStatus(OfRequest("page_indptr", request), begin, "a row that begins at 0 or later");
  }
  if (end < begin) {
    return FaultStatus(OfRequest("page_indptr", request), absl::StrCat(begin, " to ", end),
                       "a row that does not decrease");
  }
  if (end > table.num_indices) {
    return FaultStatus(OfRequest("page_indices", request),
                       absl::StrCat(table.num_indices, " entries"), absl::StrCat("at least ", end));
  }
  if (end > begin && (last_len < 1 || last_len > table.page_size)) {
    return FaultStatus(OfRequest("last_page_len", request), last_len,
                       absl::StrCat("1 to page_size (", table.page_size, ")"));
  }
  return absl::OkStatus();
}

absl::Status ValidateBlockTableRow(const PageTableView& table, int32_t request) {
  const int32_t seq_len = table.ReadRow(request).last_len;
  if (seq_len <= table.MaxLastLength()) return absl::OkStatus();
  return FaultStatus(
      OfRequest("seq_lens", request), seq_len,
      absl::StrCat("at most ", table.MaxLastLength(), ": ", table.columns, " columns of page_size ",
                   table.page_size, ", new_tokens ", table.new_tokens));
}

// The page ids of a request in a table whose rows are right.
absl::Status ValidatePageIds(const PageTableView& table, int32_t request) {
  const int64_t row_begin = table.RowBegin(request);
  const int64_t num_pages = (table.KvLength(request) + table.page_size - 1) / table.page_size;
  for (int64_t page_idx = 0; page_idx < num_pages; ++page_idx) {
    const int32_t id = *table.EntryAddress(row_begin, page_idx);
    if (table.IsPage(id)) continue;
    const std::string place = table.IsCsr() ? absl::StrCat("entry ", row_begin + page_idx)
                                            : absl::StrCat("column ", page_idx);
    return FaultStatus(OfRequest(IndicesName(table), request),
                       absl::StrCat("page ", id, " at ", place),
                       absl::StrCat("0 to num_pages - 1 (", table.num_pages - 1, ")"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateTableLayout(const PageTableView& table) {
  std::vector<std::string> faults = LayoutFaults(table);
  if (table.batch > 0) {
    const int64_t num_entries =
        table.IsCsr() ? table.num_indices : int64_t{table.batch} * table.columns;
    CheckArray(IndicesName(table), table.indices, num_entries, &faults);
  }
  return FirstFault(faults);
}

absl::Status ValidateRows(const PageTableView& host_table) {
  if (absl::Status s = FirstFault(LayoutFaults(host_table)); !s.ok()) return s;
  for (int32_t request = 0; request < host_table.batch; ++request) {
    absl::Status s = host_table.IsCsr() ? ValidateCsrRow(host_table, request)
                                        : ValidateBlockTableRow(host_table, request);
    if (!s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status ValidatePageTable(const PageTableView& host_table) {
  if (absl::Status s = ValidateRows(host_table); !s.ok()) return s;
  if (absl::Status s = ValidateTableLayout(host_table); !s.ok()) return s;
  for (int32_t request = 0; request < host_table.batch; ++request) {
    if (absl::Status s = ValidatePageIds(host_table, request); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace pgqa
