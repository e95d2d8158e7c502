// Allocates and frees workspaces.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/workspace.h"

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/device_memory.h"
#include "cuda/orphan_workspaces.h"

namespace pgqa {

absl::StatusOr<Workspace> Workspace::Create(int64_t partial_bytes, int32_t num_counters) {
  FreeOrphanWorkspaces();
  // Counters first: the partials behind them stay 256-byte aligned.
  const size_t counter_bytes = (num_counters * sizeof(uint32_t) + 255) / 256 * 256;
  const absl::StatusOr<void*> block = AllocateDevice(counter_bytes + partial_bytes, counter_bytes);
  if (!block.ok()) return block.status();
  return Workspace(WorkspaceView{.partials = static_cast<char*>(*block) + counter_bytes,
                                 .partial_bytes = partial_bytes,
                                 .counters = static_cast<uint32_t*>(*block),
                                 .num_counters = num_counters});
}

Workspace::Workspace(Workspace&& other) noexcept : view_(std::exchange(other.view_, {})) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(view_, other.view_);
  return *this;
}

Workspace::~Workspace() {
  if (view_.counters != nullptr) FreeDevice(view_.counters);
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
