// Hands workspaces to eager and captured calls.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <compare>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cuda/cuda_status.h"
#include "cuda/orphan_workspaces.h"
#include "pgqa/workspace.h"

namespace pgqa {
namespace {

constexpr size_t kMaxFreeWorkspaces = 16;  // of destroyed graphs, kept for later ones

bool Fits(const WorkspaceView& view, int64_t partial_bytes, int32_t num_counters) {
  return view.partial_bytes >= partial_bytes && view.num_counters >= num_counters;
}

int64_t TotalBytes(const WorkspaceView& view) {
  return view.partial_bytes + int64_t{view.num_counters} * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace

// Outlives the pool while graphs hold workspaces of it.
//
// Graphs give their workspaces back on a thread of the driver, which may neither call CUDA nor wait for a thread that
// does: that side takes only returned_mutex, under which nothing else happens than moving pointers.
struct WorkspacePool::State {
  struct EagerEntry {
    Workspace workspace;
    uint64_t last_use = 0;
  };
  using EagerKey = std::pair<int, unsigned long long>;  // device, stream id
  struct GraphKey {
    int device = 0;
    unsigned long long capture = 0;
    cudaStream_t stream = nullptr;  // an id cannot be asked for while capturing
    auto operator<=>(const GraphKey&) const = default;
  };
  struct GraphEntry {
    GraphKey key;
    Workspace workspace;
    std::shared_ptr<State> state;  // keeps this alive until the graph's destructor has run
  };

  absl::Status Lend(const EagerKey& key, int64_t partial_bytes, int32_t num_counters,
                    WorkspaceView* view);
  absl::Status LendToGraph(const GraphKey& key, cudaGraph_t graph, int64_t partial_bytes,
                           int32_t num_counters, const std::shared_ptr<State>& self,
                           WorkspaceView* view);
  absl::StatusOr<Workspace> TakeFreeOrCreate(int device, int64_t partial_bytes,
                                             int32_t num_counters);
  void TakeBackReturned();
  static void Return(GraphEntry* entry);

  mutable std::mutex mutex;  // held over CUDA calls
  size_t max_eager = 0;
  uint64_t clock = 0;
  std::map<EagerKey, EagerEntry> eager;
  std::multimap<GraphKey, GraphEntry*> graphs;
  std::list<std::pair<int, Workspace>> free;  // with their devices

  std::mutex returned_mutex;
  bool closed = false;                // the pool is gone
  std::vector<GraphEntry*> returned;  // by destroyed graphs, still in `graphs`
};

absl::Status WorkspacePool::State::Lend(const EagerKey& key, int64_t partial_bytes,
                                        int32_t num_counters, WorkspaceView* view) {
  auto it = eager.find(key);
  if (it == eager.end() || !Fits(it->second.workspace.View(), partial_bytes, num_counters)) {
    if (it != eager.end()) {
      const WorkspaceView old = it->second.workspace.View();
      partial_bytes = std::max(partial_bytes, old.partial_bytes);
      num_counters = std::max(num_counters, old.num_counters);
      eager.erase(it);
    } else if (eager.size() >= max_eager) {
      const auto older = [](const auto& a, const auto& b) {
        return a.second.last_use < b.second.last_use;
      };
      eager.erase(std::min_element(eager.begin(), eager.end(), older));
    }
    absl::StatusOr<Workspace> workspace = TakeFreeOrCreate(key.first, partial_bytes, num_counters);
    if (!workspace.ok()) return workspace.status();
    it = eager.emplace(key, EagerEntry{*std::move(workspace)}).first;
  }
  it->second.last_use = ++clock;
  *view = it->second.workspace.View();
  return absl::OkStatus();
}

absl::StatusOr<Workspace> WorkspacePool::State::TakeFreeOrCreate(int device, int64_t partial_bytes,
                                                                 int32_t num_counters) {
  while (free.size() > kMaxFreeWorkspaces) free.pop_front();
  for (auto it = free.begin(); it != free.end(); ++it) {
    if (it->first != device || !Fits(it->second.View(), partial_bytes, num_counters)) continue;
    Workspace taken = std::move(it->second);
    free.erase(it);
    return taken;
  }
  return Workspace::Create(partial_bytes, num_counters);
}

absl::Status WorkspacePool::State::LendToGraph(const GraphKey& key, cudaGraph_t graph,
                                               int64_t partial_bytes, int32_t num_counters,
                                               const std::shared_ptr<State>& self,
                                               WorkspaceView* view) {
  const auto [first, last] = graphs.equal_range(key);
  for (auto it = first; it != last; ++it) {
    *view = it->second->workspace.View();
    if (Fits(*view, partial_bytes, num_counters)) return absl::OkStatus();
  }
  absl::StatusOr<Workspace> workspace = TakeFreeOrCreate(key.device, partial_bytes, num_counters);
  if (!workspace.ok()) return workspace.status();
  auto* entry = new GraphEntry{key, *std::move(workspace), self};
  // Runs when the graph and its executables are gone.
  const auto release = [](void* data) { Return(static_cast<GraphEntry*>(data)); };
  cudaUserObject_t object = nullptr;
  cudaError_t error =
      cudaUserObjectCreate(&object, entry, release, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) {
    free.emplace_back(key.device, std::move(entry->workspace));
    delete entry;
    return CudaStatus(error, "cudaUserObjectCreate");
  }
  graphs.emplace(key, entry);
  *view = entry->workspace.View();
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) (void)cudaUserObjectRelease(object, 1);
  return CudaStatus(error, "cudaGraphRetainUserObject");
}

void WorkspacePool::State::Return(GraphEntry* entry) {
  const std::shared_ptr<State> state = entry->state;  // outlives the lock
  const std::lock_guard lock(state->returned_mutex);
  if (!state->closed) {
    state->returned.push_back(entry);
    return;
  }
  AddOrphanWorkspace(std::move(entry->workspace));
  delete entry;
}

void WorkspacePool::State::TakeBackReturned() {
  std::vector<GraphEntry*> entries;
  {
    const std::lock_guard lock(returned_mutex);
    entries.swap(returned);
  }
  for (GraphEntry* entry : entries) {
    auto [it, last] = graphs.equal_range(entry->key);
    while (it != last && it->second != entry) ++it;
    if (it != last) graphs.erase(it);
    free.emplace_back(entry->key.device, std::move(entry->workspace));
    delete entry;
  }
}

WorkspacePool::WorkspacePool(int32_t max_eager_workspaces) : state_(std::make_shared<State>()) {
  state_->max_eager = static_cast<size_t>(std::max(1, max_eager_workspaces));
}

WorkspacePool::~WorkspacePool() {
  const std::lock_guard lock(state_->mutex);
  {
    const std::lock_guard returned_lock(state_->returned_mutex);
    state_->closed = true;
  }
  state_->TakeBackReturned();
  state_->eager.clear();
  state_->free.clear();
}

absl::Status WorkspacePool::Run(int64_t partial_bytes, int32_t num_counters, cudaStream_t stream,
                                absl::FunctionRef<absl::Status(const WorkspaceView&)> launch) {
  int device = 0;
  unsigned long long stream_id = 0;
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long capture_id = 0;
  cudaGraph_t graph = nullptr;
  PGQA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  PGQA_RETURN_IF_CUDA_ERROR(cudaStreamGetCaptureInfo(stream, &capturing, &capture_id, &graph));
  if (capturing == cudaStreamCaptureStatusInvalidated) {
    return absl::InternalError("stream: its capture was invalidated by an earlier error");
  }

  if (capturing == cudaStreamCaptureStatusNone) {
    PGQA_RETURN_IF_CUDA_ERROR(cudaStreamGetId(stream, &stream_id));
  }
  // Held over the launch, so that no other thread frees the workspace between lending and enqueueing.
  const std::lock_guard lock(state_->mutex);
  state_->TakeBackReturned();
  WorkspaceView view;
  const absl::Status lent =
      capturing == cudaStreamCaptureStatusActive
          ? state_->LendToGraph({device, capture_id, stream}, graph, partial_bytes, num_counters,
                                state_, &view)
          : state_->Lend({device, stream_id}, partial_bytes, num_counters, &view);
  return lent.ok() ? launch(view) : lent;
}

WorkspacePool::Usage WorkspacePool::GetUsage() const {
  const std::lock_guard lock(state_->mutex);
  state_->TakeBackReturned();
  Usage usage;
  for (const auto& [key, entry] : state_->eager) usage.bytes += TotalBytes(entry.workspace.View());
  for (const auto& [key, entry] : state_->graphs)
    usage.bytes += TotalBytes(entry->workspace.View());
  for (const auto& [device, workspace] : state_->free) usage.bytes += TotalBytes(workspace.View());
  usage.eager_workspaces = static_cast<int32_t>(state_->eager.size());
  usage.graph_workspaces = static_cast<int32_t>(state_->graphs.size());
  usage.free_workspaces = static_cast<int32_t>(state_->free.size());
  return usage;
}

}  // namespace pgqa
