// Calls of the CUDA runtime's graph interface, with statuses for errors.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/cuda_graph.h"

#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/cuda_status.h"

namespace pgqa {
namespace {

using Neighbours = std::unordered_map<cudaGraphNode_t, cudaGraphNode_t>;

// Fills in the node behind and the node before each node that has one; a node may have one of each.
absl::Status ReadEdges(cudaGraph_t graph, Neighbours* next, Neighbours* previous) {
  size_t num_edges = 0;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &num_edges));
  std::vector<cudaGraphNode_t> from(num_edges), to(num_edges);
  std::vector<cudaGraphEdgeData> data(num_edges);  // asked for, since some edges are programmatic
  PGQA_RETURN_IF_CUDA_ERROR(
      cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &num_edges));
  for (size_t i = 0; i < num_edges; ++i) {
    if (!next->emplace(from[i], to[i]).second || !previous->emplace(to[i], from[i]).second) {
      return absl::FailedPreconditionError(
          "graph: got one that branches, expected a chain of nodes");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GraphNode> Describe(cudaGraphNode_t node) {
  GraphNode described{.node = node};
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphNodeGetType(node, &described.type));
  if (described.type == cudaGraphNodeTypeKernel) {
    PGQA_RETURN_IF_CUDA_ERROR(cudaGraphKernelNodeGetParams(node, &described.kernel));
  }
  return described;
}

}  // namespace

absl::StatusOr<CudaStream> CudaStream::Create() {
  cudaStream_t stream = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return CudaStream(stream);
}

absl::StatusOr<std::vector<GraphNode>> Graph::Chain() const {
  size_t num_nodes = 0;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(get(), nullptr, &num_nodes));
  std::vector<cudaGraphNode_t> nodes(num_nodes);
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphGetNodes(get(), nodes.data(), &num_nodes));
  Neighbours next, previous;
  if (absl::Status s = ReadEdges(get(), &next, &previous); !s.ok()) return s;
  std::vector<GraphNode> chain;
  for (const cudaGraphNode_t first : nodes) {
    if (previous.count(first) != 0) continue;
    if (!chain.empty()) {
      return absl::FailedPreconditionError(
          "graph: got one of several parts, expected a chain of nodes");
    }
    cudaGraphNode_t node = first;
    for (auto it = next.find(node);; it = next.find(node)) {
      absl::StatusOr<GraphNode> described = Describe(node);
      if (!described.ok()) return described.status();
      chain.push_back(*described);
      if (it == next.end()) break;
      node = it->second;
    }
  }
  return chain;
}

absl::StatusOr<GraphExec> GraphExec::Instantiate(const Graph& graph) {
  cudaGraphExec_t exec = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphInstantiate(&exec, graph.get(), 0));
  return GraphExec(exec);
}

absl::Status GraphExec::Upload(cudaStream_t stream) const {
  return CudaStatus(cudaGraphUpload(get(), stream), "cudaGraphUpload");
}

absl::Status GraphExec::Launch(cudaStream_t stream) const {
  return CudaStatus(cudaGraphLaunch(get(), stream), "cudaGraphLaunch");
}

absl::Status GraphExec::SetKernel(cudaGraphNode_t node, const cudaKernelNodeParams& params) const {
  return CudaStatus(cudaGraphExecKernelNodeSetParams(get(), node, &params),
                    "cudaGraphExecKernelNodeSetParams");
}

absl::StatusOr<CaptureScope> CaptureScope::Begin(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    return absl::InvalidArgumentError(
        "stream: got the legacy default stream, expected one that can be captured");
  }
  const absl::StatusOr<bool> capturing = IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (*capturing) {
    return absl::InvalidArgumentError(
        "stream: got one that is being captured, expected one that is not");
  }
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  return CaptureScope(stream);
}

CaptureScope::CaptureScope(CaptureScope&& other) noexcept
    : stream_(other.stream_), active_(std::exchange(other.active_, false)) {}

CaptureScope::~CaptureScope() {
  if (!active_) return;
  // What went wrong has been reported by the call that failed; it must not be found again later.
  (void)End();
  (void)cudaGetLastError();
}

absl::StatusOr<Graph> CaptureScope::End() {
  if (!active_) return absl::FailedPreconditionError("capture: got one that has ended");
  active_ = false;
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
  Graph owned(graph);
  if (absl::Status s = CudaStatus(error, "cudaStreamEndCapture"); !s.ok()) {
    return absl::FailedPreconditionError(s.message());
  }
  return owned;
}

absl::StatusOr<bool> IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &status));
  if (status == cudaStreamCaptureStatusInvalidated) {
    return absl::FailedPreconditionError(
        "stream: got a capture that an earlier error made invalid, expected it to be ended");
  }
  return status == cudaStreamCaptureStatusActive;
}

}  // namespace pgqa
