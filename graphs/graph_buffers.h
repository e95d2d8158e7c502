// The device memory that a graph owns for what its spec leaves null, and checks of the rest.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cuda/device_memory.h"
#include "pgqa/graph_spec.h"

namespace pgqa {

class GraphBuffers {
 public:
  // One block on the current device for all null addresses of `spec`, zeroed but for seq_lens, -1, so
  // that its table has empty rows only.
  static absl::StatusOr<GraphBuffers> Create(const GraphSpec& spec);

  // `spec` with the addresses and strides of this memory where it has null. It has the sizes,
  // switches and number of layers of the spec that this was created for; InvalidArgument for a null
  // address of what was the caller's there.
  absl::StatusOr<GraphSpec> Fill(GraphSpec spec) const;

  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { FreeDevice(memory); }
  };

  std::vector<int64_t> offsets_;  // of each address in the order of the walk; -1: the caller's
  int64_t bytes_ = 0;
  std::unique_ptr<void, Free> memory_;
};

// InvalidArgument unless every address of a filled `spec` is memory that `device` may use, not of
// the host.
absl::Status CheckAddresses(const GraphSpec& spec, int device);

}  // namespace pgqa
