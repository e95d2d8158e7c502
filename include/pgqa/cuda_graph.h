// Move-only owners over the CUDA runtime's graphs: stream, capture, graph and executable.
// SPDX-License-Identifier: Apache-2.0
//
// Nothing here synchronises. Errors are InvalidArgument where an argument is at fault,
// FailedPrecondition where an object is not in a state for the call, Internal or ResourceExhausted
// where CUDA fails; CUDA's own last error is cleared. Not thread-safe; a capture is ended by the
// thread that began it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pgqa {

namespace cuda_graph_internal {
struct Destroy {
  void operator()(cudaStream_t stream) const { (void)cudaStreamDestroy(stream); }
  void operator()(cudaGraph_t graph) const { (void)cudaGraphDestroy(graph); }
  void operator()(cudaGraphExec_t exec) const { (void)cudaGraphExecDestroy(exec); }
};
template <class Handle>
using Owner = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;
}  // namespace cuda_graph_internal

// A stream that does not wait for the legacy default stream, nor that one for it.
class CudaStream {
 public:
  // On the current device.
  static absl::StatusOr<CudaStream> Create();
  cudaStream_t get() const { return stream_.get(); }

 private:
  explicit CudaStream(cudaStream_t stream) : stream_(stream) {}
  cuda_graph_internal::Owner<cudaStream_t> stream_;
};

// A node of a graph. `kernel` is meaningful for kernel nodes; what it points to is the node's own
// and valid until the graph is destroyed.
struct GraphNode {
  cudaGraphNode_t node = nullptr;
  cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
  cudaKernelNodeParams kernel = {};
};

// A graph as captured, not executable.
class Graph {
 public:
  explicit Graph(cudaGraph_t graph) : graph_(graph) {}  // takes ownership
  cudaGraph_t get() const { return graph_.get(); }

  // All nodes, each behind those that it depends on. FailedPrecondition unless they form one chain,
  // as launches on a single stream do.
  absl::StatusOr<std::vector<GraphNode>> Chain() const;

 private:
  cuda_graph_internal::Owner<cudaGraph_t> graph_;
};

// A graph that can be launched. Its nodes are named by those of the graph that it was made of,
// which must outlive calls of SetKernel.
class GraphExec {
 public:
  static absl::StatusOr<GraphExec> Instantiate(const Graph& graph);
  cudaGraphExec_t get() const { return exec_.get(); }

  // Brings it to the device, so that the first launch is as quick as the others; ordered on
  // `stream`.
  absl::Status Upload(cudaStream_t stream) const;
  // May be captured into another graph where `stream` is being captured. Launches of one executable
  // run one after another, on whichever streams.
  absl::Status Launch(cudaStream_t stream) const;
  // For later launches; those enqueued keep what they had.
  absl::Status SetKernel(cudaGraphNode_t node, const cudaKernelNodeParams& params) const;

 private:
  explicit GraphExec(cudaGraphExec_t exec) : exec_(exec) {}
  cuda_graph_internal::Owner<cudaGraphExec_t> exec_;
};

// Captures what is launched on one stream while it lives. Thread-local: other threads may allocate
// and synchronise meanwhile; this one may not. Destroyed without End(), it ends the capture,
// discards it and clears the error, and the stream is as before.
class CaptureScope {
 public:
  // InvalidArgument for the legacy default stream, which can not be captured, and for a stream that
  // is being captured already.
  static absl::StatusOr<CaptureScope> Begin(cudaStream_t stream);
  CaptureScope(CaptureScope&& other) noexcept;
  CaptureScope& operator=(CaptureScope&&) = delete;
  ~CaptureScope();

  // Ends the capture, once. FailedPrecondition where something within it was not allowed, or work
  // on another stream was not joined; nothing of it remains then.
  absl::StatusOr<Graph> End();

 private:
  explicit CaptureScope(cudaStream_t stream) : stream_(stream), active_(true) {}
  cudaStream_t stream_;
  bool active_;
};

// Whether `stream` is being captured. FailedPrecondition where its capture is invalid.
absl::StatusOr<bool> IsCapturing(cudaStream_t stream);

}  // namespace pgqa
