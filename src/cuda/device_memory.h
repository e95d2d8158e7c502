// Device memory that may be allocated and freed while this thread captures a stream.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/statusor.h"

namespace pgqa {

// Lets this thread allocate while a stream is being captured.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCaptureMode() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Allocates `bytes` on the current device and zeroes the first `zeroed_bytes` on a stream of its
// own, which it waits for; callers' streams are left alone. ResourceExhausted when out of memory.
absl::StatusOr<void*> AllocateDevice(size_t bytes, size_t zeroed_bytes);

// Frees it, for which the driver waits until the device no longer uses it.
void FreeDevice(void* memory);

}  // namespace pgqa
