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

}  // namespace

absl::Status SetBytes(void* memory, int byte, size_t bytes) {
  const RelaxedCaptureMode relaxed;
  cudaStream_t stream = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaError_t error = cudaMemsetAsync(memory, byte, bytes, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  return CudaStatus(error, "filling of device memory");
}

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
  if (absl::Status s = SetBytes(*memory, 0, bytes); !s.ok()) {
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
