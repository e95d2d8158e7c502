// The Python module _pgqa: a list of functions; the work is in backend.h, checks.h and args.h.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/types.h>
#include <torch/version.h>

#include "binding/append.h"
#include "binding/args.h"
#include "binding/backend.h"
#include "binding/checks.h"
#include "binding/graph.h"
#include "binding/inspect.h"
#include "binding/ops.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;
using Object = const py::object&;

DecodeCall ReadCall(Object q, Object k_cache, Object v_cache, Object page_indptr,
                    Object page_indices, Object last_page_len, Object sm_scale, Object window_left,
                    Object logits_soft_cap, Object pos_encoding_mode, Object rope_scale,
                    Object rope_theta) {
  DecodeCall call;
  call.q = ToTensor("q", q);
  call.k_cache = ToTensor("k_cache", k_cache);
  call.v_cache = ToTensor("v_cache", v_cache);
  call.page_indptr = ToTensor("page_indptr", page_indptr);
  call.page_indices = ToTensor("page_indices", page_indices);
  call.last_page_len = ToTensor("last_page_len", last_page_len);
  if (!sm_scale.is_none()) call.sm_scale = ToDouble("sm_scale", sm_scale);
  call.window_left = ToInt("window_left", window_left);
  call.logits_soft_cap = ToDouble("logits_soft_cap", logits_soft_cap);
  call.pos_encoding_mode = ToInt("pos_encoding_mode", pos_encoding_mode);
  call.rope_scale = ToDouble("rope_scale", rope_scale);
  call.rope_theta = ToDouble("rope_theta", rope_theta);
  return call;
}

py::object Decode(Object q, Object k_cache, Object v_cache, Object page_indptr, Object page_indices,
                  Object last_page_len, Object sm_scale, Object window_left, Object logits_soft_cap,
                  Object pos_encoding_mode, Object rope_scale, Object rope_theta, Object out,
                  Object return_lse, Object workspace, Object batch_invariant) {
  DecodeCall call =
      ReadCall(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
               logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta);
  call.out = ToOptionalTensor("out", out);
  call.return_lse = ToBool("return_lse", return_lse);
  call.workspace = ToOptionalTensor("workspace", workspace);
  call.batch_invariant = ToBool("batch_invariant", batch_invariant);
  at::Tensor result;
  at::Tensor lse;
  ThrowIfError(RunCall(call, &result, &lse));
  const auto wrap = [](at::Tensor& tensor) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
  };
  py::object first = call.out.has_value() ? out : wrap(result);
  if (!call.return_lse) return first;
  return py::make_tuple(std::move(first), wrap(lse));
}

std::vector<std::string> CheckDecode(Object q, Object k_cache, Object v_cache, Object page_indptr,
                                     Object page_indices, Object last_page_len, Object sm_scale,
                                     Object window_left, Object logits_soft_cap,
                                     Object pos_encoding_mode, Object rope_scale,
                                     Object rope_theta) {
  const DecodeCall call =
      ReadCall(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
               logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta);
  AttentionShape shape;
  AttentionOptions options;
  std::vector<std::string> faults = CheckCall(call, &shape, &options);
#if !PGQA_WITH_CUDA
  if (call.q.is_cuda())
    faults.push_back(FaultText("q", "a CUDA tensor", "a CPU tensor: built without CUDA"));
#endif
  return faults;
}

py::dict BuildInfo() {
  py::dict info;
  info["version"] = PGQA_VERSION;
  info["cuda"] = static_cast<bool>(PGQA_WITH_CUDA);
  info["cuda_architectures"] = PGQA_CUDA_ARCHITECTURES;
  info["torch"] = TORCH_VERSION;
  return info;
}

}  // namespace

PYBIND11_MODULE(_pgqa, m) {
  m.doc() =
      "Paged, ragged grouped-query decode attention; see the package pgqa for the documented "
      "interface.";
  // Defaults of the scalars, the same in every function that takes them.
  const auto window_left = py::arg("window_left") = -1;
  const auto soft_cap = py::arg("logits_soft_cap") = 0.0;
  const auto pos_encoding = py::arg("pos_encoding_mode") = 0;
  const auto rope_scale = py::arg("rope_scale") = 1.0;
  const auto rope_theta = py::arg("rope_theta") = 10000.0;
  m.def("decode", &Decode, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"),
        py::arg("sm_scale"), window_left, soft_cap, pos_encoding, rope_scale, rope_theta,
        py::arg("out") = py::none(), py::arg("return_lse") = false,
        py::arg("workspace") = py::none(), py::arg("batch_invariant") = false);
  m.def("check_decode", &CheckDecode, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"),
        py::arg("sm_scale") = py::none(), window_left, soft_cap, pos_encoding, rope_scale,
        rope_theta);
  m.def("build_info", &BuildInfo);
  m.def("register_ops", &RegisterOps);
  DefineAppend(m);
#if PGQA_WITH_CUDA
  DefineGraph(m);
#endif
  DefineInspection(m);
}

}  // namespace pgqa::binding
