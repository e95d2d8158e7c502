// The launches of one decode step, in order.
// SPDX-License-Identifier: Apache-2.0
#include "graphs/step_issuer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "pgqa/append.h"

namespace pgqa {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

AppendArgs AppendArgsOf(const GraphLayer& layer, const PageTableView& table) {
  AppendArgs args;
  args.k = layer.k;
  args.v = layer.v;
  args.k_strides = layer.k_strides;
  args.v_strides = layer.v_strides;
  args.k_cache = layer.k_cache;
  args.v_cache = layer.v_cache;
  args.k_cache_strides = layer.k_cache_strides;
  args.v_cache_strides = layer.v_cache_strides;
  args.table = table;
  args.rope_scale = layer.options.rope_scale;
  args.rope_theta = layer.options.rope_theta;
  return args;
}

DecodeArgs DecodeArgsOf(const GraphLayer& layer, const PageTableView& table) {
  DecodeArgs args;
  args.q = layer.q;
  args.q_batch_stride = layer.q_strides.batch;
  args.q_head_stride = layer.q_strides.head;
  args.k_cache = layer.k_cache;
  args.v_cache = layer.v_cache;
  args.k_strides = layer.k_cache_strides;
  args.v_strides = layer.v_cache_strides;
  args.table = table;
  args.out = layer.out;
  args.options = layer.options;
  return args;
}

}  // namespace

StepIssuer::StepIssuer(GraphSpec filled_spec, const LaunchPlan& plan, IssueLayers issue)
    : spec_(std::move(filled_spec)),
      plan_(plan),
      issue_(std::move(issue)),
      layers_read_outputs_(LayersReadOutputs(spec_)) {
  const AttentionShape& shape = spec_.shape;
  const auto layout = WorkspaceFor(plan_, shape.batch, spec_.max_pages);
  workspace_bytes_ = layout.ok() ? layout->bytes : 0;  // else no launch takes the table
  live_indptr_offset_ = Aligned(workspace_bytes_);
  turned_q_offset_ = live_indptr_offset_ + Aligned((int64_t{shape.batch} + 1) * 4);
  scratch_bytes_ = turned_q_offset_;
  if (spec_.rotate_appended)
    scratch_bytes_ += int64_t{shape.batch} * shape.num_query_heads * shape.head_dim * 2;
}

LiveRowsArgs StepIssuer::HeadArgs(const WorkspaceView& scratch, int32_t live_batch) const {
  return {.indptr = spec_.page_indptr,
          .live_indptr =
              reinterpret_cast<int32_t*>(static_cast<char*>(scratch.data) + live_indptr_offset_),
          .batch = spec_.shape.batch,
          .live_batch = live_batch};
}

absl::Status StepIssuer::Issue(const WorkspaceView& scratch, std::optional<int32_t> live_batch,
                               cudaStream_t stream) const {
  GraphStep step;
  step.stream = stream;
  step.table = {spec_.page_indptr, spec_.page_indices, spec_.last_page_len,  spec_.max_pages,
                spec_.num_pages,   spec_.shape.batch,  spec_.shape.page_size};
  step.workspace = scratch;
  step.workspace.bytes = workspace_bytes_;
  if (live_batch.has_value()) {
    const LiveRowsArgs head = HeadArgs(scratch, *live_batch);
    if (absl::Status s = LaunchLiveRows(head, stream); !s.ok()) return s;
    step.table.indptr = head.live_indptr;
  }
  if (issue_ != nullptr) return issue_(step);
  void* turned_q = static_cast<char*>(scratch.data) + turned_q_offset_;
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const bool is_first_launch = i == 0 && !live_batch.has_value();
    if (absl::Status s = IssueLayer(i, step, turned_q, is_first_launch); !s.ok()) {
      return absl::Status(s.code(), absl::StrCat(s.message(), " (layer ", i, ")"));
    }
  }
  return absl::OkStatus();
}

// What a layer reads was written before the step, but for keys, values and turned q that it appends.
Dependence StepIssuer::DependenceOf(bool is_first_layer, bool is_first_launch) const {
  if (!spec_.dependent_launch || is_first_launch) return Dependence::kStream;
  if (layers_read_outputs_ || is_first_layer) return Dependence::kAny;
  return spec_.append ? Dependence::kTensors : Dependence::kNothing;
}

absl::Status StepIssuer::IssueLayer(size_t index, const GraphStep& step, void* turned_q,
                                    bool is_first_launch) const {
  const GraphLayer& layer = spec_.layers[index];
  DecodeArgs decode = DecodeArgsOf(layer, step.table);
  decode.dependence = DependenceOf(index == 0, is_first_launch && !spec_.append);
  if (spec_.return_lse) decode.lse = layer.lse;
  if (spec_.append) {
    AttentionShape shape = spec_.shape;
    shape.pos_encoding = PosEncoding::kNone;
    AppendArgs append = AppendArgsOf(layer, step.table);
    append.launched_early = spec_.dependent_launch && !is_first_launch;
    if (spec_.rotate_appended) {
      shape.pos_encoding = PosEncoding::kRopeLlama;
      append.q = layer.q;
      append.q_strides = layer.q_strides;
      append.q_out = turned_q;
      append.q_out_strides = {int64_t{shape.num_query_heads} * shape.head_dim, shape.head_dim};
      decode.q = turned_q;
      decode.q_batch_stride = append.q_out_strides.batch;
      decode.q_head_stride = append.q_out_strides.head;
    }
    if (absl::Status s = Append(shape, append, step.stream); !s.ok()) return s;
  }
  return Decode(plan_, decode, step.workspace, step.stream);
}

}  // namespace pgqa
