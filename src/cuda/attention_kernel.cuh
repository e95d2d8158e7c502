// The fused decode attention kernel: plan, stream K and V through per-warp rings, merge.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/accumulator.cuh"
#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/kernel_traits.cuh"
#include "cuda/merge.cuh"
#include "cuda/rope.cuh"
#include "cuda/scores.cuh"
#include "cuda/stage_loader.cuh"

namespace pgqa {

// Dynamic shared memory: [rings][scratch][frames][row rotations], the first three a warp each.
template <class Traits>
struct SharedLayout {
  static constexpr TileConfig kTile = Traits::kTile;
  char* base;
  int32_t num_warps;

  __device__ __forceinline__ char* Ring(int32_t warp) const {
    return base + warp * kTile.RingBytes();
  }
  __device__ __forceinline__ WarpScratch<Traits>* Scratch(int32_t warp) const {
    static_assert(sizeof(WarpScratch<Traits>) <= kTile.ScratchBytes());
    return reinterpret_cast<WarpScratch<Traits>*>(Ring(num_warps) + warp * kTile.ScratchBytes());
  }
  __device__ __forceinline__ char* Frame(int32_t warp) const {
    return reinterpret_cast<char*>(Scratch(0)) + num_warps * kTile.ScratchBytes() +
           warp * kTile.FrameBytes();
  }
  __device__ __forceinline__ char* RowRotations() const { return Frame(num_warps); }
};

__device__ __forceinline__ WarpRole RoleOf(int32_t warp, int32_t num_warps,
                                           int32_t heads_per_worker) {
  WarpRole role;
  role.team_size = num_warps >> Log2(heads_per_worker);
  role.team = warp >> Log2(role.team_size);
  role.rank = warp - role.team * role.team_size;
  return role;
}

// Empty requests own no tile; their outputs are written here, each by one CTA.
__device__ __forceinline__ void WriteEmptyRequests(const AttentionParams& params) {
  const int64_t row_elements = static_cast<int64_t>(params.num_query_heads) * params.head_dim;
  for (int32_t request = blockIdx.x; request < params.table.batch; request += gridDim.x) {
    if (params.table.KvLength(request) != 0) continue;
    uint4* out = reinterpret_cast<uint4*>(params.out + request * row_elements * 2);
    for (int32_t i = threadIdx.x; i < row_elements / 8; i += blockDim.x)
      out[i] = make_uint4(0, 0, 0, 0);
    if (params.lse == nullptr) continue;
    for (int32_t head = threadIdx.x; head < params.num_query_heads; head += blockDim.x) {
      params.lse[static_cast<int64_t>(request) * params.num_query_heads + head] = -INFINITY;
    }
  }
}

// A warp's computation: takes the stages that its loader brings, one by one, and ends each piece.
template <class Traits>
class PieceComputer {
 public:
  using Index = typename Traits::Index;

  __device__ __forceinline__ PieceComputer(const AttentionParams& params,
                                           const WorkerPlan<typename Traits::Index>& plan,
                                           const WarpRole& role, const SharedLayout<Traits>& layout)
      : params_(params), plan_(plan), role_(role), layout_(layout) {}

  // Starts the next piece if the last one has ended and there is one. Its queries are on their way while its
  // stage is waited for.
  __device__ __forceinline__ void BeginIfDue(StageLoader<Traits>& loader) {
    if (tiles_left_ != 0 || !loader.HasPiece()) return;
    piece_ = loader.PopPiece();
    tiles_left_ = piece_.num_tiles;
    const int32_t tile_tokens = plan_.partition.tile_tokens;
    tokens_left_ = piece_.live.size() - piece_.first_tile * tile_tokens - role_.rank * kStageTokens;
    const HeadRange heads = HeadsOf();
    queries_.Start(
        params_,
        params_.q + piece_.request * params_.q_batch_stride + heads.first * params_.q_head_stride,
        heads.count);
    accumulator_.Reset();
  }

  // Adds one stage; on the last of the piece, merges and writes.
  template <class Frame>
  __device__ __forceinline__ void Process(const char* stage, Frame& frame) {
    if (tokens_left_ > 0) {
      const int32_t num_rows = static_cast<int32_t>(min(tokens_left_, Index{kStageTokens}));
      StageScores scores = {};
      queries_.ComputeStage(params_, stage, tokens_left_ - 1, layout_.RowRotations(), frame,
                            scores);
      accumulator_.Add(params_, scores, stage + Traits::kTile.KeyBytes(), num_rows);
    }
    tokens_left_ -= plan_.partition.tile_tokens;
    if (--tiles_left_ == 0) {
      // The stage has been read: each warp of the team merges through it, at the same place of its ring.
      const int32_t first_warp = role_.team * role_.team_size;
      const int64_t place = stage - layout_.Ring(first_warp + role_.rank);
      FinishPiece<Traits>(params_, role_, Target(), accumulator_,
                          reinterpret_cast<float*>(layout_.Ring(first_warp) + place),
                          &layout_.Scratch(first_warp)->arrived_last);
    }
  }

