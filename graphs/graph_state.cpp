// Captures a decode step, and changes its nodes in place.
// SPDX-License-Identifier: Apache-2.0
#include "graphs/graph_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/cuda_status.h"

namespace pgqa {
namespace {

// The node that everything else of a step comes behind.
absl::StatusOr<cudaGraphNode_t> HeadOf(const Graph& graph) {
  size_t num_roots = 0;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphGetRootNodes(graph.get(), nullptr, &num_roots));
  if (num_roots != 1) {
    return absl::FailedPreconditionError(
        "graph: got launches that do not come behind its first, expected all on the step's stream");
  }
  cudaGraphNode_t head = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphGetRootNodes(graph.get(), &head, &num_roots));
  return head;
}

// Gives each node of `exec`, made of `nodes`, the parameters of the same node of `others`.
absl::Status SetKernels(const GraphExec& exec, const std::vector<GraphNode>& nodes,
                        const std::vector<GraphNode>& others) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (absl::Status s = exec.SetKernel(nodes[i].node, others[i].kernel); !s.ok()) return s;
  }
  return absl::OkStatus();
}

absl::Status CheckSameNodes(const std::vector<GraphNode>& got,
                            const std::vector<GraphNode>& expected) {
  bool same = got.size() == expected.size();
  for (size_t i = 0; same && i < got.size(); ++i)
    same = got[i].type == cudaGraphNodeTypeKernel && expected[i].type == cudaGraphNodeTypeKernel;
  if (same) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("rebind: got a step of ", got.size(),
                                                    " nodes, expected ", expected.size(),
                                                    " as captured, kernels only"));
}

}  // namespace

absl::StatusOr<Graph> DecodeGraph::State::Record(const StepIssuer& step, int32_t live_batch) const {
  absl::StatusOr<CaptureScope> scope = CaptureScope::Begin(stream.get());
  if (!scope.ok()) return scope.status();
  std::optional<int32_t> told;
  if (asked.live_batch) told = live_batch;
  if (absl::Status s = step.Issue(scratch.View(), told, stream.get()); !s.ok()) return s;
  return scope->End();
}

absl::StatusOr<Captured> DecodeGraph::State::Make() const {
  absl::StatusOr<Graph> graph = Record(issuer, asked.shape.batch);
  if (!graph.ok()) return graph.status();
  absl::StatusOr<GraphExec> exec = GraphExec::Instantiate(*graph);
  if (!exec.ok()) return exec.status();
  Captured made{.graph = *std::move(graph), .exec = *std::move(exec)};
  made.live_batch = asked.shape.batch;
  if (!asked.live_batch) return made;
  const absl::StatusOr<cudaGraphNode_t> head = HeadOf(made.graph);
  if (!head.ok()) return head.status();
  made.head = *head;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGraphKernelNodeGetParams(made.head, &made.head_params));
  return made;
}

absl::Status DecodeGraph::State::TellLiveBatch(int32_t live_batch) {
  if (captured->live_batch == live_batch) return absl::OkStatus();
  LiveRowsArgs args = issuer.HeadArgs(scratch.View(), live_batch);
  void* arguments[] = {&args};
  cudaKernelNodeParams params = captured->head_params;
  params.kernelParams = arguments;
  absl::Status s = captured->exec.SetKernel(captured->head, params);
  if (s.ok()) captured->live_batch = live_batch;
  return s;
}

absl::Status DecodeGraph::State::RecordInto(cudaStream_t capturing_stream,
                                            int32_t live_batch) const {
  std::optional<int32_t> told;
  if (asked.live_batch) told = live_batch;
  return issuer.Issue(scratch.View(), told, capturing_stream);
}

// Back to what was bound before a failed Rebind(): half of each would be neither.
void DecodeGraph::State::RestoreKernels(const std::vector<GraphNode>& nodes) {
  const Graph& before = captured->bound.has_value() ? *captured->bound : captured->graph;
  if (const auto old = before.Chain(); old.ok()) (void)SetKernels(captured->exec, nodes, *old);
  if (!asked.live_batch) return;
  // The head of `before` may have been told another live batch since.
  const int32_t live_batch = std::exchange(captured->live_batch, -1);
  if (!TellLiveBatch(live_batch).ok()) captured->live_batch = live_batch;
}

absl::Status DecodeGraph::State::Exchange(StepIssuer step) {
  absl::StatusOr<Graph> graph = Record(step, captured->live_batch);
  if (!graph.ok()) return graph.status();
  const absl::StatusOr<std::vector<GraphNode>> nodes = captured->graph.Chain();
  if (!nodes.ok()) return nodes.status();
  const absl::StatusOr<std::vector<GraphNode>> others = graph->Chain();
  if (!others.ok()) return others.status();
  if (absl::Status s = CheckSameNodes(*others, *nodes); !s.ok()) return s;
  if (absl::Status s = SetKernels(captured->exec, *nodes, *others); !s.ok()) {
    RestoreKernels(*nodes);
    return s;
  }
  captured->bound = *std::move(graph);
  issuer = std::move(step);
  return absl::OkStatus();
}

}  // namespace pgqa
