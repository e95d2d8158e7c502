// Plans a worker of the batch-invariant mode on the device: as PlanWorker(), in segments.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/cta_planner.cuh"
#include "cuda/device_planner.cuh"
#include "cuda/row_window.cuh"
#include "pgqa/segments.h"

namespace pgqa {

// Plans the calling CTA's worker; every thread gets the same plan. `scratch` and `rows` as for PlanWorker().
template <class Index>
__device__ __forceinline__ WorkerPlan<Index> PlanSegments(
    const PartitionConfig& config, const AxisCuts& cuts, int32_t segment_tokens,
    const PageTableView& table, int32_t window_left, void* scratch, RowWindow<Index>* rows) {
  const AxisCut& cut = cuts.of_log2_heads[Log2(config.max_heads_per_worker)];
  const bool alone = table.batch <= WarpPlanner<Index>::kMaxBatch;
  WarpPlanner<Index> warp(table, rows);
  CtaPlanner<Index> cta(table, scratch);
  const auto count = [&](int32_t tokens) { return alone ? warp.Count(tokens) : cta.Count(tokens); };
  WorkerPlan<Index> plan;
  plan.has_empty_requests = alone ? warp.Read(window_left) : cta.Read(config, window_left);
  Index segments = count(segment_tokens);
  if (SegmentTokens(segment_tokens, table, segments) != segment_tokens) {
    segment_tokens = SegmentTokens(segment_tokens, table, segments);
    segments = count(segment_tokens);
  }
  plan.partition = MakeSegmentPartition(config, cut, segments, segment_tokens);
  const Placement place = PlaceOf(cut);
  plan.axis = place.axis;
  plan.worker = place.worker;
  if (place.worker_in_axis < cut.workers_per_axis) {
    plan.share = plan.partition.ShareOf(place.worker_in_axis);
  }
  if (plan.share.begin != plan.share.end) {
    const Index group_unit = plan.partition.GroupOf(plan.share) * segments;
    const Index wanted = plan.share.begin - group_unit;
    plan.start = alone ? warp.Find(wanted) : cta.Find(wanted, segment_tokens);
    plan.start.request_unit += group_unit;
    if (!alone) rows->Load(table, plan.start.request);
  }
  if (!alone) __syncthreads();
  return plan;
}

}  // namespace pgqa
