// Plans a worker on the device: from the page table to the partition and the worker's first request.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/cta_planner.cuh"
#include "cuda/row_window.cuh"
#include "pgqa/partition.h"
#include "pgqa/step_plan.h"

namespace pgqa {

// Index counts tokens and tiles: int32_t where FitsInt32(), else int64_t.
template <class Index>
struct WorkerPlan {
  BasicPartition<Index> partition;
  BasicShare<Index> share;
  BasicWorkerStart<Index> start;
  int32_t axis = 0;
  int32_t worker =
      0;  // its number as the host counts them: the workers of axis 0, then those of axis 1, ...
  bool has_empty_requests = false;
};

// The record of the calling CTA's worker in the plan of a step.
template <class Index, class Memory>
__device__ __forceinline__ auto* StepRecord(Memory* step_plan) {
  using Record =
      std::conditional_t<std::is_const_v<Memory>, const WorkerPlan<Index>, WorkerPlan<Index>>;
  static_assert(sizeof(Record) <= kStepRecordBytes);
  using Byte = std::conditional_t<std::is_const_v<Memory>, const char, char>;
  return reinterpret_cast<Record*>(static_cast<Byte*>(step_plan) + blockIdx.x * kStepRecordBytes);
}

// Where a CTA stands in a cut. Neighbouring CTAs, which start together, take different axes: then they read the
// same tokens, whose heads lie side by side in memory, at the same time.
struct Placement {
  int32_t axis;
  int32_t worker_in_axis;  // workers_per_axis or more: left over, owns nothing
  int32_t worker;
};

__device__ __forceinline__ Placement PlaceOf(const AxisCut& cut) {
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  Placement place;
  place.worker_in_axis = cut.by_axes.Divide(cta);
  place.axis = cta - place.worker_in_axis * cut.num_axes;
  place.worker = place.axis * cut.workers_per_axis + place.worker_in_axis;
  if (place.worker_in_axis >= cut.workers_per_axis) {
    place.axis = cut.by_workers.Divide(cta);
    place.worker = cta;
  }
  return place;
}

// The tiles of 32 requests, one a lane.
template <class Index>
struct TileCounts {
  Index total = 0;
  Index own = 0;  // of this lane's request
  Index end = 0;  // of this lane's request and those before it
};

template <class Index>
__device__ __forceinline__ TileCounts<Index> CountTiles(Index live_tokens, int32_t tile_tokens) {
  TileCounts<Index> counts;
  counts.own = NumTiles(live_tokens, tile_tokens);
  counts.end = WarpInclusiveScan(counts.own);
  counts.total = __shfl_sync(kFullWarp, counts.end, kWarpSize - 1);
  return counts;
}

// A warp's plan of a batch of up to 64 requests, which it holds alone, in one window of rows or two.
template <class Index>
class WarpPlanner {
 public:
  static constexpr int32_t kMaxBatch = 2 * kWarpSize;

  // `first` holds the rows from the first request on, and takes those of the request that Find() finds.
  __device__ __forceinline__ WarpPlanner(const PageTableView& table, RowWindow<Index>* first)
      : table_(table), first_(first) {}

  // Returns whether any request is empty.
  __device__ __forceinline__ bool Read(int32_t window_left) {
    const int32_t lane = threadIdx.x % kWarpSize;
    if (HasTwo()) second_.Load(table_, kWarpSize);
    live_[0] = first_->OwnLiveTokens(window_left);
    bool is_empty = lane < table_.batch && live_[0] == 0;
    if (HasTwo()) {
      live_[1] = second_.OwnLiveTokens(window_left);
      is_empty |= kWarpSize + lane < table_.batch && live_[1] == 0;
    }
    return __any_sync(kFullWarp, is_empty);
  }

  __device__ __forceinline__ Index SmallTiles(int32_t tile_tokens) const {
    return WarpSum(NumTiles(live_[0], tile_tokens) + NumTiles(live_[1], tile_tokens));
  }

