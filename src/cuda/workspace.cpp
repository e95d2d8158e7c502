// Allocates and frees workspaces.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/workspace.h"

#include <cstdint>
#include <utility>

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

absl::StatusOr<Workspace> Workspace::Create(int64_t bytes) {
  const RelaxedCaptureMode relaxed;
  void* data = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaMalloc(&data, static_cast<size_t>(bytes)));
  return Workspace(WorkspaceView{data, bytes});
}

Workspace::Workspace(Workspace&& other) noexcept : view_(std::exchange(other.view_, {})) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(view_, other.view_);
  return *this;
}

Workspace::~Workspace() {
  if (view_.data == nullptr) return;
  const RelaxedCaptureMode relaxed;
  (void)cudaFree(view_.data);
}

}  // namespace pgqa
