// Divisions for the device: by a run-time number, and by one that the host knows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/host_device.h"

namespace pgqa {

PGQA_HOST_DEVICE int32_t FloorDiv(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// floor(a / b) for a >= 0, b > 0. 32-bit division where it holds both; else bit by bit on the device, where
// a 64-bit division would be a call, long and hardly ever needed.
PGQA_HOST_DEVICE int64_t FloorDiv(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
#ifdef __CUDA_ARCH__
  int64_t quotient = 0;
  uint64_t rest = 0;
#pragma unroll 1
  for (int32_t bit = 62; bit >= 0; --bit) {
    rest = rest * 2 + (a >> bit & 1);
    if (rest < static_cast<uint64_t>(b)) continue;
    rest -= b;
    quotient |= int64_t{1} << bit;
  }
  return quotient;
#else
  return a / b;
#endif
}

// Exact for dividends in [0, 2^31) by the multiplier m = ceil(2^(31 + l) / d), 2^(l - 1) < d <= 2^l
// (T. Granlund and P. Montgomery, Division by Invariant Integers using Multiplication, 1994).
class Divisor {
 public:
  Divisor() = default;

  explicit Divisor(int32_t divisor) : divisor_(divisor) {
    while ((int64_t{1} << log_) < divisor) ++log_;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << (31 + log_)) + divisor - 1) / divisor);
  }

  PGQA_HOST_DEVICE int32_t Divide(int32_t dividend) const {
    return static_cast<int32_t>(
        static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * multiplier_ >> (31 + log_));
  }

  PGQA_HOST_DEVICE int64_t Divide(int64_t dividend) const {
    return FloorDiv(dividend, int64_t{divisor_});
  }

 private:
  int32_t divisor_ = 1;
  int32_t log_ = 0;
  uint32_t multiplier_ = 0x80000000U;
};

}  // namespace pgqa
