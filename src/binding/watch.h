// Notices when tensors whose addresses were taken lose their memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/types.h>

#include <stdexcept>
#include <vector>

#include "binding/args.h"

namespace pgqa::binding {

class Watch {
 public:
  // `expected` ends the message of a fault.
  explicit Watch(const char* expected) : expected_(expected) {}

  // From now on `tensor` has to stay where it is. An undefined one is not watched.
  void Add(const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) entries_.push_back({name, tensor, tensor.const_data_ptr()});
  }

  // Raises RuntimeError where a tensor has been given other memory since, or none.
  void Check() const {
    for (const Entry& entry : entries_) {
      if (entry.tensor.const_data_ptr() == entry.address) continue;
      throw std::runtime_error(
          FaultText(entry.name, "a tensor whose memory was freed or replaced", expected_));
    }
  }

 private:
  struct Entry {
    const char* name;
    at::Tensor tensor;
    const void* address;
  };
  const char* expected_;
  std::vector<Entry> entries_;
};

}  // namespace pgqa::binding
