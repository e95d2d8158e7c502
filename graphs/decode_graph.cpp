// Captures a decode step, replays it, and exchanges what it points to.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/decode_graph.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cuda/cuda_status.h"
#include "graphs/graph_buffers.h"
#include "graphs/graph_state.h"
#include "graphs/step_issuer.h"
#include "pgqa/workspace.h"

namespace pgqa {
namespace {

absl::Status CheckSameStep(const GraphSpec& got, const GraphSpec& expected) {
  GraphSpec same = got;
  same.max_pages = expected.max_pages;
  same.num_pages = expected.num_pages;
  same.page_indptr = expected.page_indptr;
  same.page_indices = expected.page_indices;
  same.last_page_len = expected.last_page_len;
  if (got.IsCsr() == expected.IsCsr()) same.max_columns = expected.max_columns;
  same.block_table = expected.block_table;
  same.block_table_stride = expected.block_table_stride;
  same.seq_lens = expected.seq_lens;
  same.layers = expected.layers;
  if (!(same == expected)) {
    return absl::InvalidArgumentError(
        "spec: got another shape, kind of table, new_tokens, live_batch, return_lse, append, "
        "rotate_appended or dependent_launch, expected those of the captured graph");
  }
  const bool own_table = got.block_table == nullptr;
  if ((own_table || got.shape.batch_invariant) && got.max_columns > expected.max_columns) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_columns: got ", got.max_columns, ", expected at most ", expected.max_columns,
        ", what the ",
        own_table ? "graph's own block_table holds" : "workspace of batch_invariant is for"));
  }
  const bool own_indices = got.page_indices == nullptr;
  if ((own_indices || got.shape.batch_invariant) && got.max_pages > expected.max_pages) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_pages: got ", got.max_pages, ", expected at most ", expected.max_pages, ", what the ",
        own_indices ? "graph's own page_indices hold" : "workspace of batch_invariant is for"));
  }
  if (got.layers.size() != expected.layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("layers: got ", got.layers.size(), ", expected ",
                                                   expected.layers.size(), " as captured"));
  }
  return absl::OkStatus();
}

absl::Status MovedFrom() {
  return absl::FailedPreconditionError("graph: got one that was moved from, expected a live one");
}

}  // namespace

DecodeGraph::DecodeGraph(std::unique_ptr<State> state) : state_(std::move(state)) {}
DecodeGraph::DecodeGraph(DecodeGraph&&) noexcept = default;
DecodeGraph& DecodeGraph::operator=(DecodeGraph&&) noexcept = default;
DecodeGraph::~DecodeGraph() = default;

absl::StatusOr<DecodeGraph> DecodeGraph::Create(const GraphSpec& spec, IssueLayers issue) {
  if (absl::Status s = ValidateGraphSpec(spec); !s.ok()) return s;
  if (spec.layers.empty() && issue == nullptr) {
    return absl::InvalidArgumentError("layers: got none, expected at least 1 or a function");
  }
  int device = 0;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  const absl::StatusOr<DeviceProperties> properties = QueryDevice(device);
  if (!properties.ok()) return properties.status();
  const absl::StatusOr<LaunchPlan> plan = MakeGpuLaunchPlan(spec.shape, *properties);
  if (!plan.ok()) return plan.status();
  absl::StatusOr<GraphBuffers> buffers = GraphBuffers::Create(spec);
  if (!buffers.ok()) return buffers.status();
  absl::StatusOr<GraphSpec> filled = buffers->Fill(spec);
  if (!filled.ok()) return filled.status();
  if (absl::Status s = CheckAddresses(*filled, device); !s.ok()) return s;
  int major = 0;
  PGQA_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  filled->dependent_launch &= major >= 9;
  StepIssuer issuer(*std::move(filled), *plan, std::move(issue));
  absl::StatusOr<Workspace> scratch = Workspace::Create(issuer.scratch_bytes());
  if (!scratch.ok()) return scratch.status();
  absl::StatusOr<CudaStream> stream = CudaStream::Create();
  if (!stream.ok()) return stream.status();
  auto state =
      std::unique_ptr<State>(new State{device, spec, *std::move(buffers), std::move(issuer),
                                       *std::move(scratch), *std::move(stream), std::nullopt});
  if (state->issuer.issue() == nullptr) {
    const absl::StatusOr<Graph> tried = state->Record(state->issuer, spec.shape.batch);
    if (!tried.ok()) return tried.status();
  }
  return DecodeGraph(std::move(state));
}

