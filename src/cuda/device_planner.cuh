// Plans a worker on the device: from the page table to the partition and the worker's first request.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/partition.h"

namespace pgqa {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffU;

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

// A warp's copy of 32 neighbouring rows of the page table, one a lane, so that a walk over requests does not wait
// for memory at each.
template <class Index>
class RowWindow {
 public:
  // Loads the rows from `first` on; those past the batch are empty. Without branches, so that loads of several
  // windows are in flight together.
  __device__ __forceinline__ void Load(const PageTableView& table, int32_t first) {
    const int32_t lane = threadIdx.x % kWarpSize;
    const int32_t request = first + lane;
    first_ = first;
    const int32_t row = min(request, table.batch - 1);
    const int32_t begin = table.indptr[row];
    const Index length =
        table.KvLength<Index>(begin, table.indptr[row + 1], table.last_page_len[row]);
    kv_len_ = request < table.batch ? length : 0;
    row_begin_ = begin < 0 ? 0 : begin;
  }

  // Live tokens of this lane's request.
  __device__ __forceinline__ Index OwnLiveTokens(int32_t window_left) const {
    return PageTableView::ClipToWindow(kv_len_, window_left).size();
  }

  // Of any request of the batch, the same one in all lanes; loads its rows where it does not hold them.
  __device__ __forceinline__ BasicTokenRange<Index> LiveTokens(const PageTableView& table,
                                                               int32_t window_left,
                                                               int32_t request) {
    if (!PGQA_LIKELY(request >= first_ && request < first_ + kWarpSize)) Load(table, request);
    return PageTableView::ClipToWindow(__shfl_sync(kFullWarp, kv_len_, request - first_),
                                       window_left);
  }

  // First entry of a row that it holds.
  __device__ __forceinline__ int32_t RowBegin(int32_t request) const {
    return __shfl_sync(kFullWarp, row_begin_, request - first_);
  }

 private:
  int32_t first_ = 0;
  int32_t row_begin_ = 0;
  Index kv_len_ = 0;
};

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

// The lane whose half-open run [end - size, end) holds `wanted`; ends ascend over the lanes.
template <class Index>
__device__ __forceinline__ int32_t LaneOf(Index end, Index wanted) {
  return __ffs(static_cast<int32_t>(__ballot_sync(kFullWarp, end > wanted))) - 1;
}

// Tiles of each run of 32 requests, into run_tiles[run]. Returns whether any request is empty. Between barriers.
template <class Index>
__device__ __forceinline__ bool SumRuns(const PageTableView& table, int32_t window_left,
                                        int32_t tile_tokens, int32_t num_runs, Index* run_tiles) {
  const int32_t lane = threadIdx.x % kWarpSize;
  const int32_t num_warps = blockDim.x / kWarpSize;
  constexpr int32_t kRunsInFlight = 8;
  bool has_empty = false;
  __syncthreads();
#pragma unroll 1
  for (int32_t first = threadIdx.x / kWarpSize; first < num_runs;
       first += kRunsInFlight * num_warps) {
    RowWindow<Index> rows[kRunsInFlight];
#pragma unroll
    for (int32_t i = 0; i < kRunsInFlight; ++i) {
      rows[i].Load(table, (first + i * num_warps) * kWarpSize);
    }
#pragma unroll
    for (int32_t i = 0; i < kRunsInFlight; ++i) {
      const int32_t run = first + i * num_warps;
      const Index live = rows[i].OwnLiveTokens(window_left);
      has_empty |= live == 0 && run * kWarpSize + lane < table.batch;
      const Index tiles = WarpSum(NumTiles(live, tile_tokens));
      if (lane == 0 && run < num_runs) run_tiles[run] = tiles;
    }
  }
  return __syncthreads_or(has_empty) != 0;
}

template <class Index>
__device__ __forceinline__ Index Total(const Index* run_tiles, int32_t num_runs) {
  Index sum = 0;
#pragma unroll 4
  for (int32_t run = threadIdx.x % kWarpSize; run < num_runs; run += kWarpSize) {
    sum += run_tiles[run];
  }
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

// Tiles of a batch for one number of heads a worker.
template <class Index>
struct TileCounts {
  Index total = 0;
  Index own = 0;  // of this lane's request, where one warp holds the batch
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

// Plans the calling CTA's worker; every thread gets the same plan. `rows` holds the first rows of the table, and
// afterwards the row of the worker's first request. Up to 32 requests each warp plans alone, with one load a lane and no barrier; beyond, the CTA sums runs
// of 32 requests in `scratch` (one int64 a run) and ends with a barrier.
template <class Index>
__device__ __forceinline__ WorkerPlan<Index> PlanWorker(const PartitionConfig& config,
                                                        const AxisCuts& cuts,
                                                        const PageTableView& table,
                                                        int32_t window_left, int64_t* scratch,
                                                        RowWindow<Index>* rows) {
  const int32_t num_runs = (table.batch + kWarpSize - 1) / kWarpSize;
  const bool alone = PGQA_LIKELY(num_runs == 1);
  Index* run_tiles = reinterpret_cast<Index*>(scratch);
  WorkerPlan<Index> plan;
  // One head a worker is assumed until the tiles are known, so that this is done while the rows arrive.
  int32_t heads = 1;
  int32_t tile_tokens = TileTokens(config, 1);
  Placement place = PlaceOf(cuts.of_log2_heads[0]);
  TileCounts<Index> counts;
  Index live = 0;
  if (alone) {
    live = rows->OwnLiveTokens(window_left);
    counts = CountTiles(live, tile_tokens);
    const int32_t lane = threadIdx.x % kWarpSize;
    plan.has_empty_requests = __any_sync(kFullWarp, lane < table.batch && live == 0);
  } else {
    plan.has_empty_requests = SumRuns(table, window_left, tile_tokens, num_runs, run_tiles);
    counts.total = Total(run_tiles, num_runs);
  }
  heads = cuts.HeadsPerWorker(config, counts.total);
  const AxisCut& cut = cuts.of_log2_heads[Log2(heads)];
  if (heads != 1) {
    tile_tokens = TileTokens(config, heads);
    place = PlaceOf(cut);
    if (alone) {
      counts = CountTiles(live, tile_tokens);
    } else {
      SumRuns(table, window_left, tile_tokens, num_runs, run_tiles);
      counts.total = Total(run_tiles, num_runs);
    }
  }
  plan.partition = MakePartition(config, cut, heads, counts.total);
  plan.axis = place.axis;
  plan.worker = place.worker;
  if (place.worker_in_axis < cut.workers_per_axis) {
    plan.share = plan.partition.ShareOf(place.worker_in_axis);
  }
  if (plan.share.begin != plan.share.end) {
    const Index group_unit = plan.partition.GroupOf(plan.share) * counts.total;
    const Index wanted = plan.share.begin - group_unit;
    Run<Index> run;
    if (!alone) {
      run = FindRun(run_tiles, num_runs, wanted);
      rows->Load(table, run.first_request);
      counts = CountTiles(rows->OwnLiveTokens(window_left), tile_tokens);
    }
    const int32_t lane = LaneOf(run.first_tile + counts.end, wanted);
    const Index before = __shfl_sync(kFullWarp, counts.end - counts.own, lane);
    plan.start = {run.first_request + lane, group_unit + run.first_tile + before};
  }
  if (!alone) __syncthreads();
  return plan;
}

}  // namespace pgqa
