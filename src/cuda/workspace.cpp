// Allocates workspaces and hands them to eager and captured calls.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/workspace.h"

#include <algorithm>
#include <compare>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "cuda/cuda_status.h"

namespace pgqa {
namespace {

constexpr size_t kMaxFreeWorkspaces = 16;  // of destroyed graphs, kept for later ones

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

bool Fits(const WorkspaceView& view, int64_t partial_bytes, int32_t num_counters) {
  return view.partial_bytes >= partial_bytes && view.num_counters >= num_counters;
}

int64_t TotalBytes(const WorkspaceView& view) {
  return view.partial_bytes + int64_t{view.num_counters} * static_cast<int64_t>(sizeof(uint32_t));
}

}  // namespace

absl::StatusOr<Workspace> Workspace::Create(int64_t partial_bytes, int32_t num_counters) {
  const RelaxedCaptureMode relaxed;
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

// Outlives the pool while graphs hold workspaces of it.
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
  void Release(GraphEntry* entry);

  mutable std::recursive_mutex mutex;
  size_t max_eager = 0;
  uint64_t clock = 0;
  std::map<EagerKey, EagerEntry> eager;
  std::multimap<GraphKey, GraphEntry*> graphs;  // entries are owned by their graphs
  std::list<std::pair<int, Workspace>> free;    // with their devices
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
      auto oldest = eager.begin();
      for (auto e = eager.begin(); e != eager.end(); ++e) {
        if (e->second.last_use < oldest->second.last_use) oldest = e;
      }
      eager.erase(oldest);
    }
    while (free.size() > kMaxFreeWorkspaces) free.pop_front();
    absl::StatusOr<Workspace> created = Workspace::Create(partial_bytes, num_counters);
    if (!created.ok()) return created.status();
    it = eager.emplace(key, EagerEntry{*std::move(created)}).first;
  }
  it->second.last_use = ++clock;
  *view = it->second.workspace.View();
  return absl::OkStatus();
}

absl::StatusOr<Workspace> WorkspacePool::State::TakeFreeOrCreate(int device, int64_t partial_bytes,
                                                                 int32_t num_counters) {
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
  // Runs when the graph and its executables are gone. It may not call CUDA, and does not.
  const auto release = [](void* data) {
    auto* graph_entry = static_cast<GraphEntry*>(data);
    const std::shared_ptr<State> state = graph_entry->state;
    state->Release(graph_entry);
  };
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

void WorkspacePool::State::Release(GraphEntry* entry) {
  const std::lock_guard lock(mutex);
  const auto [first, last] = graphs.equal_range(entry->key);
  for (auto it = first; it != last; ++it) {
    if (it->second != entry) continue;
    graphs.erase(it);
    break;
  }
  free.emplace_back(entry->key.device, std::move(entry->workspace));
  delete entry;
}

WorkspacePool::WorkspacePool(int32_t max_eager_workspaces) : state_(std::make_shared<State>()) {
  state_->max_eager = static_cast<size_t>(std::max(1, max_eager_workspaces));
}

WorkspacePool::~WorkspacePool() = default;

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
