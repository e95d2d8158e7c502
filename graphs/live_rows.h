// The head node of a step: the page table's row lengths with the requests past the live batch made empty.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "pgqa/page_table.h"

namespace pgqa {

// The kernel's only parameter, by value.
struct LiveRowsArgs {
  PageTableView table;
  int32_t* live_rows =
      nullptr;  // [batch + 1], written: indptr[min(i, live_batch)], or seq_lens and then -1
  int32_t live_batch = 0;
};

// The table as of the kernel's end.
inline PageTableView LiveTable(const LiveRowsArgs& args) {
  PageTableView table = args.table;
  table.indptr = args.live_rows;
  if (!table.IsCsr()) table.last_page_len = args.live_rows;
  return table;
}

// Enqueues one small kernel. Does not synchronise.
absl::Status LaunchLiveRows(const LiveRowsArgs& args, cudaStream_t stream);

}  // namespace pgqa