 private:
  struct HeadRange {
    int32_t first;  // query head
    int32_t count;
  };

  __device__ __forceinline__ HeadRange HeadsOf() const {
    const int32_t block = piece_.head_group * plan_.partition.heads_per_worker + role_.team;
    const int32_t kv_head = KeyValueHead(params_, block);
    const int32_t first_row = (block - kv_head * params_.row_blocks) * Traits::kRowsPerBlock;
    return {kv_head * params_.group + first_row,
            min(params_.group - first_row, Traits::kRowsPerBlock)};
  }

  __device__ __forceinline__ TeamTarget Target() const {
    const HeadRange range = HeadsOf();
    TeamTarget target;
    target.request = piece_.request;
    target.first_head = range.first;
    target.num_rows = range.count;
    target.is_whole = piece_.IsWhole();
    if (target.is_whole) return target;
    const int32_t heads = plan_.partition.heads_per_worker;
    const PieceSlots slots = SlotsOf(plan_.partition, plan_.axis, piece_);
    const int64_t head_floats = int64_t{params_.partial_rows} * Traits::kTile.PartialFloats();
    target.num_pieces = slots.num_pieces;
    target.slot_floats = heads * head_floats;
    target.first_partials =
        params_.partials + slots.first_slot * target.slot_floats + role_.team * head_floats;
    const int32_t index = plan_.worker - slots.first_worker;
    target.own_partials = target.first_partials + index * target.slot_floats;
    target.counter = params_.counters + slots.first_worker * heads + role_.team;
    return target;
  }

  const AttentionParams& params_;
  const WorkerPlan<Index>& plan_;
  const WarpRole role_;
  const SharedLayout<Traits> layout_;
  BasicPiece<Index> piece_;
  StageQueries<Traits> queries_;
  Accumulator<Traits> accumulator_;
  Index tokens_left_ = 0;  // from this warp's first token of the stage to the end of the request
  Index tiles_left_ = 0;   // of the piece
};

struct NoFrame {};

// Streams the worker's share: the page ids of a stage are fetched, kFetchAhead steps later its copies are issued,
// num_stages steps later it is computed. One loop, so that the code of each phase exists once: in a short call
// cold instructions cost more than anything else.
template <class Traits, class MakeFrame>
__device__ __forceinline__ void StreamShare(const AttentionParams& params,
                                            const WorkerPlan<typename Traits::Index>& plan,
                                            StageLoader<Traits>& loader,
                                            PieceComputer<Traits>& computer, MakeFrame make_frame) {
  constexpr int32_t kFirstComputed = kFetchAhead + Traits::kTile.num_stages;
  const auto last_step = plan.share.end - plan.share.begin + kFirstComputed - 1;
  decltype(make_frame()) frame{};
#pragma unroll 1
  for (typename Traits::Index step = 0; step <= last_step; ++step) {
    if (step > 0) computer.BeginIfDue(loader);
    if (step >= kFirstComputed) computer.Process(loader.Wait(), frame);
    if (step >= kFetchAhead) loader.Issue();
    loader.FetchPages();
    if (step == kFirstComputed - 1) {
      if (plan.has_empty_requests) WriteEmptyRequests(params);
      frame = make_frame();
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    AttentionKernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) char shared[];
  constexpr TileConfig kTile = Traits::kTile;
  const int32_t warp = threadIdx.x / kWarpSize;
  const SharedLayout<Traits> layout{shared, static_cast<int32_t>(blockDim.x) / kWarpSize};

  ptx::WaitForPrecedingGrid();
  const auto plan = PlanWorker<typename Traits::Index>(
      params.partition, params.table, params.window_left, reinterpret_cast<int64_t*>(shared));
  const WarpRole role = RoleOf(warp, layout.num_warps, plan.partition.heads_per_worker);
  StageLoader<Traits> loader(params, plan, role, layout.Ring(warp), layout.Scratch(warp));
  PieceComputer<Traits> computer(params, plan, role, layout);
  if constexpr (Traits::kRope) {
    StreamShare<Traits>(params, plan, loader, computer, [&] {
      const auto num_tiles = plan.share.end - plan.share.begin;
      const int32_t num_stages =
          num_tiles < kTile.frame_stages ? static_cast<int32_t>(num_tiles) : kTile.frame_stages;
      FillRowRotations<Traits>(params, plan.partition.tile_tokens, num_stages,
                               layout.RowRotations());
      const QueryFrame<Traits> frame(params, plan.partition.tile_tokens, layout.Frame(warp));
      __syncthreads();
      return frame;
    });
  } else {
    StreamShare<Traits>(params, plan, loader, computer, [] { return NoFrame{}; });
  }
}

}  // namespace pgqa
