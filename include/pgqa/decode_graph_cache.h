// Decode graphs of one spec for growing capacities, captured when a step first needs them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "pgqa/decode_graph.h"
#include "pgqa/graph_cache.h"
#include "pgqa/graph_spec.h"

namespace pgqa {

// Capacities are powers of two up to that of the spec, so that a small batch does not pay for a
// large one, and memory grows with need. Where the spec names the caller's buffers, all graphs
// share them; else each has its own, and steps are written into those of the graph that Get()
// returns. Not thread-safe.
class DecodeGraphCache {
 public:
  using Cache = GraphCache<GraphKey, DecodeGraph>;

  // `limit`: its CapacityOf() is the most that a step may have.
  DecodeGraphCache(const GraphSpec& limit, const Cache::Limits& limits)
      : limit_(limit), cache_(limits) {}

  // The graph of the smallest capacity that holds the step, on the current device; captured with
  // `stream` where it is new. InvalidArgument where the step exceeds the limit.
  absl::StatusOr<std::shared_ptr<DecodeGraph>> Get(int32_t live_batch, int64_t num_pages,
                                                   cudaStream_t stream);

  Cache::Usage GetUsage() const { return cache_.GetUsage(); }

 private:
  GraphSpec limit_;
  Cache cache_;
};

}  // namespace pgqa
