// Counts the pieces of a split request that have left their partials, in memory that nobody initialises.
// SPDX-License-Identifier: Apache-2.0
//
// A counter is a 44-bit tag over 20 bits that count. A launch leaves all its counters at (tag, 0). A word without the
// tag is memory that held something else: it stands for (tag, 0), and the first to arrive writes that. So a workspace
// may be any memory, and a graph's may be its allocator's, reused between replays: no memset, no owner that the graph
// must keep (one retained by the graph costs 1.2 us a launch, H200).
#pragma once

#include <cstdint>

#include "cuda/ptx.cuh"
#include "pgqa/host_device.h"

namespace pgqa {

constexpr int32_t kCountBits = 20;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
constexpr uint64_t kCounterTag = 0x9e4c61d7b35a2 * (kCountMask + 1);

__device__ __forceinline__ bool HasTag(uint64_t counter) {
  return (counter & ~kCountMask) == kCounterTag;
}

// Arrives at a counter that had no tag when last seen, with value `seen`. What was added to such a word is lost, so
// those who added will come here, too.
__device__ inline uint64_t ArriveUntagged(uint64_t* counter, uint64_t seen) {
  while (!HasTag(seen)) {
    const uint64_t found = ptx::CompareAndSwap(counter, seen, kCounterTag + 1);
    if (found == seen) return kCounterTag;
    seen = found;
  }
  return ptx::Add(counter, 1);
}

// Counts one arrival of num_pieces; true for the last, which resets the counter. Releases what the calling thread has
// seen, and acquires what the others released.
__device__ __forceinline__ bool Arrive(uint64_t* counter, uint32_t num_pieces) {
  uint64_t before = ptx::Add(counter, 1);
  if (!PGQA_LIKELY(HasTag(before))) before = ArriveUntagged(counter, before + 1);
  const bool is_last = (before & kCountMask) == num_pieces - 1;
  if (is_last) *counter = kCounterTag;
  return is_last;
}

}  // namespace pgqa
