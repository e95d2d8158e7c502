// Workspaces whose pool was gone before the graph that held them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pgqa/workspace.h"

namespace pgqa {

// Keeps a workspace that came back on a thread of the driver, where no CUDA call may be made.
void AddOrphanWorkspace(Workspace workspace);

// Frees them. Every allocation of a workspace does.
void FreeOrphanWorkspaces();

}  // namespace pgqa
