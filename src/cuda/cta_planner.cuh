// Plans batches that no warp holds alone: the threads of a CTA share the requests out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/row_window.cuh"
#include "pgqa/partition.h"

namespace pgqa {

// A CTA's plan of a batch that no warp holds alone, in shared memory. Thread t owns the requests
// [t * num_owned, + num_owned).
template <class Index>
class CtaPlanner {
 public:
  // `scratch` holds PlanScratchBytes(batch).
  __device__ __forceinline__ CtaPlanner(const PageTableView& table, void* scratch)
      : table_(table),
        live_(static_cast<Index*>(scratch)),
        warp_sums_(live_ + Place(table.batch)),
        found_(warp_sums_ + 2 * kMaxWarps),
        num_owned_(FloorDiv(table.batch + static_cast<int32_t>(blockDim.x) - 1,
                            static_cast<int32_t>(blockDim.x))) {}

  // Reads the table: all rows of a round are loaded before any is used. Returns whether any request is empty. Ends
  // with a barrier.
  __device__ __forceinline__ bool Read(const PartitionConfig& config, int32_t window_left) {
    constexpr int32_t kRowsInFlight = 16;
    Sums sums;
    if (num_owned_ == 1) {
      ReadRows<1>(config, window_left, threadIdx.x, &sums);
    } else {
      for (int32_t first = threadIdx.x; first < table_.batch; first += kRowsInFlight * blockDim.x) {
        ReadRows<kRowsInFlight>(config, window_left, first, &sums);
      }
    }
    const Index tiles = WarpSum(sums.tiles);
    const Index small_tiles = WarpSum(sums.small_tiles);
    if (Lane() == 0) {
      warp_sums_[Warp()] = tiles;
      warp_sums_[kMaxWarps + Warp()] = small_tiles;
    }
    return __syncthreads_or(sums.has_empty) != 0;
  }

  // Tiles of one head, and of max_heads_per_worker heads.
  __device__ __forceinline__ Index Tiles() const { return SumOfWarps(warp_sums_, NumWarps()); }
  __device__ __forceinline__ Index SmallTiles() const {
    return SumOfWarps(warp_sums_ + kMaxWarps, NumWarps());
  }

  // Counts the tiles of the requests that threads own. Returns the sum of all. With barriers.
  __device__ __forceinline__ Index Count(int32_t tile_tokens) {
    own_ = 0;
#pragma unroll 4
    for (int32_t i = 0; i < num_owned_; ++i) own_ += OwnedTiles(i, tile_tokens);
    end_ = WarpInclusiveScan(own_);
    __syncthreads();  // the sums have been read
    if (Lane() == kWarpSize - 1) warp_sums_[Warp()] = end_;
    __syncthreads();
    end_ += SumOfWarps(warp_sums_, Warp());
    return SumOfWarps(warp_sums_, NumWarps());
  }

  // The request that holds tile `wanted` of a head group, and its first tile. With barriers.
  __device__ __forceinline__ BasicWorkerStart<Index> Find(Index wanted, int32_t tile_tokens) {
    if (wanted < end_ && wanted >= end_ - own_) {
      Index tile = end_ - own_;
      int32_t i = 0;
      for (Index tiles; tile + (tiles = OwnedTiles(i, tile_tokens)) <= wanted; ++i) tile += tiles;
      found_[0] = static_cast<Index>(threadIdx.x) * num_owned_ + i;
      found_[1] = tile;
    }
    __syncthreads();
    return {static_cast<int32_t>(found_[0]), found_[1]};
  }

 private:
  struct Sums {
    Index tiles = 0;
    Index small_tiles = 0;
    bool has_empty = false;
  };

  static __device__ __forceinline__ int32_t Lane() { return threadIdx.x % kWarpSize; }
  static __device__ __forceinline__ int32_t Warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int32_t NumWarps() { return blockDim.x / kWarpSize; }

  // Where a request's live tokens lie: with gaps, so that threads that walk over neighbouring runs of 16 do not
  // meet in one bank.
  static __device__ __forceinline__ int32_t Place(int32_t request) {
    return request + request / 16;
  }

  // Sum of the first `count` words of `sums`, at most 32.
  static __device__ __forceinline__ Index SumOfWarps(const Index* sums, int32_t count) {
    return WarpSum(Lane() < count ? sums[Lane()] : Index{0});
  }

  // Requests `first` and every blockDim.x further.
  template <int kRows>
  __device__ __forceinline__ void ReadRows(const PartitionConfig& config, int32_t window_left,
                                           int32_t first, Sums* sums) {
    RowWindow<Index> rows[kRows];
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) rows[i].Load(table_, first - Lane() + i * blockDim.x);
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const int32_t request = first + i * blockDim.x;
      const Index live = rows[i].OwnLiveTokens(window_left);
      if (request < table_.batch) {
        live_[Place(request)] = live;
        sums->has_empty |= live == 0;
      }
      sums->tiles += NumTiles(live, TileTokens(config, 1));
      sums->small_tiles += NumTiles(live, TileTokens(config, config.max_heads_per_worker));
    }
  }

  __device__ __forceinline__ Index OwnedTiles(int32_t i, int32_t tile_tokens) const {
    const int32_t request = threadIdx.x * num_owned_ + i;
    return request < table_.batch ? NumTiles(live_[Place(request)], tile_tokens) : 0;
  }

  const PageTableView& table_;
  Index* live_;       // live tokens of each request, at Place()
  Index* warp_sums_;  // [2, kMaxWarps]
  Index* found_;      // [2]
  int32_t num_owned_;
  Index own_ = 0;  // tiles of the owned requests
  Index end_ = 0;  // and of those before them
};

}  // namespace pgqa
