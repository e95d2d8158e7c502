// What the partition knows before any length: the heads a worker may take, and how workers are dealt to head groups.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/divisor.h"
#include "pgqa/host_device.h"

namespace pgqa {

constexpr int32_t kMaxLog2Heads = 3;  // of the heads a worker

// What the partition needs to know of a launch plan. No lengths.
struct PartitionConfig {
  int32_t num_workers = 1;           // CTAs of the grid, or threads
  int32_t warps_per_worker = 1;      // a power of two; warps split heads first, then tokens
  int32_t stage_tokens = 16;         // tokens that one warp takes in one step; a power of two
  int32_t num_heads = 1;             // KV heads times row blocks
  int32_t max_heads_per_worker = 1;  // a power of two, divides num_heads, <= warps_per_worker and 8
  int32_t min_tiles_per_worker = 1;  // fewer tiles than this a worker leave workers idle
  int32_t double_heads_from = 1;  // tokens * heads a worker, in whole tiles, from which it takes 2
  int32_t max_heads_by_work = 8;  // for much work; more only for short requests
  int32_t min_fill_eighths =
      0;  // requests are short that fill less of their one-head tiles, 0 to 8
};

// log2 of a power of two.
PGQA_HOST_DEVICE int32_t Log2(int32_t power) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(power);
#else
  return 31 - __builtin_clz(static_cast<uint32_t>(power));
#endif
}

PGQA_HOST_DEVICE int32_t TileTokens(const PartitionConfig& config, int32_t heads_per_worker) {
  return config.stage_tokens * (config.warps_per_worker >> Log2(heads_per_worker));
}

// Tiles of one request in one head group; 0 for an empty request. tile_tokens is a power of two.
template <class Index>
PGQA_HOST_DEVICE Index NumTiles(Index live_tokens, int32_t tile_tokens) {
  return (live_tokens + tile_tokens - 1) >> Log2(tile_tokens);
}

// How the workers of the grid are dealt to head groups, for one number of heads a worker. No lengths.
struct AxisCut {
  int32_t groups_per_axis = 1;
  int32_t workers_per_axis = 1;
  int32_t num_axes = 1;  // workers past the last one own nothing
  Divisor by_workers;    // divides by workers_per_axis
  Divisor by_axes;       // divides by num_axes
};

// One axis a head group where that keeps nine tenths of the workers busy, so that workers of different head
// groups read the same tokens at the same time; else one axis for all.
inline AxisCut CutAxes(const PartitionConfig& config, int32_t heads_per_worker) {
  const int32_t groups = config.num_heads / heads_per_worker;
  const int32_t workers_per_group = config.num_workers / groups;
  const bool axis_per_group =
      int64_t{workers_per_group} * groups * 10 >= int64_t{config.num_workers} * 9;
  AxisCut cut;
  cut.groups_per_axis = axis_per_group ? 1 : groups;
  cut.workers_per_axis = axis_per_group ? workers_per_group : config.num_workers;
  cut.num_axes = axis_per_group ? groups : 1;
  cut.by_workers = Divisor(cut.workers_per_axis);
  cut.by_axes = Divisor(cut.num_axes);
  return cut;
}

// What the device needs to choose the heads a worker and to cut the batch for them.
struct AxisCuts {
  AxisCut of_log2_heads[kMaxLog2Heads + 1];
  int32_t doubling_tiles = 1;  // tiles of one head from which two heads are taken

  // Heads a worker for a batch of `tiles` tiles of one head, `small_tiles` of max_heads_per_worker heads. Doubled each
  // time the work of a worker doubles past double_heads_from: few tokens want more workers, many want longer contiguous
  // reads. Doubled further, while workers have more than one tile, where requests are so short that they leave tiles of
  // one head half empty: then ending a piece costs more than its tokens, and more heads make fewer pieces.
  template <class Index>
  PGQA_HOST_DEVICE int32_t HeadsPerWorker(const PartitionConfig& config, Index tiles,
                                          Index small_tiles) const {
    const int32_t most = config.max_heads_per_worker;
    const int32_t most_by_work = config.max_heads_by_work < most ? config.max_heads_by_work : most;
    int32_t heads = 1;
    while (heads < most_by_work && tiles >= doubling_tiles * heads) heads *= 2;
    const bool are_short =
        int64_t{small_tiles} * 8 < int64_t{tiles} * most * config.min_fill_eighths;
    while (are_short && heads < most &&
           int64_t{tiles} * (config.num_heads >> Log2(heads)) > config.num_workers) {
      heads *= 2;
    }
    return heads;
  }
};

inline AxisCuts CutAxes(const PartitionConfig& config) {
  AxisCuts cuts;
  for (int32_t log2 = 0; 1 << log2 <= config.max_heads_per_worker; ++log2) {
    cuts.of_log2_heads[log2] = CutAxes(config, 1 << log2);
  }
  const int64_t tile_work = int64_t{TileTokens(config, 1)} * config.num_heads;
  const int64_t tiles =
      (int64_t{config.double_heads_from} * config.num_workers + tile_work - 1) / tile_work;
  constexpr int64_t kMostTiles = int64_t{1} << (30 - kMaxLog2Heads);
  cuts.doubling_tiles = static_cast<int32_t>(tiles < kMostTiles ? tiles : kMostTiles);
  return cuts;
}

}  // namespace pgqa
