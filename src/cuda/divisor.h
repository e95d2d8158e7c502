// Division by a number that the host knows: a multiplication and a shift on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/host_device.h"
#include "pgqa/partition.h"

namespace pgqa {

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