absl::Status DecodeGraph::CheckAlive() const {
  if (state_ == nullptr) return MovedFrom();
  int device = 0;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  if (device == state_->device) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("device: got CUDA device ", device,
                                                 " as the current one, expected ", state_->device,
                                                 ", that of the graph"));
}

absl::Status DecodeGraph::Capture(cudaStream_t stream) {
  if (absl::Status s = CheckAlive(); !s.ok()) return s;
  const absl::StatusOr<bool> capturing = IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (*capturing) {
    return absl::InvalidArgumentError(
        "stream: got one that is being captured, expected one to run the step on once");
  }
  // Loads what is loaded late, before the capture. Empty requests, whatever the table says.
  if (absl::Status s = state_->issuer.Issue(state_->scratch.View(), 0, stream); !s.ok()) return s;
  absl::StatusOr<Captured> made = state_->Make();
  if (!made.ok()) return made.status();
  if (absl::Status s = made->exec.Upload(stream); !s.ok()) return s;
  state_->captured = *std::move(made);
  return absl::OkStatus();
}

absl::Status DecodeGraph::Launch(int32_t live_batch, cudaStream_t stream) {
  const absl::StatusOr<bool> capturing = IsCapturing(stream);
  if (!capturing.ok()) return capturing.status();
  if (*capturing) return state_->RecordInto(stream, live_batch);
  if (absl::Status s = state_->TellLiveBatch(live_batch); !s.ok()) return s;
  return state_->captured->exec.Launch(stream);
}

absl::Status DecodeGraph::CheckCaptured() const {
  if (absl::Status s = CheckAlive(); !s.ok()) return s;
  if (state_->captured.has_value()) return absl::OkStatus();
  return absl::FailedPreconditionError("graph: got no capture, expected Capture() before");
}

absl::Status DecodeGraph::Replay(cudaStream_t stream) {
  if (absl::Status s = CheckCaptured(); !s.ok()) return s;
  return Launch(state_->captured->live_batch, stream);
}

absl::Status DecodeGraph::Replay(int32_t live_batch, cudaStream_t stream) {
  if (absl::Status s = CheckCaptured(); !s.ok()) return s;
  if (!state_->asked.live_batch) {
    return absl::InvalidArgumentError(absl::StrCat(
        "live_batch: got ", live_batch, ", expected none: the graph was made without a head node"));
  }
  if (absl::Status s = CheckStep(live_batch, 0); !s.ok()) return s;
  return Launch(live_batch, stream);
}

absl::Status DecodeGraph::Rebind(const GraphSpec& spec) {
  if (absl::Status s = CheckCaptured(); !s.ok()) return s;
  if (absl::Status s = ValidateGraphSpec(spec); !s.ok()) return s;
  if (absl::Status s = CheckSameStep(spec, state_->asked); !s.ok()) return s;
  absl::StatusOr<GraphSpec> filled = state_->buffers.Fill(spec);
  if (!filled.ok()) return filled.status();
  if (absl::Status s = CheckAddresses(*filled, state_->device); !s.ok()) return s;
  filled->dependent_launch = state_->issuer.spec().dependent_launch;
  return state_->Exchange(
      StepIssuer(*std::move(filled), state_->issuer.plan(), state_->issuer.issue()));
}

absl::Status DecodeGraph::CheckStep(int32_t live_batch, int64_t num_pages) const {
  if (state_ == nullptr) return MovedFrom();
  return CheckFits(CapacityOf(spec()), live_batch, num_pages);
}

const GraphSpec& DecodeGraph::spec() const { return state_->issuer.spec(); }
int32_t DecodeGraph::device() const { return state_->device; }

int32_t DecodeGraph::live_batch() const {
  return state_->captured.has_value() ? state_->captured->live_batch : spec().shape.batch;
}

int64_t DecodeGraph::device_bytes() const {
  return state_->buffers.bytes() + state_->scratch.View().bytes;
}

cudaGraphExec_t DecodeGraph::exec() const {
  return state_->captured.has_value() ? state_->captured->exec.get() : nullptr;
}

absl::StatusOr<std::vector<GraphNode>> DecodeGraph::Nodes() const {
  if (absl::Status s = CheckCaptured(); !s.ok()) return s;
  return state_->captured->graph.Chain();
}

}  // namespace pgqa