  // Returns the tiles of all requests.
  __device__ __forceinline__ Index Count(int32_t tile_tokens) {
    counts_[0] = CountTiles(live_[0], tile_tokens);
    if (HasTwo()) counts_[1] = CountTiles(live_[1], tile_tokens);
    return counts_[0].total + counts_[1].total;
  }

  // The request that holds tile `wanted` of a head group, and its first tile.
  __device__ __forceinline__ BasicWorkerStart<Index> Find(Index wanted) {
    const bool in_second = wanted >= counts_[0].total;
    const Index before = in_second ? counts_[0].total : 0;
    const Index own = in_second ? counts_[1].own : counts_[0].own;
    const Index end = in_second ? counts_[1].end : counts_[0].end;
    first_->TakeIf(in_second, second_);
    const auto ends_after = __ballot_sync(kFullWarp, before + end > wanted);
    const int32_t lane = __ffs(static_cast<int32_t>(ends_after)) - 1;
    const Index begin = __shfl_sync(kFullWarp, end - own, lane);
    return {(in_second ? kWarpSize : 0) + lane, before + begin};
  }

 private:
  __device__ __forceinline__ bool HasTwo() const { return !PGQA_LIKELY(table_.batch <= kWarpSize); }

  const PageTableView& table_;
  RowWindow<Index>* first_;
  RowWindow<Index> second_;
  Index live_[2] = {0, 0};
  TileCounts<Index> counts_[2];
};

// Plans the calling CTA's worker; every thread gets the same plan. `rows` holds the first rows of the table, and
// afterwards the row of the worker's first request. Up to 64 requests each warp plans alone, without a barrier;
// beyond, the CTA plans together in `scratch`, of PlanScratchBytes(), and ends with a barrier.
template <class Index>
__device__ __forceinline__ WorkerPlan<Index> PlanWorker(const PartitionConfig& config,
                                                        const AxisCuts& cuts,
                                                        const PageTableView& table,
                                                        int32_t window_left, void* scratch,
                                                        RowWindow<Index>* rows) {
  const bool alone = PGQA_LIKELY(table.batch <= WarpPlanner<Index>::kMaxBatch);
  WarpPlanner<Index> warp(table, rows);
  CtaPlanner<Index> cta(table, scratch);
  WorkerPlan<Index> plan;
  // One head a worker is assumed until the tiles are known, so that this is done while the rows arrive.
  int32_t tile_tokens = TileTokens(config, 1);
  Placement place = PlaceOf(cuts.of_log2_heads[0]);
  Index tiles;
  Index small_tiles;
  if (alone) {
    plan.has_empty_requests = warp.Read(window_left);
    small_tiles = warp.SmallTiles(TileTokens(config, config.max_heads_per_worker));
    tiles = warp.Count(tile_tokens);
  } else {
    plan.has_empty_requests = cta.Read(config, window_left);
    small_tiles = cta.SmallTiles();
    tiles = cta.Tiles();
  }
  const int32_t heads = cuts.HeadsPerWorker(config, tiles, small_tiles);
  const AxisCut& cut = cuts.of_log2_heads[Log2(heads)];
  if (heads != 1) {
    tile_tokens = TileTokens(config, heads);
    place = PlaceOf(cut);
    if (alone) tiles = warp.Count(tile_tokens);
  }
  if (!alone) tiles = cta.Count(tile_tokens);
  plan.partition = MakePartition(config, cut, heads, tiles);
  plan.axis = place.axis;
  plan.worker = place.worker;
  if (place.worker_in_axis < cut.workers_per_axis) {
    plan.share = plan.partition.ShareOf(place.worker_in_axis);
  }
  if (plan.share.begin != plan.share.end) {
    const Index group_unit = plan.partition.GroupOf(plan.share) * tiles;
    const Index wanted = plan.share.begin - group_unit;
    plan.start = alone ? warp.Find(wanted) : cta.Find(wanted, tile_tokens);
    plan.start.request_unit += group_unit;
    if (!alone) rows->Load(table, plan.start.request);
  }
  if (!alone) __syncthreads();
  return plan;
}

}  // namespace pgqa
