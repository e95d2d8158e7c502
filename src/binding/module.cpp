// The Python module _pgqa: a list of functions; the work is in backend.h, checks.h and args.h.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/types.h>
#include <torch/version.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "binding/append.h"
#include "binding/args.h"
#include "binding/backend.h"
#include "binding/checks.h"
#include "binding/graph.h"
#include "binding/inspect.h"
#include "binding/ops.h"
#include "binding/read_call.h"
#include "binding/step_plan.h"
#include "pgqa/graph_spec.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;
using Object = const py::object&;

py::object Run(DecodeCall call, Object out, Object return_lse, Object workspace,
               Object batch_invariant) {
  call.out = ToOptionalTensor("out", out);
  call.return_lse = ToBool("return_lse", return_lse);
  call.workspace = ToOptionalTensor("workspace", workspace);
  call.batch_invariant = ToBool("batch_invariant", batch_invariant);
  at::Tensor result;
  at::Tensor lse;
  ThrowIfError(RunCall(call, &result, &lse));
  py::object first = call.out.has_value() ? out : ToPython(std::move(result));
  if (!call.return_lse) return first;
  return py::make_tuple(std::move(first), ToPython(std::move(lse)));
}

py::object Decode(Object q, Object k_cache, Object v_cache, Object page_indptr, Object page_indices,
                  Object last_page_len, Object sm_scale, Object window_left, Object logits_soft_cap,
                  Object pos_encoding_mode, Object rope_scale, Object rope_theta, Object out,
                  Object return_lse, Object workspace, Object batch_invariant) {
  return Run(
      ReadCall(q, k_cache, v_cache, ReadCsr(page_indptr, page_indices, last_page_len), sm_scale,
               window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
      out, return_lse, workspace, batch_invariant);
}

py::object DecodeBlockTable(Object q, Object k_cache, Object v_cache, Object block_table,
                            Object seq_lens, Object sm_scale, Object new_tokens, Object window_left,
                            Object logits_soft_cap, Object pos_encoding_mode, Object rope_scale,
                            Object rope_theta, Object out, Object return_lse, Object workspace) {
  return Run(
      ReadCall(q, k_cache, v_cache, ReadBlockTable(block_table, seq_lens, new_tokens), sm_scale,
               window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
      out, return_lse, workspace, py::bool_(false));
}

std::vector<std::string> CheckDecode(Object q, Object k_cache, Object v_cache, Object page_indptr,
                                     Object page_indices, Object last_page_len, Object sm_scale,
                                     Object window_left, Object logits_soft_cap,
                                     Object pos_encoding_mode, Object rope_scale,
                                     Object rope_theta) {
  const DecodeCall call =
      ReadCall(q, k_cache, v_cache, ReadCsr(page_indptr, page_indices, last_page_len), sm_scale,
               window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta);
  AttentionShape shape;
  AttentionOptions options;
  std::vector<std::string> faults = CheckCall(call, &shape, &options);
#if !PGQA_WITH_CUDA
  if (call.q.is_cuda()) faults.push_back(WithoutCudaText("q"));
#endif
  return faults;
}

py::tuple CapacityFor(const py::object& max_batch, const py::object& max_pages,
                      const py::object& live_batch, const py::object& num_pages) {
  const auto read = [](const char* name, const py::object& object, int32_t least) {
    return static_cast<int32_t>(
        ToIntInside(name, object, least, std::numeric_limits<int32_t>::max()));
  };
  const GraphCapacity limit{read("max_batch", max_batch, 1), read("max_pages", max_pages, 0)};
  const GraphCapacity capacity = ValueOrThrow(
      BucketFor(limit, read("live_batch", live_batch, 0), read("num_pages", num_pages, 0)));
  return py::make_tuple(capacity.max_batch, capacity.max_pages);
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
  // Defaults, the same in every function that takes them.
  const auto window_left = py::arg("window_left") = -1;
  const auto soft_cap = py::arg("logits_soft_cap") = 0.0;
  const auto pos_encoding = py::arg("pos_encoding_mode") = 0;
  const auto rope_scale = py::arg("rope_scale") = 1.0;
  const auto rope_theta = py::arg("rope_theta") = 10000.0;
  const auto out = py::arg("out") = py::none();
  const auto return_lse = py::arg("return_lse") = false;
  const auto workspace = py::arg("workspace") = py::none();
  m.def("decode", &Decode, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"),
        py::arg("sm_scale"), window_left, soft_cap, pos_encoding, rope_scale, rope_theta, out,
        return_lse, workspace, py::arg("batch_invariant") = false);
  m.def("decode_block_table", &DecodeBlockTable, py::arg("q"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("block_table"), py::arg("seq_lens"), py::arg("sm_scale"),
        py::arg("new_tokens") = 0, window_left, soft_cap, pos_encoding, rope_scale, rope_theta, out,
        return_lse, workspace);
  m.def("check_decode", &CheckDecode, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"),
        py::arg("sm_scale") = py::none(), window_left, soft_cap, pos_encoding, rope_scale,
        rope_theta);
  m.def("build_info", &BuildInfo);
  m.def("graph_capacity", &CapacityFor, py::arg("max_batch"), py::arg("max_pages"),
        py::arg("live_batch"), py::arg("num_pages"));
  m.def("register_ops", &RegisterOps);
  DefineAppend(m);
  DefineStepPlan(m);
#if PGQA_WITH_CUDA
  DefineGraph(m);
#endif
  DefineInspection(m);
}

}  // namespace pgqa::binding
