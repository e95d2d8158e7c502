// Finds or captures the graph of a step's capacity.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/decode_graph_cache.h"

#include "cuda/cuda_status.h"

namespace pgqa {

absl::StatusOr<std::shared_ptr<DecodeGraph>> DecodeGraphCache::Get(int32_t live_batch,
                                                                   int64_t num_pages,
                                                                   cudaStream_t stream) {
  const absl::StatusOr<GraphCapacity> capacity =
      BucketFor(CapacityOf(limit_), live_batch, num_pages);
  if (!capacity.ok()) return capacity.status();
  GraphKey key;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&key.device));
  key.spec = limit_;
  key.spec.shape.batch = capacity->max_batch;
  if (limit_.IsCsr()) {
    key.spec.max_pages = capacity->max_pages;
  } else {
    key.spec.max_columns = static_cast<int32_t>(capacity->max_pages);
  }
  return cache_.GetOrMake(key, [&]() -> absl::StatusOr<DecodeGraph> {
    absl::StatusOr<DecodeGraph> graph = DecodeGraph::Create(key.spec);
    if (!graph.ok()) return graph.status();
    if (absl::Status s = graph->Capture(stream); !s.ok()) return s;
    return graph;
  });
}

}  // namespace pgqa
