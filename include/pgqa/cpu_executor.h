// Decode attention on tensors in host memory: the schedule of a CPU launch plan, run on threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "pgqa/launch_plan.h"
#include "pgqa/page_table.h"
#include "pgqa/types.h"

namespace pgqa {

// The tensors of one call, all in host memory and not owned. Elements are of the plan's dtype and
// aligned to their own size only. The output must not overlap an input.
struct CpuDecodeArgs {
  const void* q = nullptr;        // [batch, query_heads, head_dim]
  const void* k_cache = nullptr;  // [table.num_pages, page_size, kv_heads, head_dim]
  const void* v_cache = nullptr;  // as k_cache, with strides of its own
  void* out = nullptr;            // [batch, query_heads, head_dim]
  float* lse = nullptr;           // [batch, query_heads] natural log, contiguous; null: not wanted
  RowStrides q_strides;
  RowStrides out_strides;
  CacheStrides k_strides;
  CacheStrides v_strides;
  PageTableView table;
  AttentionOptions options;
};

// Computes the output, and the LSE where wanted, on at most plan.partition.num_workers threads, the
// caller's among them; returns when all is written. Requests without live tokens give output 0 and
// LSE -inf. Equal inputs and plans give equal bits on one machine, whatever else runs. Malformed
// tables read nothing out of bounds: lengths are clamped as PageTableView does it, and pages
// outside the cache count as zeros. Any number of threads may call at once. Scratch memory is
// allocated by each call and freed before it returns.
//
// Errors: InvalidArgument where the plan is not of MakeCpuLaunchPlan, or an argument does not fit
// it, with the argument, what it got and what was expected; ResourceExhausted where scratch memory
// is short.
absl::Status DecodeOnCpu(const LaunchPlan& plan, const CpuDecodeArgs& args);

}  // namespace pgqa
