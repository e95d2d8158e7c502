// What a warp sees of a page table: 32 rows at a time, and sums over its lanes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/page_table.h"

namespace pgqa {

constexpr int32_t kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffU;
constexpr int32_t kMaxWarps = 8;  // of a CTA

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
  // Instances of int32_t are for CSR tables alone: what a block table needs would cost them 0.3 us (H200).
  static __device__ __forceinline__ PageTableView Known(const PageTableView& table) {
    return sizeof(Index) == sizeof(int32_t) ? table.AsCsr() : table;
  }

  // Loads the rows from `first` on; those past the batch are empty. Without branches, so that loads of several
  // windows are in flight together.
  __device__ __forceinline__ void Load(const PageTableView& table, int32_t first) {
    const int32_t lane = threadIdx.x % kWarpSize;
    const int32_t request = first + lane;
    first_ = first;
    const int32_t row = min(request, table.batch - 1);
    const TableRow loaded = Known(table).ReadRow(row);
    const Index length = Known(table).template KvLength<Index>(loaded);
    kv_len_ = request < table.batch ? length : 0;
    row_begin_ = loaded.begin < 0 ? 0 : loaded.begin;
  }

  // Takes the rows of another window.
  __device__ __forceinline__ void TakeIf(bool condition, const RowWindow& other) {
    first_ = condition ? other.first_ : first_;
    row_begin_ = condition ? other.row_begin_ : row_begin_;
    kv_len_ = condition ? other.kv_len_ : kv_len_;
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
  __device__ __forceinline__ int64_t RowBegin(const PageTableView& table, int32_t request) const {
    if (!Known(table).IsCsr()) return request * table.row_stride;
    return __shfl_sync(kFullWarp, row_begin_, request - first_);
  }

 private:
  int32_t first_ = 0;
  int32_t row_begin_ = 0;  // of a CSR table
  Index kv_len_ = 0;
};

}  // namespace pgqa
