// Module functions that look at plans and page tables without computing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace pgqa::binding {

// supports_shape, workspace_bytes, schedule, Schedule, validate_page_table, workspace_usage.
void DefineInspection(pybind11::module_& m);

}  // namespace pgqa::binding
