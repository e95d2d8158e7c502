// Allocates and frees workspaces.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/workspace.h"

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "cuda/device_memory.h"

namespace pgqa {

absl::StatusOr<Workspace> Workspace::Create(int64_t bytes) {
  const absl::StatusOr<void*> data = AllocateDevice(static_cast<size_t>(bytes));
  if (!data.ok()) return data.status();
  return Workspace(WorkspaceView{*data, bytes});
}

Workspace::Workspace(Workspace&& other) noexcept : view_(std::exchange(other.view_, {})) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(view_, other.view_);
  return *this;
}

Workspace::~Workspace() {
  if (view_.data != nullptr) FreeDevice(view_.data);
}

}  // namespace pgqa
