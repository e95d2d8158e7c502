// Every rule on shapes, options, partition settings and page tables, in one place each.
// SPDX-License-Identifier: Apache-2.0
//
// A fault reads "<argument>: got <x>, expected <y>". The status functions return InvalidArgument
// with the first fault. All are pure, read host memory only and may be called from any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "pgqa/page_table.h"
#include "pgqa/partition.h"
#include "pgqa/types.h"

namespace pgqa {

enum class Backend { kCpu, kGpu };

constexpr int32_t kMaxGpuHeadDim = 256;
constexpr int32_t kMaxGpuGroupSize = 128;
constexpr int32_t kMaxWorkers = 1 << 20;  // keeps slot and counter numbers within int32

// All that is wrong with `shape` on `backend`, in argument order; empty when it is supported.
std::vector<std::string> ShapeFaults(const AttentionShape& shape, Backend backend);
absl::Status ValidateShape(const AttentionShape& shape, Backend backend);

// All that is wrong with `options`; the scalars' limits do not depend on the backend.
std::vector<std::string> OptionFaults(const AttentionOptions& options);
absl::Status ValidateOptions(const AttentionOptions& options);

absl::Status ValidateWindowLeft(int32_t window_left);
// `argument` is the name that the caller knows the count by: num_sms, num_threads, num_workers.
absl::Status ValidateNumWorkers(const char* argument, int32_t num_workers);
absl::Status ValidatePartitionConfig(const PartitionConfig& config);
absl::Status ValidateSegmentTokens(const PartitionConfig& config, int32_t segment_tokens);

// Sizes and addresses of a table in any memory; reads none of it.
absl::Status ValidateTableLayout(const PageTableView& table);

// The row structure of a table in host memory: sizes and lengths; `indices` is not read and may be
// null. A fault names its request. CSR: indptr[0] > 0 is valid, and so is any last_page_len of a
// request without pages. Block table: seq_lens may be anything below 0. O(batch).
absl::Status ValidateRows(const PageTableView& host_table);

// ValidateRows, and the id of every page that holds a token. Other entries are not read. O(entries).
absl::Status ValidatePageTable(const PageTableView& host_table);

}  // namespace pgqa
