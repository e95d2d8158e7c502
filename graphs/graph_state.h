// What a decode graph holds, and how its captured step is made and changed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "graphs/graph_buffers.h"
#include "graphs/step_issuer.h"
#include "pgqa/cuda_graph.h"
#include "pgqa/decode_graph.h"
#include "pgqa/workspace.h"

namespace pgqa {

// A captured step and what it takes to change its nodes.
struct Captured {
  Graph graph;
  GraphExec exec;
  cudaGraphNode_t head = nullptr;  // null: none
  cudaKernelNodeParams head_params = {};
  int32_t live_batch = 0;           // of the head, as told last
  std::optional<Graph> bound = {};  // holds the parameters of the last Rebind()
};

struct DecodeGraph::State {
  int32_t device;
  GraphSpec asked;  // as given to Create()
  GraphBuffers buffers;
  StepIssuer issuer;
  Workspace scratch;
  CudaStream stream;  // captures only
  std::optional<Captured> captured;

  // Captures `step` on the graph's own stream; runs nothing.
  absl::StatusOr<Graph> Record(const StepIssuer& step, int32_t live_batch) const;
  // Captures and instantiates the step for a live batch of the whole capacity.
  absl::StatusOr<Captured> Make() const;
  // Changes the head node where the live batch is not the one told last.
  absl::Status TellLiveBatch(int32_t live_batch);
  // Records the step into another capture.
  absl::Status RecordInto(cudaStream_t capturing_stream, int32_t live_batch) const;
  // Gives the captured nodes the parameters of `step`; all of them, or none where it fails.
  absl::Status Exchange(StepIssuer step);

 private:
  void RestoreKernels(const std::vector<GraphNode>& nodes);
};

}  // namespace pgqa
