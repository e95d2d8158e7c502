// Plans a worker on the device: from the page table to the partition and the worker's first request.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/partition.h"

namespace pgqa {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffU;

// Index counts tokens and tiles: int32_t where FitsInt32(), else int64_t.
template <class Index>
struct WorkerPlan {
  BasicPartition<Index> partition;
  BasicShare<Index> share;
  BasicWorkerStart<Index> start;
  int32_t axis = 0;
  int32_t worker =
      0;  // its number as the host counts them: the workers of axis 0, then those of axis 1, ...
  bool has_empty_requests = true;  // false only where known
};

__device__ __forceinline__ int32_t WarpSum(int32_t value) {
  return __reduce_add_sync(kFullWarp, value);
}

// Exact for values in [0, 2^48).
__device__ __forceinline__ int64_t WarpSum(int64_t value) {
  const uint32_t low = __reduce_add_sync(kFullWarp, static_cast<uint32_t>(value) & 0xffffffU);
  const uint32_t high = __reduce_add_sync(kFullWarp, static_cast<uint32_t>(value >> 24));
  return (static_cast<int64_t>(high) << 24) + low;
}

template <class Index>
__device__ __forceinline__ Index WarpInclusiveScan(Index value) {
  const int32_t lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int32_t offset = 1; offset < kWarpSize; offset *= 2) {
    const Index below = __shfl_up_sync(kFullWarp, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

// Live tokens of a request, 0 past the batch.
template <class Index>
__device__ __forceinline__ Index LiveTokensOrZero(const PageTableView& table, int32_t window_left,
                                                  int32_t request) {
  return request < table.batch ? table.LiveTokens<Index>(request, window_left).size() : 0;
}

// Cuts the batch and fills everything of the plan but the start. Returns the tile, counted within its head
// group, at which the worker's share begins. Neighbouring CTAs, which start together, take different axes: then
// they read the same tokens, whose heads lie side by side in memory, at the same time.
template <class Index>
__device__ __forceinline__ Index CutShare(const PartitionConfig& config, int32_t heads, Index tiles,
                                          WorkerPlan<Index>* plan) {
  plan->partition = MakePartition(config, heads, tiles);
  const int32_t per_axis = plan->partition.workers_per_axis;
  const int32_t num_axes = NumAxes(config, plan->partition);
  const int32_t cta = static_cast<int32_t>(blockIdx.x);
  const int32_t worker_in_axis = FloorDiv(cta, num_axes);
  plan->share = {0, 0};
  if (worker_in_axis >= per_axis) {  // left over
    plan->axis = FloorDiv(cta, per_axis);
    plan->worker = cta;
    return 0;
  }
  plan->axis = cta - worker_in_axis * num_axes;
  plan->worker = plan->axis * per_axis + worker_in_axis;
  if (tiles == 0) return 0;
  plan->share = plan->partition.ShareOf(worker_in_axis);
  return plan->share.begin - plan->partition.GroupOf(plan->share) * tiles;
}

// The lane whose half-open run [end - size, end) holds `wanted`; ends ascend over the lanes.
template <class Index>
__device__ __forceinline__ int32_t LaneOf(Index end, Index wanted) {
  return __ffs(static_cast<int32_t>(__ballot_sync(kFullWarp, end > wanted))) - 1;
}

// Sums of `per_request(live tokens)` over each run of 32 requests, into sums[run]. Ends with a barrier.
template <class Index, class Sum, class PerRequest>
__device__ __forceinline__ void SumRuns(const PageTableView& table, int32_t window_left,
                                        int32_t num_runs, Sum* sums, PerRequest per_request) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t num_warps = blockDim.x / kWarpSize;
#pragma unroll 2
  for (int32_t run = threadIdx.x / kWarpSize; run < num_runs; run += num_warps) {
    const Index live = LiveTokensOrZero<Index>(table, window_left, run * kWarpSize + lane);
    const Sum sum = WarpSum(static_cast<Sum>(per_request(live)));
    if (lane == 0) sums[run] = sum;
  }
  __syncthreads();
}

template <class Index>
__device__ __forceinline__ Index Total(const Index* sums, int32_t num_runs) {
  Index sum = 0;
#pragma unroll 1
  for (int32_t run = threadIdx.x % kWarpSize; run < num_runs; run += kWarpSize) sum += sums[run];
  return WarpSum(sum);
}

// A run of 32 requests and the tiles before it.
template <class Index>
struct Run {
  int32_t first_request = 0;
  Index first_tile = 0;
};

// The run that holds tile `wanted`.
template <class Index>
__device__ __forceinline__ Run<Index> FindRun(const Index* run_tiles, int32_t num_runs,
                                              Index wanted) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const auto load = [&](int32_t run) { return run < num_runs ? run_tiles[run] : Index{0}; };
  Index before = 0;
  int32_t first_run = 0;
  Index tiles = load(lane);
#pragma unroll 1
  for (Index sum = WarpSum(tiles); before + sum <= wanted; sum = WarpSum(tiles)) {
    before += sum;
    first_run += kWarpSize;
    tiles = load(first_run + lane);
  }
  const Index end = before + WarpInclusiveScan(tiles);
  const int32_t run_lane = LaneOf(end, wanted);
  return {(first_run + run_lane) * kWarpSize, __shfl_sync(kFullWarp, end - tiles, run_lane)};
}

// Plans the calling CTA's worker; every thread gets the same plan. Up to 32 requests each warp plans alone, with
// one load a lane and no barrier; beyond, the CTA sums runs of 32 requests in `scratch` (two int64 a run) and
// ends with a barrier.
template <class Index>
__device__ __forceinline__ WorkerPlan<Index> PlanWorker(const PartitionConfig& config,
                                                        const PageTableView& table,
                                                        int32_t window_left, int64_t* scratch) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t num_runs = (table.batch + kWarpSize - 1) / kWarpSize;
  const bool alone = num_runs == 1;
  WorkerPlan<Index> plan;
  Index live = 0;
  if (alone) {
    live = LiveTokensOrZero<Index>(table, window_left, lane);
    plan.has_empty_requests = __any_sync(kFullWarp, lane < table.batch && live == 0);
  } else {
    SumRuns<Index>(table, window_left, num_runs, scratch, [](Index tokens) { return tokens; });
  }
  const int32_t heads = HeadsPerWorker(
      config, alone ? WarpSum(static_cast<int64_t>(live)) : Total(scratch, num_runs));
  const int32_t tile_tokens = TileTokens(config, heads);
  Index* run_tiles = reinterpret_cast<Index*>(scratch + num_runs);
  if (!alone) {
    SumRuns<Index>(table, window_left, num_runs, run_tiles,
                   [&](Index tokens) { return NumTiles(tokens, tile_tokens); });
  }
  const Index tiles = alone ? WarpSum(NumTiles(live, tile_tokens)) : Total(run_tiles, num_runs);
  const Index wanted = CutShare(config, heads, tiles, &plan);
  if (plan.share.begin != plan.share.end) {
    Run<Index> run;
    if (!alone) {
      run = FindRun(run_tiles, num_runs, wanted);
      live = LiveTokensOrZero<Index>(table, window_left, run.first_request + lane);
    }
    const Index request_tiles = NumTiles(live, tile_tokens);
    const Index end = run.first_tile + WarpInclusiveScan(request_tiles);
    const int32_t request_lane = LaneOf(end, wanted);
    const Index first_tile = __shfl_sync(kFullWarp, end - request_tiles, request_lane);
    plan.start = {run.first_request + request_lane, plan.share.begin - wanted + first_tile};
  }
  if (!alone) __syncthreads();
  return plan;
}

}  // namespace pgqa
