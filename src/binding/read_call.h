// A decode call from Python objects.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "binding/checks.h"

namespace pgqa::binding {

// Raises TypeError for what is no tensor or number; the rest is for CheckCall().
DecodeCall ReadCall(const pybind11::object& q, const pybind11::object& k_cache,
                    const pybind11::object& v_cache, TableTensors table,
                    const pybind11::object& sm_scale, const pybind11::object& window_left,
                    const pybind11::object& logits_soft_cap,
                    const pybind11::object& pos_encoding_mode, const pybind11::object& rope_scale,
                    const pybind11::object& rope_theta);

}  // namespace pgqa::binding
