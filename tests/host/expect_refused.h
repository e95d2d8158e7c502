// Applies faults to a valid value, one at a time, and expects each to be refused by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pgqa {

template <typename T>
struct Fault {
  std::function<void(T*)> change;
  std::string message;
};

// Applies each change to a copy of `valid` and expects InvalidArgument with the message.
template <typename T, typename Validate>
void ExpectRefused(const T& valid, const std::vector<Fault<T>>& cases, const Validate& validate) {
  EXPECT_TRUE(validate(valid).ok()) << validate(valid);
  for (const Fault<T>& c : cases) {
    T changed = valid;
    c.change(&changed);
    const absl::Status status = validate(changed);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_EQ(std::string(status.message()), c.message);
  }
}

}  // namespace pgqa
