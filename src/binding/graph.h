// The module's DecodeGraph.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace pgqa::binding {

void DefineGraph(pybind11::module_& m);

}  // namespace pgqa::binding
