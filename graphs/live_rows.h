// The head node of a step: the page table's indptr with the requests past the live batch made empty.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"

namespace pgqa {

// The kernel's only parameter, by value.
struct LiveRowsArgs {
  const int32_t* indptr = nullptr;  // [batch + 1]
  int32_t* live_indptr = nullptr;   // [batch + 1], written: indptr[min(i, live_batch)]
  int32_t batch = 0;
  int32_t live_batch = 0;
};

// Enqueues one small kernel. Does not synchronise.
absl::Status LaunchLiveRows(const LiveRowsArgs& args, cudaStream_t stream);

}  // namespace pgqa
