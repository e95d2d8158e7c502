// Allocates and frees device memory, also while this thread captures a stream.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_memory.h"

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "cuda/cuda_status.h"

namespace pgqa {
namespace {

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

// Zeroes memory on a stream of its own and waits for that stream alone.
absl::Status ZeroNow(void* memory, size_t bytes) {
  cudaStream_t stream = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t error = cudaMemsetAsync(memory, 0, bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  return CudaStatus(error, "zeroing of device memory");
}

}  // namespace

absl::StatusOr<void*> AllocateDevice(size_t bytes) {
  const RelaxedCaptureMode relaxed;
  void* memory = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaMalloc(&memory, bytes));
  return memory;
}

absl::StatusOr<void*> AllocateZeroed(size_t bytes) {
  const RelaxedCaptureMode relaxed;
  const absl::StatusOr<void*> memory = AllocateDevice(bytes);
  if (!memory.ok()) return memory;
  if (absl::Status s = ZeroNow(*memory, bytes); !s.ok()) {
    (void)cudaFree(*memory);
    return s;
  }
  return memory;
}

void FreeDevice(void* memory) {
  const RelaxedCaptureMode relaxed;
  (void)cudaFree(memory);
}

}  // namespace pgqa
