// The launches of one decode step, in order.
// SPDX-License-Identifier: Apache-2.0
#include "graphs/step_issuer.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pgqa/append.h"
#include "pgqa/step_plan.h"

namespace pgqa {
namespace {

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

// Windows of more than one layer.
std::vector<int32_t> SharedWindows(const GraphSpec& spec) {
  std::map<int32_t, int32_t> layers_of;
  for (const GraphLayer& layer : spec.layers) ++layers_of[layer.options.window_left];
  std::vector<int32_t> windows;
  for (const auto& [window_left, layers] : layers_of) {
    if (layers > 1) windows.push_back(window_left);
  }
  return windows;
}

}  // namespace

StepIssuer::StepIssuer(GraphSpec filled_spec, const LaunchPlan& plan, IssueLayers issue)
    : spec_(std::move(filled_spec)),
      plan_(plan),
      issue_(std::move(issue)),
      layers_read_outputs_(LayersReadOutputs(spec_)) {
  const AttentionShape& shape = spec_.shape;
  const auto layout = WorkspaceFor(plan_, shape.batch, Table().NumEntries());
  workspace_bytes_ = layout.ok() ? layout->bytes : 0;  // else no launch takes the table
  if (plan_.segment_tokens == 0) planned_windows_ = SharedWindows(spec_);
  step_plans_offset_ = AlignedBytes(workspace_bytes_);
  live_rows_offset_ = step_plans_offset_ + static_cast<int64_t>(planned_windows_.size()) *
                                               AlignedBytes(StepPlanBytes(plan_));
  turned_q_offset_ = live_rows_offset_ + AlignedBytes((int64_t{shape.batch} + 1) * 4);
  scratch_bytes_ = turned_q_offset_;
  if (spec_.rotate_appended)
    scratch_bytes_ += int64_t{shape.batch} * shape.num_query_heads * shape.head_dim * 2;
}

PageTableView StepIssuer::Table() const {
  if (spec_.IsCsr()) {
    return {.indptr = spec_.page_indptr,
            .indices = spec_.page_indices,
            .last_page_len = spec_.last_page_len,
            .num_indices = spec_.max_pages,
            .num_pages = spec_.num_pages,
            .batch = spec_.shape.batch,
            .page_size = spec_.shape.page_size};
  }
  return ViewOf({.block_table = spec_.block_table,
                 .seq_lens = spec_.seq_lens,
                 .row_stride = spec_.block_table_stride,
                 .num_pages = spec_.num_pages,
                 .batch = spec_.shape.batch,
                 .columns = spec_.max_columns,
                 .page_size = spec_.shape.page_size,
                 .new_tokens = spec_.new_tokens});
}

LiveRowsArgs StepIssuer::HeadArgs(const WorkspaceView& scratch, int32_t live_batch) const {
  return {
      .table = Table(),
      .live_rows = reinterpret_cast<int32_t*>(static_cast<char*>(scratch.data) + live_rows_offset_),
      .live_batch = live_batch};
}

absl::Status StepIssuer::Issue(const WorkspaceView& scratch, std::optional<int32_t> live_batch,
                               cudaStream_t stream) const {
  GraphStep step;
  step.stream = stream;
  step.table = Table();
  step.workspace = scratch;
  step.workspace.bytes = workspace_bytes_;
  if (live_batch.has_value()) {
    const LiveRowsArgs head = HeadArgs(scratch, *live_batch);
    if (absl::Status s = LaunchLiveRows(head, stream); !s.ok()) return s;
    step.table = LiveTable(head);
  }
  if (issue_ != nullptr) return issue_(step);
  if (absl::Status s = IssueStepPlans(step, !live_batch.has_value()); !s.ok()) return s;
  void* turned_q = static_cast<char*>(scratch.data) + turned_q_offset_;
  for (size_t i = 0; i < spec_.layers.size(); ++i) {
    const bool is_first_launch = i == 0 && planned_windows_.empty() && !live_batch.has_value();
    if (absl::Status s = IssueLayer(i, step, turned_q, is_first_launch); !s.ok()) {
      return absl::Status(s.code(), absl::StrCat(s.message(), " (layer ", i, ")"));
    }
  }
  return absl::OkStatus();
}

void* StepIssuer::StepPlanOf(const GraphStep& step, int32_t window_left) const {
  const auto found = std::find(planned_windows_.begin(), planned_windows_.end(), window_left);
  if (found == planned_windows_.end()) return nullptr;
  return static_cast<char*>(step.workspace.data) + step_plans_offset_ +
         (found - planned_windows_.begin()) * AlignedBytes(StepPlanBytes(plan_));
}

absl::Status StepIssuer::IssueStepPlans(const GraphStep& step, bool is_first_launch) const {
  for (const int32_t window_left : planned_windows_) {
    StepPlanArgs args{step.table, window_left, StepPlanOf(step, window_left), step.workspace};
    if (spec_.dependent_launch && !is_first_launch) args.dependence = Dependence::kAny;
    if (absl::Status s = PlanStep(plan_, args, step.stream); !s.ok()) return s;
    is_first_launch = false;
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
  decode.step_plan = StepPlanOf(step, layer.options.window_left);
  decode.dependence = DependenceOf(index == 0, is_first_launch && !spec_.append);
  if (spec_.return_lse) decode.lse = layer.lse;
  if (spec_.append) {
    AttentionShape shape = spec_.shape;
    shape.pos_encoding = PosEncoding::kNone;
    AppendArgs append = AppendArgsOf(layer, step.table);
    if (spec_.dependent_launch && !is_first_launch) append.dependence = Dependence::kAny;
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
