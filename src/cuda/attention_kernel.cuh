// The fused decode attention kernel: plan, stream K and V through per-warp rings, merge.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/accumulator.cuh"
#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/empty_requests.cuh"
#include "cuda/kernel_traits.cuh"
#include "cuda/merge.cuh"
#include "cuda/rope.cuh"
#include "cuda/scores.cuh"
#include "cuda/share_walk.cuh"
#include "cuda/stage_loader.cuh"

namespace pgqa {

// Dynamic shared memory: [rings][scratch][frames][merge areas][row rotations], all but the last a warp each.
template <class Traits>
struct SharedLayout {
  static constexpr TileConfig kTile = Traits::kTile;
  static_assert(kTile.max_warps <= kMaxWarps);
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
  // `read_stage` is the stage that the warp has just read.
  __device__ __forceinline__ char* MergeAreaOf(int32_t warp, const char* read_stage,
                                               int32_t reader) const {
    if constexpr (kTile.merge_area == MergeArea::kStage) {
      return Ring(warp) + (read_stage - Ring(reader));
    } else if constexpr (kTile.merge_area == MergeArea::kTurnedQuery) {
      static_assert(kTile.MergeAreaBytes() <= kTile.FrameBytes());
      return Frame(warp);
    } else {
      return Frame(num_warps) + warp * kTile.MergeAreaBytes();
    }
  }
  __device__ __forceinline__ char* RowRotations() const {
    constexpr bool kOwn = kTile.merge_area == MergeArea::kOwn;
    return Frame(num_warps) + (kOwn ? num_warps * kTile.MergeAreaBytes() : 0);
  }
};

__device__ __forceinline__ WarpRole RoleOf(int32_t warp, int32_t num_warps,
                                           int32_t heads_per_worker) {
  WarpRole role;
  role.team_size = num_warps >> Log2(heads_per_worker);
  role.team = warp >> Log2(role.team_size);
  role.rank = warp - role.team * role.team_size;
  return role;
}

// A warp's computation: takes the stages that its loader brings, one by one, and ends each piece.
template <class Traits>
class PieceComputer {
 public:
  using Index = typename Traits::Index;

  __device__ __forceinline__ PieceComputer(const AttentionParams& params,
                                           const WorkerPlan<typename Traits::Index>& plan,
                                           const WarpRole& role, const SharedLayout<Traits>& layout)
      : params_(params), plan_(plan), role_(role), layout_(layout) {
    accumulator_.Reset();
  }

  // Starts the next piece if the last one has ended and there is one. Its queries are on their way while its
  // stage is waited for.
  __device__ __forceinline__ void BeginIfDue(StageLoader<Traits>& loader) {
    if (tiles_left_ != 0 || !loader.HasPiece()) return;
    piece_ = loader.PopPiece();
    tiles_left_ = piece_.num_tiles;
    knows_slots_ = false;
    const int32_t tile_tokens = plan_.partition.tile_tokens;
    tokens_left_ = piece_.live.size() - piece_.first_tile * tile_tokens - role_.rank * kStageTokens;
    const HeadRange heads = HeadsOf();
    queries_.Start(
        params_,
        params_.q + piece_.request * params_.q_batch_stride + heads.first * params_.q_head_stride,
        heads.count);
  }

  // Finds the slots of the piece's partials, which is slow, ahead of their use.
  __device__ __forceinline__ void FindSlots() {
    if (knows_slots_ || piece_.IsWhole()) return;
    const PieceSlots slots = PieceSlotsOf<Traits>(plan_, piece_);
    knows_slots_ = true;
    if (threadIdx.x % kWarpSize != 0) return;
    OwnScratch()->slots = slots;
    ptx::PrefetchToL2(CounterOf(slots));
  }

  // Does what the next stage needs of q, if there is one.
  __device__ __forceinline__ void TurnQueries(Frame<Traits>& frame) {
    if (tokens_left_ > 0) queries_.Turn(params_, tokens_left_ - 1, frame);
  }

  // Adds one stage.
  __device__ __forceinline__ void Process(const char* stage, const Frame<Traits>& frame) {
    if (tokens_left_ > 0) {
      const int32_t num_rows = static_cast<int32_t>(min(tokens_left_, Index{kStageTokens}));
      StageScores scores = {};
      queries_.ComputeStage(stage, frame, scores);
      accumulator_.Add(params_, scores, stage + Traits::kTile.KeyBytes(), num_rows);
    }
    tokens_left_ -= plan_.partition.tile_tokens;
    --tiles_left_;
  }

  // After the last stage of a piece, merges and writes. `stage` is the one that was added last.
  __device__ __forceinline__ void FinishIfDue(const char* stage) {
    if (tiles_left_ != 0) return;
    FindSlots();
    ptx::WaitForPrecedingGrid();  // it may be writing partials yet
    __syncwarp();                 // the merge area is free, and the slots are known
    const int32_t first_warp = role_.team * role_.team_size;
    FinishPiece<Traits>(params_, role_, Target(), accumulator_,
                        reinterpret_cast<float*>(layout_.MergeAreaOf(first_warp, stage, Warp())));
    accumulator_.Reset();
  }

 private:
  __device__ __forceinline__ int32_t Warp() const {
    return role_.team * role_.team_size + role_.rank;
  }
  __device__ __forceinline__ WarpScratch<Traits>* OwnScratch() const {
    return layout_.Scratch(Warp());
  }

