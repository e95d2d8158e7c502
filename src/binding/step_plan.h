// The module's Plan: a step planned once, and calls bound to it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace pgqa::binding {

// Plan and PlannedCall.
void DefineStepPlan(pybind11::module_& m);

}  // namespace pgqa::binding
