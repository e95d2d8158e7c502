// What the batch-invariant kernels do otherwise: how a CTA plans, walks its share, and finds its slots.
// SPDX-License-Identifier: Apache-2.0
//
// Traits::kBatchInvariant decides at compile time, so that the other kernels carry nothing of it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/arrival.cuh"
#include "cuda/attention_params.h"
#include "cuda/device_planner.cuh"
#include "cuda/segment_planner.cuh"
#include "pgqa/segments.h"

namespace pgqa {

template <class Traits>
using ShareCursor =
    std::conditional_t<Traits::kBatchInvariant, BasicSegmentCursor<typename Traits::Index>,
                       BasicPieceCursor<typename Traits::Index>>;

// The tiles of a share whose units are tiles.
template <class Index>
class KnownTiles {
 public:
  __device__ __forceinline__ explicit KnownTiles(const WorkerPlan<Index>& plan)
      : unissued_(plan.share.end - plan.share.begin) {}

  __device__ __forceinline__ void CountFetched() {}

  __device__ __forceinline__ void CountIssued() { --unissued_; }
  __device__ __forceinline__ bool AllIssued() const { return unissued_ == 0; }

 private:
  Index unissued_;
};

// The tiles of a share whose units are segments: not known before the last is fetched. A step fetches one tile
// as long as there are any, so that those fetched are always ahead of those issued, and these of those computed.
template <class Index>
class FetchedTiles {
 public:
  __device__ __forceinline__ explicit FetchedTiles(const WorkerPlan<Index>&) {}

  __device__ __forceinline__ void CountFetched() { ++fetched_; }

  __device__ __forceinline__ void CountIssued() { ++issued_; }
  __device__ __forceinline__ bool AllIssued() const { return issued_ == fetched_; }
  __device__ __forceinline__ Index NumFetched() const { return fetched_; }

 private:
  Index fetched_ = 0;
  Index issued_ = 0;
};

template <class Traits>
using ShareTiles = std::conditional_t<Traits::kBatchInvariant, FetchedTiles<typename Traits::Index>,
                                      KnownTiles<typename Traits::Index>>;

// The plan of the CTA's worker, made here, as by PlanWorker(), or once for the layers of a step.
template <class Traits>
__device__ __forceinline__ WorkerPlan<typename Traits::Index> PlanShare(
    const AttentionParams& params, void* scratch, RowWindow<typename Traits::Index>* rows) {
  if constexpr (Traits::kBatchInvariant) {
    return PlanSegments(params.partition, params.axis_cuts, params.segment_tokens, params.table,
                        params.window_left, scratch, rows);
  } else {
    if (PGQA_LIKELY(params.step_plan == nullptr)) {
      return PlanWorker(params.partition, params.axis_cuts, params.table, params.window_left,
                        scratch, rows);
    }
    const auto plan = *StepRecord<typename Traits::Index>(params.step_plan);
    rows->Load(params.table, plan.start.request);
    return plan;
  }
}

// Where the partials of a request lie that a piece does not hold whole.
template <class Traits, class Index>
__device__ __forceinline__ PieceSlots PieceSlotsOf(const WorkerPlan<Index>& plan,
                                                   const BasicPiece<Index>& piece) {
  if constexpr (Traits::kBatchInvariant) {
    return SegmentSlotsOf(plan.partition, plan.axis, piece);
  } else {
    return SlotsOf(plan.partition, plan.axis, piece);
  }
}

// Of the piece's partial among those of the request.
template <class Traits, class Index>
__device__ __forceinline__ uint32_t PartialIndex(const WorkerPlan<Index>& plan,
                                                 const BasicPiece<Index>& piece,
                                                 const PieceSlots& slots) {
  if constexpr (Traits::kBatchInvariant) {
    return static_cast<uint32_t>(SegmentOf(plan.partition, piece));
  } else {
    return plan.worker - slots.first_worker;
  }
}

// The request's block of merge counters, one a warp.
template <class Traits>
__device__ __forceinline__ auto CounterBlock(const PieceSlots& slots) {
  static_assert(kMostSegments <= static_cast<int64_t>(kCountMask));
  if constexpr (Traits::kBatchInvariant) {
    return int64_t{slots.first_slot};
  } else {
    return slots.first_worker;
  }
}

}  // namespace pgqa
