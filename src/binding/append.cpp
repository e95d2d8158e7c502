// Checks an append call and hands it to the backend of its tensors.
// SPDX-License-Identifier: Apache-2.0
#include "binding/append.h"

#include <torch/types.h>

#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "binding/args.h"
#include "binding/checks.h"
#include "binding/tensor_checks.h"
#include "pgqa/append.h"
#if PGQA_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace pgqa::binding {
namespace {

namespace py = pybind11;
using Object = const py::object&;

// That sizes fit the integers of a shape.
void CheckSizes(const char* name, const at::Tensor& tensor, Faults* faults) {
  for (const int64_t size : tensor.sizes()) {
    if (size <= std::numeric_limits<int32_t>::max()) continue;
    faults->push_back(FaultText(name, ShapeText(tensor), "sizes below 2^31"));
    return;
  }
}

// That a tensor is dense, of k's dtype and device, with contiguous rows. False as CheckDense.
bool CheckLikeKeys(const char* name, const at::Tensor& tensor, int64_t rank, const AppendCall& call,
                   Faults* faults) {
  if (!CheckDense(name, tensor, rank, call.k, faults, "k")) return false;
  if (tensor.scalar_type() != call.k.scalar_type()) {
    faults->push_back(FaultText(name, DTypeText(tensor), "that of k, " + DTypeText(call.k)));
  }
  CheckContiguousRows(name, tensor, faults);
  CheckSizes(name, tensor, faults);
  return true;
}

void CheckSameShape(const char* name, const at::Tensor& tensor, const char* other_name,
                    const at::Tensor& other, Faults* faults) {
  if (tensor.sizes() == other.sizes()) return;
  faults->push_back(FaultText(name, ShapeText(tensor),
                              std::string("that of ") + other_name + ", " + ShapeText(other)));
}

// That what the call writes has memory for each of its elements, apart from what it reads.
void CheckWritten(const char* name, const at::Tensor& written,
                  absl::Span<const at::Tensor* const> inputs, Faults* faults) {
  for (int64_t dim = 0; dim < written.dim(); ++dim) {
    if (written.size(dim) > 1 && written.stride(dim) == 0) {
      faults->push_back(FaultText(name, "stride 0 in dimension " + std::to_string(dim),
                                  "memory for each element"));
    }
  }
  CheckOwnMemory(name, written, inputs, faults);
}

// Whether two caches of one shape and layout name the same elements: they lie whole pages or tokens apart. Caches that
// are interleaved in one tensor do not.
bool ShareElements(const at::Tensor& a, const at::Tensor& b) {
  if (a.layout() != at::kStrided || b.layout() != at::kStrided || a.numel() == 0 ||
      a.sizes() != b.sizes() || a.strides() != b.strides() || a.device() != b.device()) {
    return false;
  }
  const int64_t apart =
      std::abs(static_cast<const char*>(a.data_ptr()) - static_cast<const char*>(b.data_ptr()));
  const int64_t page_bytes = a.stride(0) * a.element_size();
  if (apart == 0) return true;
  return page_bytes > 0 && apart % page_bytes == 0 && apart / page_bytes < a.size(0);
}

void CheckCaches(const AppendCall& call, Faults* faults) {
  const struct {
    const char* name;
    const at::Tensor& cache;
  } caches[] = {{"k_cache", call.k_cache}, {"v_cache", call.v_cache}};
  for (const auto& [name, cache] : caches) {
    if (!CheckLikeKeys(name, cache, 4, call, faults)) continue;
    if (cache.size(2) != call.k.size(1) || cache.size(3) != call.k.size(2)) {
      faults->push_back(
          FaultText(name, ShapeText(cache), "kv_heads and head_dim of k, " + ShapeText(call.k)));
    }
    CheckWritten(name, cache,
                 {&call.k, &call.v, &call.table.indptr, &call.table.indices, &call.table.lengths},
                 faults);
  }
  if (call.v_cache.dim() != 4) return;
  CheckSameShape("v_cache", call.v_cache, "k_cache", call.k_cache, faults);
  if (ShareElements(call.k_cache, call.v_cache))
    faults->push_back(FaultText("v_cache", "memory that overlaps k_cache", "memory of its own"));
}

void CheckQueries(const AppendCall& call, Faults* faults) {
  if (!call.q.has_value()) {
    if (call.q_out.has_value())
      faults->push_back(FaultText("q_out", "a tensor without q", "none, or q as well"));
    return;
  }
  const at::Tensor& q = *call.q;
  if (call.pos_encoding_mode != 1) {
    faults->push_back(FaultText("q", "a tensor with pos_encoding_mode 0",
                                "none: queries are turned by ROPE_LLAMA (1) or left alone"));
  }
  if (!CheckLikeKeys("q", q, 3, call, faults)) return;
  if (q.size(0) != call.k.size(0) || q.size(2) != call.k.size(2)) {
    faults->push_back(
        FaultText("q", ShapeText(q), "batch and head_dim of k, " + ShapeText(call.k)));
  }
  if (!call.q_out.has_value()) return;
  const at::Tensor& out = *call.q_out;
  if (!CheckLikeKeys("q_out", out, 3, call, faults)) return;
  CheckSameShape("q_out", out, "q", q, faults);
  // Keys and values are left out: with q they are often views of one packed tensor.
  const bool in_place = out.data_ptr() == q.data_ptr() && out.strides() == q.strides();
  if (in_place) {
    CheckWritten("q_out", out, {}, faults);
  } else {
    CheckWritten("q_out", out, {&q}, faults);
  }
}

}  // namespace

