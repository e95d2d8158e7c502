// A decode call from Python objects.
// SPDX-License-Identifier: Apache-2.0
#include "binding/read_call.h"

#include <utility>

#include "binding/args.h"

namespace pgqa::binding {

using Object = const pybind11::object&;

DecodeCall ReadCall(Object q, Object k_cache, Object v_cache, TableTensors table, Object sm_scale,
                    Object window_left, Object logits_soft_cap, Object pos_encoding_mode,
                    Object rope_scale, Object rope_theta) {
  DecodeCall call;
  call.q = ToTensor("q", q);
  call.k_cache = ToTensor("k_cache", k_cache);
  call.v_cache = ToTensor("v_cache", v_cache);
  call.table = std::move(table);
  if (!sm_scale.is_none()) call.sm_scale = ToDouble("sm_scale", sm_scale);
  call.window_left = ToInt("window_left", window_left);
  call.logits_soft_cap = ToDouble("logits_soft_cap", logits_soft_cap);
  call.pos_encoding_mode = ToInt("pos_encoding_mode", pos_encoding_mode);
  call.rope_scale = ToDouble("rope_scale", rope_scale);
  call.rope_theta = ToDouble("rope_theta", rope_theta);
  return call;
}

}  // namespace pgqa::binding
