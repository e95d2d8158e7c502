// Allocates and frees workspaces.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/workspace.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cuda/cuda_status.h"
#include "cuda/orphan_workspaces.h"

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
  return CudaStatus(error, "workspace initialisation");
}

}  // namespace

absl::StatusOr<Workspace> Workspace::Create(int64_t partial_bytes, int32_t num_counters) {
  const RelaxedCaptureMode relaxed;
  FreeOrphanWorkspaces();
  // Counters first: the partials behind them stay 256-byte aligned.
  const size_t counter_bytes = (num_counters * sizeof(uint32_t) + 255) / 256 * 256;
  void* block = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaMalloc(&block, counter_bytes + partial_bytes));
  if (absl::Status s = ZeroNow(block, counter_bytes); !s.ok()) {
    (void)cudaFree(block);
    return s;
  }
  return Workspace(WorkspaceView{.partials = static_cast<char*>(block) + counter_bytes,
                                 .partial_bytes = partial_bytes,
                                 .counters = static_cast<uint32_t*>(block),
                                 .num_counters = num_counters});
}

Workspace::Workspace(Workspace&& other) noexcept : view_(std::exchange(other.view_, {})) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(view_, other.view_);
  return *this;
}

Workspace::~Workspace() {
  if (view_.counters == nullptr) return;
  const RelaxedCaptureMode relaxed;
  (void)cudaFree(view_.counters);
}

namespace {

// Never destroyed: graphs may end after everything else.
struct Orphans {
  std::mutex mutex;
  std::vector<Workspace> workspaces;
};

Orphans& TheOrphans() {
  static auto* orphans = new Orphans();
  return *orphans;
}

}  // namespace

void AddOrphanWorkspace(Workspace workspace) {
  const std::lock_guard lock(TheOrphans().mutex);
  TheOrphans().workspaces.push_back(std::move(workspace));
}

void FreeOrphanWorkspaces() {
  std::vector<Workspace> orphans;
  {
    const std::lock_guard lock(TheOrphans().mutex);
    orphans.swap(TheOrphans().workspaces);
  }
}

}  // namespace pgqa