  // This warp's counter of a request's partials.
  __device__ __forceinline__ uint64_t* CounterOf(const PieceSlots& slots) const {
    return params_.counters + CounterBlock<Traits>(slots) * layout_.num_warps + Warp();
  }

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
    const PieceSlots slots = OwnScratch()->slots;
    const uint32_t head_floats = params_.partial_rows * Traits::kTile.PartialFloats();
    const uint32_t slot_floats = heads * head_floats;
    const uint32_t slot = slots.first_slot;
    const uint32_t index = PartialIndex<Traits>(plan_, piece_, slots);
    target.num_pieces = slots.num_pieces;
    target.slot_bytes = slot_floats * 4;
    target.first_partials =
        params_.partials + uint64_t{slot} * slot_floats + role_.team * head_floats;
    target.own_partials = target.first_partials + uint64_t{index} * slot_floats;
    target.counter = CounterOf(slots);
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
  bool knows_slots_ = false;
};

// Streams the worker's share: in step t a stage is computed, the copies of the stage num_stages later are issued and
// the page ids of the one 2 * num_stages later fetched; where a piece ends, its merge comes last, while the copies are
// under way. One loop, so that the code of each phase exists once: in a short call cold instructions cost more than
// anything else. What needs no keys is done while the first are on their way. q is asked for at the top of a step: a
// load that is in flight at the bottom would be waited for there. Nothing is written, and the kernel does not end, before
// the preceding grid has ended: a grid that did not wait could end before it, and the one behind would not know.
template <class Traits>
__device__ __forceinline__ void StreamShare(const AttentionParams& params,
                                            const WorkerPlan<typename Traits::Index>& plan,
                                            const SharedLayout<Traits>& layout,
                                            StageLoader<Traits>& loader,
                                            PieceComputer<Traits>& computer, Frame<Traits>& frame) {
  constexpr int32_t kFirstIssued = Traits::kTile.num_stages;
  constexpr int32_t kFirstComputed = 2 * kFirstIssued;
  static_assert(Traits::kTile.frame_stages <= kFirstComputed);  // what Prepare() may be told
  constexpr bool kMergesApart = Traits::kTile.merge_area != MergeArea::kStage;
  auto num_tiles = plan.share.end - plan.share.begin;
#pragma unroll 1
  for (typename Traits::Index step = 0; step < num_tiles + kFirstComputed; ++step) {
    if (step >= kFirstIssued) {
      computer.BeginIfDue(loader);
      if (step >= kFirstComputed) computer.TurnQueries(frame);
      loader.Wait();
      if (step >= kFirstComputed) computer.Process(loader.Stage(), frame);
      if (!kMergesApart && step >= kFirstComputed) computer.FinishIfDue(loader.Stage());
      loader.Issue();
    }
    loader.Fetch();
    if constexpr (Traits::kBatchInvariant) num_tiles = loader.NumFetched();
    if (kMergesApart && step >= kFirstComputed) computer.FinishIfDue(nullptr);
    if (step == kFirstComputed - 1) {
      computer.FindSlots();
      ptx::AllowDependentGrid();
      if (!PGQA_LIKELY(!plan.has_empty_requests)) {
        ptx::WaitForPrecedingGrid();
        WriteEmptyRequests(params);
      }
      frame.Prepare(plan.partition.tile_tokens, num_tiles, layout.Frame(threadIdx.x / kWarpSize),
                    layout.RowRotations());
    }
  }
  ptx::WaitForPrecedingGrid();
}

// Brings page ids to the L2, so that they are there when the plan tells which are wanted: a warp 32 lines.
template <class Index>
__device__ __forceinline__ void PrefetchPageIds(const AttentionParams& params) {
  if (RowWindow<Index>::Known(params.table).IsCsr()) {
    constexpr int64_t kLineIds = kPrefetchedIds / kWarpSize;
    const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kLineIds;
    if (first < params.table.num_indices) ptx::PrefetchToL2(params.table.indices + first);
    return;
  }
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t in_warp = threadIdx.x % kWarpSize * (kPrefetchedIds / kWarpSize);
  const int64_t first = uint64_t{thread / kWarpSize} * params.prefetch_pitch + in_warp;
  if (first < params.prefetch_end) ptx::PrefetchToL2(params.table.indices + first);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    AttentionKernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ __align__(128) char shared[];
  const int32_t warp = threadIdx.x / kWarpSize;
  const SharedLayout<Traits> layout{shared, static_cast<int32_t>(blockDim.x) / kWarpSize};

  if (params.dependence <= Dependence::kAny) ptx::WaitForPrecedingGrid();
  PrefetchPageIds<typename Traits::Index>(params);
  // What needs no lengths is computed while the rows of the page table arrive.
  RowWindow<typename Traits::Index> rows;
  rows.Load(params.table, 0);
  Frame<Traits> frame(params);
  const auto plan = PlanShare<Traits>(params, shared, &rows);
  if (params.dependence == Dependence::kTensors) ptx::WaitForPrecedingGrid();
  const WarpRole role = RoleOf(warp, layout.num_warps, plan.partition.heads_per_worker);
  StageLoader<Traits> loader(params, plan, rows, role, layout.Ring(warp), layout.Scratch(warp));
  PieceComputer<Traits> computer(params, plan, role, layout);
  StreamShare(params, plan, layout, loader, computer, frame);
}

}  // namespace pgqa
