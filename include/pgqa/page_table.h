// The one view through which planner, kernels and executor read a page table, CSR or padded block table.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/host_device.h"

namespace pgqa {

// Functions of lengths and tiles are templates over the integer that counts them: int64_t is always right;
// int32_t, much cheaper on the device, where the caller knows that all sums fit.

// Live tokens of a request, half open: [begin, end), counted from its first cached token.
template <class Index>
struct BasicTokenRange {
  Index begin = 0;
  Index end = 0;

  PGQA_HOST_DEVICE Index size() const { return end - begin; }
};
using TokenRange = BasicTokenRange<int64_t>;

// What is loaded of a request's row.
struct TableRow {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t last_len = 0;
};

// A page table: CSR, as the first seven fields say it, or a padded block table, of which ViewOf() makes one. The
// pointers are host or device memory, 4-byte aligned, not owned.
//
// So that the device needs no branch, lengths of both kinds are computed alike: the row of a block table has no page
// before its last one, which is `columns` pages long, and of which seq_lens counts the tokens.
struct PageTableView {
  const int32_t* indptr = nullptr;         // [batch + 1]; of a block table seq_lens, [batch]
  const int32_t* indices = nullptr;        // [num_indices], or the block table
  const int32_t* last_page_len = nullptr;  // [batch]; of a block table seq_lens
  int64_t num_indices = 0;                 // entries that may be read; of a block table INT64_MAX
  int64_t num_pages = 0;                   // pages of the caches; ids live in [0, num_pages)
  int32_t batch = 0;
  int32_t page_size = 0;
  int32_t is_block_table =
      0;  // 0 or 1, subtracted from where a row begins: one formula serves both
  int32_t columns = 1;
  int64_t row_stride = 0;  // of a block table: entries from row to row
  int32_t new_tokens = 0;  // of a block table: 0 or 1, added to every entry of seq_lens

  PGQA_HOST_DEVICE bool IsCsr() const { return is_block_table == 0; }

  // The same CSR table, and a compiler that knows it to be one.
  PGQA_HOST_DEVICE PageTableView AsCsr() const {
    return {indptr, indices, last_page_len, num_indices, num_pages, batch, page_size};
  }

  // Entries that rows may hold in all.
  PGQA_HOST_DEVICE int64_t NumEntries() const {
    return IsCsr() ? num_indices : int64_t{batch} * columns;
  }

  PGQA_HOST_DEVICE TableRow ReadRow(int32_t request) const {
    return {indptr[request], indptr[request + 1 - is_block_table], last_page_len[request]};
  }

  // Tokens cached for `request`, clamped to [0, pages of the row * page_size], CSR rows clipped to num_indices, so
  // that malformed values can neither hang nor overrun.
  template <class Index = int64_t>
  PGQA_HOST_DEVICE Index KvLength(int32_t request) const {
    return KvLength<Index>(ReadRow(request));
  }

  template <class Index = int64_t>
  PGQA_HOST_DEVICE Index KvLength(const TableRow& row) const {
    const int32_t begin = (row.begin < 0 ? 0 : row.begin) - is_block_table;
    const int32_t limit = num_indices < INT32_MAX ? static_cast<int32_t>(num_indices) : INT32_MAX;
    const int32_t end = row.end < limit ? row.end : limit;
    const Index last_limit = MaxLastLength<Index>();
    const Index last = row.last_len < last_limit ? row.last_len : last_limit;
    // Without branches, so that the device loads all three values at once.
    const Index full_pages = end > begin ? end - 1 - begin : 0;
    const Index length = full_pages * page_size + last + new_tokens;
    return end <= begin || length < 0 ? 0 : length;
  }

  // The most that an entry of last_page_len, or seq_lens, may say.
  template <class Index = int64_t>
  PGQA_HOST_DEVICE Index MaxLastLength() const {
    return Index{columns} * page_size - new_tokens;
  }

  // Position of the newest token of `request`; -1 where it has none, or where a block table's row is too short for it.
  PGQA_HOST_DEVICE int64_t NewestPosition(int32_t request) const {
    const TableRow row = ReadRow(request);
    return !IsCsr() && row.last_len > MaxLastLength() ? -1 : KvLength(row) - 1;
  }

  // The tokens of `request` that count: all of them, or the last window_left + 1.
  template <class Index = int64_t>
  PGQA_HOST_DEVICE BasicTokenRange<Index> LiveTokens(int32_t request, int32_t window_left) const {
    return ClipToWindow(KvLength<Index>(request), window_left);
  }

  template <class Index>
  PGQA_HOST_DEVICE static BasicTokenRange<Index> ClipToWindow(Index kv_len, int32_t window_left) {
    const bool clipped = window_left >= 0 && kv_len - 1 > window_left;
    return {clipped ? kv_len - 1 - window_left : 0, kv_len};
  }

  // First entry of the row in `indices`.
  PGQA_HOST_DEVICE int64_t RowBegin(int32_t request) const {
    if (!IsCsr()) return request * row_stride;
    return indptr[request] < 0 ? 0 : indptr[request];
  }

  // Where the entry of page `page_idx` of a row lies. It may be read if the page holds a token below KvLength.
  PGQA_HOST_DEVICE const int32_t* EntryAddress(int64_t row_begin, int64_t page_idx) const {
    return indices + row_begin + page_idx;
  }

  // Whether an entry names one of the caches' pages.
  PGQA_HOST_DEVICE bool IsPage(int32_t id) const { return id >= 0 && id < num_pages; }

  // Id of page `page_idx` of a row, or -1 where there is no entry or it names no page.
  PGQA_HOST_DEVICE int32_t PageId(int64_t row_begin, int64_t page_idx) const {
    if (row_begin + page_idx >= num_indices) return -1;
    const int32_t id = *EntryAddress(row_begin, page_idx);
    return IsPage(id) ? id : -1;
  }
};

// A padded block table as engines hold it. A request has seq_lens + new_tokens tokens, at most columns * page_size; one
// whose entry of seq_lens is negative has none, whatever new_tokens. Entries past a request's tokens are never read.
// The pointers as in the view.
struct BlockTable {
  const int32_t* block_table = nullptr;  // [batch, columns], rows row_stride entries apart
  const int32_t* seq_lens = nullptr;     // [batch]
  int64_t row_stride = 0;
  int64_t num_pages = 0;
  int32_t batch = 0;
  int32_t columns = 0;
  int32_t page_size = 0;
  int32_t new_tokens = 0;  // 0: seq_lens counts the token of this step; 1: not yet
};

// What is wrong with the table is wrong with the view.
inline PageTableView ViewOf(const BlockTable& table) {
  PageTableView view{table.seq_lens,  table.block_table, table.seq_lens, INT64_MAX,
                     table.num_pages, table.batch,       table.page_size};
  view.is_block_table = 1;
  view.columns = table.columns;
  view.row_stride = table.row_stride;
  view.new_tokens = table.new_tokens;
  return view;
}

}  // namespace pgqa
