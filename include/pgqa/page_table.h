// The one view through which planner, kernels and executor read a page table.
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

// A CSR page table. The pointers are host or device memory, 4-byte aligned, not owned.
struct PageTableView {
  const int32_t* indptr = nullptr;         // [batch + 1]
  const int32_t* indices = nullptr;        // [num_indices]
  const int32_t* last_page_len = nullptr;  // [batch]
  int64_t num_indices = 0;                 // entries that may be read
  int64_t num_pages = 0;                   // pages of the caches; ids live in [0, num_pages)
  int32_t batch = 0;
  int32_t page_size = 0;

  // Tokens cached for `request`, clamped to [0, pages of the row * page_size], rows clipped to num_indices, so
  // that malformed values can neither hang nor overrun.
  template <class Index = int64_t>
  PGQA_HOST_DEVICE Index KvLength(int32_t request) const {
    return KvLength<Index>(indptr[request], indptr[request + 1], last_page_len[request]);
  }

  template <class Index = int64_t>
  PGQA_HOST_DEVICE Index KvLength(int32_t row_begin, int32_t row_end, int32_t last_len) const {
    const int32_t begin = row_begin < 0 ? 0 : row_begin;
    const int32_t limit = num_indices < INT32_MAX ? static_cast<int32_t>(num_indices) : INT32_MAX;
    const int32_t end = row_end < limit ? row_end : limit;
    const int32_t last = last_len < page_size ? last_len : page_size;
    // Without branches, so that the device loads all three values at once.
    const Index full_pages = end > begin ? end - 1 - begin : 0;
    const Index length = full_pages * page_size + last;
    return end <= begin || length < 0 ? 0 : length;
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

}  // namespace pgqa
