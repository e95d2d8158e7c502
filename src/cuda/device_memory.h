// Device memory that may be allocated and freed while this thread captures a stream.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pgqa {

// Allocates `bytes` on the current device. ResourceExhausted when out of memory.
absl::StatusOr<void*> AllocateDevice(size_t bytes);

// The same, zeroed on a stream of its own, which it waits for; callers' streams are left alone.
absl::StatusOr<void*> AllocateZeroed(size_t bytes);

// Fills memory with a byte on a stream of its own, which it waits for.
absl::Status SetBytes(void* memory, int byte, size_t bytes);

// Frees it, for which the driver waits until the device no longer uses it.
void FreeDevice(void* memory);

}  // namespace pgqa