Faults CheckAppend(const AppendCall& call) {
  Faults faults;
  if (!call.k.is_cuda() && !call.k.is_cpu())
    faults.push_back(FaultText("k", DeviceText(call.k), "one on a CUDA device or the CPU"));
  DType dtype;
  if (!ReadDType(call.k, &dtype)) {
    faults.push_back(
        FaultText("k", DTypeText(call.k), "float16 or bfloat16, or float32 on the CPU"));
  }
  if (!CheckLikeKeys("k", call.k, 3, call, &faults)) return faults;
  if (CheckLikeKeys("v", call.v, 3, call, &faults))
    CheckSameShape("v", call.v, "k", call.k, &faults);
  CheckCaches(call, &faults);
  CheckTable(call.table, call.k, "k", &faults);
  CheckQueries(call, &faults);
  if (call.pos_encoding_mode != 0 && call.pos_encoding_mode != 1) {
    faults.push_back(FaultText("pos_encoding_mode", std::to_string(call.pos_encoding_mode),
                               "0 (none) or 1 (ROPE_LLAMA)"));
  }
  return faults;
}

namespace {

// Of a checked call.
AttentionShape ShapeOf(const AppendCall& call) {
  AttentionShape shape;
  (void)ReadDType(call.k, &shape.dtype);
  shape.batch = static_cast<int32_t>(call.k.size(0));
  shape.num_kv_heads = static_cast<int32_t>(call.k.size(1));
  shape.num_query_heads =
      call.q.has_value() ? static_cast<int32_t>(call.q->size(1)) : shape.num_kv_heads;
  shape.head_dim = static_cast<int32_t>(call.k.size(2));
  shape.page_size = static_cast<int32_t>(call.k_cache.size(1));
  shape.pos_encoding = call.pos_encoding_mode == 1 ? PosEncoding::kRopeLlama : PosEncoding::kNone;
  return shape;
}

AppendArgs ArgsOf(const AppendCall& call) {
  AppendArgs args;
  args.k = call.k.data_ptr();
  args.v = call.v.data_ptr();
  args.k_strides = RowStridesOf(call.k);
  args.v_strides = RowStridesOf(call.v);
  args.k_cache = call.k_cache.data_ptr();
  args.v_cache = call.v_cache.data_ptr();
  args.k_cache_strides = CacheStridesOf(call.k_cache);
  args.v_cache_strides = CacheStridesOf(call.v_cache);
  args.table = TableOf(call.table, call.k_cache.size(0), call.k_cache.size(1));
  if (call.q.has_value()) {
    args.q = call.q->data_ptr();
    args.q_strides = RowStridesOf(*call.q);
    args.q_out = call.q_out->data_ptr();
    args.q_out_strides = RowStridesOf(*call.q_out);
  }
  args.rope_scale = call.rope_scale;
  args.rope_theta = call.rope_theta;
  return args;
}

absl::Status Run(const AppendCall& call, const AttentionShape& shape) {
  const AppendArgs args = ArgsOf(call);
  if (call.k.is_cpu()) {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    return AppendOnCpu(shape, args);
  }
#if PGQA_WITH_CUDA
  const c10::cuda::OptionalCUDAGuard guard(call.k.device());
  return Append(shape, args, c10::cuda::getCurrentCUDAStream(call.k.get_device()).stream());
#else
  return absl::InvalidArgumentError(WithoutCudaText("k"));
#endif
}

py::object AppendTo(TableTensors table, Object k, Object v, Object k_cache, Object v_cache,
                    Object q, Object q_out, Object pos_encoding_mode, Object rope_scale,
                    Object rope_theta) {
  AppendCall call;
  call.k = ToTensor("k", k);
  call.v = ToTensor("v", v);
  call.k_cache = ToTensor("k_cache", k_cache);
  call.v_cache = ToTensor("v_cache", v_cache);
  call.table = std::move(table);
  call.q = ToOptionalTensor("q", q);
  call.q_out = ToOptionalTensor("q_out", q_out);
  call.pos_encoding_mode = ToInt("pos_encoding_mode", pos_encoding_mode);
  call.rope_scale = ToDouble("rope_scale", rope_scale);
  call.rope_theta = ToDouble("rope_theta", rope_theta);
  ThrowIfError(RunAppend(&call));
  if (!call.q.has_value()) return py::none();
  return q_out.is_none() ? ToPython(*call.q_out) : q_out;
}

py::object AppendKv(Object k, Object v, Object k_cache, Object v_cache, Object page_indptr,
                    Object page_indices, Object last_page_len, Object q, Object q_out,
                    Object pos_encoding_mode, Object rope_scale, Object rope_theta) {
  return AppendTo(ReadCsr(page_indptr, page_indices, last_page_len), k, v, k_cache, v_cache, q,
                  q_out, pos_encoding_mode, rope_scale, rope_theta);
}

py::object AppendKvBlockTable(Object k, Object v, Object k_cache, Object v_cache,
                              Object block_table, Object seq_lens, Object new_tokens, Object q,
                              Object q_out, Object pos_encoding_mode, Object rope_scale,
                              Object rope_theta) {
  return AppendTo(ReadBlockTable(block_table, seq_lens, new_tokens), k, v, k_cache, v_cache, q,
                  q_out, pos_encoding_mode, rope_scale, rope_theta);
}

}  // namespace

absl::Status RunAppend(AppendCall* call) {
  const Faults faults = CheckAppend(*call);
  if (!faults.empty()) return absl::InvalidArgumentError(faults.front());
  if (call->q.has_value() && !call->q_out.has_value())
    call->q_out = at::empty(call->q->sizes(), call->q->options().requires_grad(false));
  return Run(*call, ShapeOf(*call));
}

void DefineAppend(py::module_& m) {
  const auto q = py::arg("q") = py::none();
  const auto q_out = py::arg("q_out") = py::none();
  const auto pos_encoding = py::arg("pos_encoding_mode") = 0;
  const auto rope_scale = py::arg("rope_scale") = 1.0;
  const auto rope_theta = py::arg("rope_theta") = 10000.0;
  m.def("append_kv", &AppendKv, py::arg("k"), py::arg("v"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"), q, q_out,
        pos_encoding, rope_scale, rope_theta);
  m.def("append_kv_block_table", &AppendKvBlockTable, py::arg("k"), py::arg("v"),
        py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("seq_lens"),
        py::arg("new_tokens") = 0, q, q_out, pos_encoding, rope_scale, rope_theta);
}

}  // namespace pgqa::binding
