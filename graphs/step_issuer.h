// Issues the launches of one decode step: to run, to be captured, or into someone else's capture.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "graphs/live_rows.h"
#include "pgqa/decode_graph.h"
#include "pgqa/graph_spec.h"
#include "pgqa/launch_plan.h"

namespace pgqa {

// A step with all its addresses. Its scratch is a workspace that is followed by the plans of the windows that layers
// share, the live rows and, where appended keys are turned, the turned queries of a layer.
class StepIssuer {
 public:
  StepIssuer(GraphSpec filled_spec, const LaunchPlan& plan, IssueLayers issue);

  // Launches the step on `stream`: the head where there is a live batch, the shared plans, then the layers. `scratch`
  // has scratch_bytes().
  absl::Status Issue(const WorkspaceView& scratch, std::optional<int32_t> live_batch,
                     cudaStream_t stream) const;

  LiveRowsArgs HeadArgs(const WorkspaceView& scratch, int32_t live_batch) const;

  const GraphSpec& spec() const { return spec_; }
  const LaunchPlan& plan() const { return plan_; }
  const IssueLayers& issue() const { return issue_; }
  int64_t scratch_bytes() const { return scratch_bytes_; }

 private:
  PageTableView Table() const;
  // Plans the step for every window that several layers share.
  absl::Status IssueStepPlans(const GraphStep& step, bool is_first_launch) const;
  // Where the plan of layers with this window lies; null where each plans for itself.
  void* StepPlanOf(const GraphStep& step, int32_t window_left) const;
  absl::Status IssueLayer(size_t index, const GraphStep& step, void* turned_q,
                          bool is_first_launch) const;
  // Of a layer's attention on what the launches of the step before it write.
  Dependence DependenceOf(bool is_first_layer, bool is_first_launch) const;

  GraphSpec spec_;
  LaunchPlan plan_;
  IssueLayers issue_;
  int64_t workspace_bytes_ = 0;
  std::vector<int32_t> planned_windows_;
  int64_t step_plans_offset_ = 0;
  int64_t live_rows_offset_ = 0;
  int64_t turned_q_offset_ = 0;
  int64_t scratch_bytes_ = 0;
  bool layers_read_outputs_;
};

}  // namespace pgqa
