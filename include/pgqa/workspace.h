// Owners of the device memory that decode calls work in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pgqa/decode.h"

namespace pgqa {

// One workspace on the current device. Move-only.
class Workspace {
 public:
  // Allocates and zeroes the counters on a stream of its own, which it waits for; callers' streams are left
  // alone. Works while another stream of this thread is being captured. ResourceExhausted when out of memory.
  static absl::StatusOr<Workspace> Create(int64_t partial_bytes, int32_t num_counters);
  static absl::StatusOr<Workspace> Create(const LaunchPlan& plan) {
    return Create(plan.workspace_bytes, plan.num_counters);
  }

  Workspace(Workspace&& other) noexcept;
  Workspace& operator=(Workspace&& other) noexcept;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  // Frees the memory, for which the driver waits until the device no longer uses it.
  ~Workspace();

  WorkspaceView View() const { return view_; }

 private:
  explicit Workspace(const WorkspaceView& view) : view_(view) {}
  WorkspaceView view_;
};

// Hands calls workspaces. Eager calls: one for each (device, stream), grown as needed, the least recently used freed
// beyond a bound. Captured calls: those of one (graph, stream) share, and keep it as long as the graph and its
// executables live; then it is reused. So calls that may run at the same time have different ones, with one
// exception: two executables of one captured graph must not run at the same time. Thread-safe.
class WorkspacePool {
 public:
  struct Usage {
    int32_t eager_workspaces = 0;
    int32_t graph_workspaces = 0;  // held by live graphs
    int32_t free_workspaces = 0;   // of destroyed graphs
    int64_t bytes = 0;             // of all of them
  };

  explicit WorkspacePool(int32_t max_eager_workspaces = 64);
  ~WorkspacePool();

  // Calls `launch` with a workspace that fits; it must enqueue its work on `stream` before it returns. Does not
  // synchronise unless memory has to be allocated.
  absl::Status Run(int64_t partial_bytes, int32_t num_counters, cudaStream_t stream,
                   absl::FunctionRef<absl::Status(const WorkspaceView&)> launch);

  Usage GetUsage() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace pgqa
