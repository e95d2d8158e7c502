// Texts and statuses of what is wrong with an argument.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace pgqa {

inline std::string Fault(const absl::AlphaNum& argument, const absl::AlphaNum& got,
                         const absl::AlphaNum& expected) {
  return absl::StrCat(argument, ": got ", got, ", expected ", expected);
}

inline absl::Status FaultStatus(const absl::AlphaNum& argument, const absl::AlphaNum& got,
                                const absl::AlphaNum& expected) {
  return absl::InvalidArgumentError(Fault(argument, got, expected));
}

inline absl::Status FirstFault(const std::vector<std::string>& faults) {
  return faults.empty() ? absl::OkStatus() : absl::InvalidArgumentError(faults.front());
}

// Appends a fault unless value >= minimum.
inline void CheckAtLeast(const char* argument, int64_t value, int64_t minimum,
                         std::vector<std::string>* faults) {
  if (value < minimum)
    faults->push_back(Fault(argument, value, absl::StrCat("at least ", minimum)));
}

}  // namespace pgqa
