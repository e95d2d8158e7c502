// Hands workspaces to eager calls.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "cuda/cuda_status.h"
#include "pgqa/workspace.h"

namespace pgqa {

struct WorkspacePool::State {
  struct Entry {
    Workspace workspace;
    uint64_t last_use = 0;
  };
  using Key = std::pair<int, unsigned long long>;  // device, stream id

  absl::Status Lend(const Key& key, int64_t bytes, WorkspaceView* view);

  mutable std::mutex mutex;  // held over CUDA calls
  size_t max_workspaces = 0;
  uint64_t clock = 0;
  std::map<Key, Entry> entries;
};

absl::Status WorkspacePool::State::Lend(const Key& key, int64_t bytes, WorkspaceView* view) {
  auto it = entries.find(key);
  if (it == entries.end() || it->second.workspace.View().bytes < bytes) {
    if (it != entries.end()) {
      entries.erase(it);
    } else if (entries.size() >= max_workspaces) {
      const auto older = [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      };
      entries.erase(std::min_element(entries.begin(), entries.end(), older));
    }
    absl::StatusOr<Workspace> workspace = Workspace::Create(bytes);
    if (!workspace.ok()) return workspace.status();
    it = entries.emplace(key, Entry{*std::move(workspace)}).first;
  }
  it->second.last_use = ++clock;
  *view = it->second.workspace.View();
  return absl::OkStatus();
}

WorkspacePool::WorkspacePool(int32_t max_workspaces) : state_(std::make_unique<State>()) {
  state_->max_workspaces = static_cast<size_t>(std::max(1, max_workspaces));
}

WorkspacePool::~WorkspacePool() = default;

absl::Status WorkspacePool::Run(int64_t bytes, cudaStream_t stream,
                                absl::FunctionRef<absl::Status(const WorkspaceView&)> launch) {
  int device = 0;
  unsigned long long stream_id = 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamIsCapturing(stream, &capturing));
  if (capturing != cudaStreamCaptureStatusNone) {
    return absl::FailedPreconditionError(
        "stream: got one that is being captured, expected a workspace of the graph's own there");
  }
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamGetId(stream, &stream_id));
  // Held over the launch, so that no other thread frees the workspace between lending and enqueueing.
  const std::lock_guard lock(state_->mutex);
  WorkspaceView view;
  const absl::Status lent = state_->Lend({device, stream_id}, bytes, &view);
  return lent.ok() ? launch(view) : lent;
}

WorkspacePool::Usage WorkspacePool::GetUsage() const {
  const std::lock_guard lock(state_->mutex);
  Usage usage;
  usage.workspaces = static_cast<int32_t>(state_->entries.size());
  for (const auto& [key, entry] : state_->entries) usage.bytes += entry.workspace.View().bytes;
  return usage;
}

}  // namespace pgqa
