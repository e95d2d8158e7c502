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
  // Allocates; its contents do not matter. Works while a stream of this thread is being captured. ResourceExhausted
  // when out of memory.
  static absl::StatusOr<Workspace> Create(int64_t bytes);
  // For a plan without batch_invariant; else ask WorkspaceFor() the table's.
  static absl::StatusOr<Workspace> Create(const LaunchPlan& plan) {
    return Create(plan.workspace_bytes);
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

// Hands eager calls workspaces: one for each (device, stream), grown as needed, the least recently used freed beyond
// a bound. Thread-safe: calls are made one at a time, and one that allocates or frees, which waits for the device,
// holds up the others. A captured call needs a workspace that lives as long as its graph, which is its owner's to
// provide.
class WorkspacePool {
 public:
  struct Usage {
    int32_t workspaces = 0;
    int64_t bytes = 0;  // of all of them
  };

  explicit WorkspacePool(int32_t max_workspaces = 64);
  ~WorkspacePool();

  // Calls `launch` with a workspace of at least `bytes`; it must enqueue its work on `stream` before it returns. Does
  // not synchronise unless memory has to be allocated. FailedPrecondition while `stream` is being captured.
  absl::Status Run(int64_t bytes, cudaStream_t stream,
                   absl::FunctionRef<absl::Status(const WorkspaceView&)> launch);

  Usage GetUsage() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pgqa
