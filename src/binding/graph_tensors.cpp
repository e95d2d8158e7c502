// Allocates and checks the tensors of a decode graph, layer by layer.
// SPDX-License-Identifier: Apache-2.0
#include "binding/graph_tensors.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>
#include <utility>

#include "binding/append.h"
#include "binding/args.h"
#include "binding/checks.h"
#include "binding/tensor_checks.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;

// Raises the first of `faults`.
void RaiseFirst(const Faults& faults, size_t layer, size_t num_layers) {
  if (faults.empty()) return;
  const std::string where = num_layers > 1 ? " (layer " + std::to_string(layer) + ")" : "";
  ThrowValueError(faults.front() + where);
}

void CheckInside(const char* name, int64_t value, int64_t least) {
  if (value >= least && value <= std::numeric_limits<int32_t>::max()) return;
  ThrowFault(name, std::to_string(value), std::to_string(least) + " to 2147483647");
}

// That the arrays are of the kind of table that the request names.
void CheckTableKind(const GraphRequest& request, const GraphTensors& tensors) {
  const auto expect_none = [](const char* name, const at::Tensor& tensor, const char* got) {
    if (tensor.defined()) ThrowFault(name, got, "none");
  };
  if (request.IsCsr()) {
    CheckInside("max_pages", request.max_pages, 0);
    expect_none("block_table", tensors.block_table, "a tensor without max_columns");
    expect_none("seq_lens", tensors.seq_lens, "a tensor without max_columns or block_table");
    if (request.new_tokens != 0)
      ThrowFault("new_tokens", std::to_string(request.new_tokens), "0 without a block table");
  } else {
    constexpr char kGot[] = "a tensor with a block table";
    expect_none("page_indptr", tensors.page_indptr, kGot);
    expect_none("page_indices", tensors.page_indices, kGot);
    expect_none("last_page_len", tensors.last_page_len, kGot);
  }
}

// What allocation relies on; the rest is checked once the tensors are complete.
void CheckBeforeAllocation(const GraphRequest& request, const GraphTensors& tensors) {
  if (tensors.k_cache.empty()) ThrowFault("k_cache", "no tensor", "one for each layer");
  const at::Tensor& cache = tensors.k_cache.front();
  if (!cache.is_cuda()) ThrowFault("k_cache", DeviceText(cache), "one on a CUDA device");
  if (cache.dim() != 4) ThrowFault("k_cache", ShapeText(cache), "rank 4");
  CheckInside("num_query_heads", request.num_query_heads, 1);
  CheckInside("max_batch", request.max_batch, 1);
  CheckTableKind(request, tensors);
  const size_t num_layers = tensors.k_cache.size();
  if (request.window_left.size() != num_layers) {
    ThrowFault("window_left", std::to_string(request.window_left.size()) + " numbers",
               std::to_string(num_layers) + ", one for each layer");
  }
}

void CheckCount(const char* name, const LayerTensors& tensors, size_t num_layers) {
  if (tensors.size() == num_layers) return;
  ThrowFault(name, std::to_string(tensors.size()) + " tensors",
             std::to_string(num_layers) + ", one for each layer");
}

// One tensor [layers, ...] and its layers, where `tensors` has none.
void AllocateLayers(size_t num_layers, std::vector<int64_t> shape, at::ScalarType dtype,
                    c10::Device device, LayerTensors* tensors, std::vector<at::Tensor>* allocated) {
  if (!tensors->empty()) return;
  shape.insert(shape.begin(), static_cast<int64_t>(num_layers));
  const at::Tensor all = at::detail::empty_cuda(shape, dtype, device, std::nullopt);
  for (size_t layer = 0; layer < num_layers; ++layer)
    tensors->push_back(all.select(0, static_cast<int64_t>(layer)));
  allocated->push_back(all);
}

TableTensors TableOf(const GraphRequest& request, const GraphTensors& t) {
  if (request.IsCsr()) return {t.page_indptr, t.page_indices, t.last_page_len, 0};
  return {{}, t.block_table, t.seq_lens, request.new_tokens};
}

DecodeCall DecodeCallOf(const GraphRequest& request, const GraphTensors& t, size_t layer) {
  DecodeCall call;
  call.q = t.q[layer];
  call.k_cache = t.k_cache[layer];
  call.v_cache = t.v_cache[layer];
  call.table = TableOf(request, t);
  call.sm_scale = request.sm_scale;
  call.window_left = request.window_left[layer];
  call.logits_soft_cap = request.logits_soft_cap;
  call.pos_encoding_mode = request.pos_encoding_mode;
  call.rope_scale = request.rope_scale;
  call.rope_theta = request.rope_theta;
  call.out = t.out[layer];
  call.return_lse = request.return_lse;
  call.batch_invariant = request.batch_invariant;
  if (request.return_lse) call.lse = t.lse[layer];
  return call;
}

AppendCall AppendCallOf(const GraphRequest& request, const GraphTensors& t, size_t layer) {
  AppendCall call;
  call.k = t.k[layer];
  call.v = t.v[layer];
  call.k_cache = t.k_cache[layer];
  call.v_cache = t.v_cache[layer];
  call.table = TableOf(request, t);
  return call;
}

GraphLayer LayerOf(const GraphRequest& request, const GraphTensors& t, size_t layer,
                   const AttentionOptions& options) {
  GraphLayer l;
  l.q = t.q[layer].data_ptr();
  l.q_strides = RowStridesOf(t.q[layer]);
  l.k_cache = t.k_cache[layer].data_ptr();
  l.v_cache = t.v_cache[layer].data_ptr();
  l.k_cache_strides = CacheStridesOf(t.k_cache[layer]);
  l.v_cache_strides = CacheStridesOf(t.v_cache[layer]);
  if (request.append) {
    l.k = t.k[layer].data_ptr();
    l.v = t.v[layer].data_ptr();
    l.k_strides = RowStridesOf(t.k[layer]);
    l.v_strides = RowStridesOf(t.v[layer]);
  }
  l.out = t.out[layer].data_ptr();
  if (request.return_lse) l.lse = static_cast<float*>(t.lse[layer].data_ptr());
  l.options = options;
  return l;
}

void SetTable(const GraphRequest& request, const GraphTensors& t, GraphSpec* spec) {
  const auto address = [](const at::Tensor& tensor) {
    return static_cast<const int32_t*>(tensor.data_ptr());
  };
  if (request.IsCsr()) {
    spec->max_pages = t.page_indices.numel();
    spec->page_indptr = address(t.page_indptr);
    spec->page_indices = address(t.page_indices);
    spec->last_page_len = address(t.last_page_len);
  } else {
    spec->max_columns = static_cast<int32_t>(t.block_table.size(1));
    spec->block_table = address(t.block_table);
    spec->block_table_stride = StrideOf(t.block_table, 0);
    spec->seq_lens = address(t.seq_lens);
    spec->new_tokens = static_cast<int32_t>(request.new_tokens);
  }
}

// That a layer is of the first one's shape, and its caches of as many pages.
void CheckLikeFirst(const AttentionShape& shape, const AttentionShape& first,
                    const at::Tensor& cache, int64_t num_pages, Faults* faults) {
  using graph_key_internal::Fields;
  if (Fields(shape) == Fields(first) && cache.size(0) == num_pages) return;
  faults->push_back(FaultText("k_cache", ShapeText(cache) + ", " + DTypeText(cache),
                              "the shape and dtype of layer 0"));
}

}  // namespace

void SetTensors(const py::dict& named, GraphTensors* tensors) {
  const auto given = [&](const char* name) -> py::object {
    return named.contains(name) ? py::object(named[name]) : py::none();
  };
  GraphTensors::Visit(
      *tensors,
      [&](const char* name, at::Tensor& tensor) {
        if (const py::object object = given(name); !object.is_none())
          tensor = ToTensor(name, object);
      },
      [&](const char* name, LayerTensors& layers) {
        const py::object object = given(name);
        if (object.is_none()) return;
        layers.clear();
        for (const py::handle item : object) layers.push_back(ToTensor(name, item));
      });
}

std::vector<at::Tensor> AllocateMissing(const GraphRequest& request, GraphTensors* tensors) {
  CheckBeforeAllocation(request, *tensors);
  const at::Tensor& cache = tensors->k_cache.front();
  const size_t num_layers = tensors->k_cache.size();
  const c10::Device device = cache.device();
  const at::ScalarType dtype = cache.scalar_type();
  const c10::cuda::OptionalCUDAGuard guard(device);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
    ThrowFault("stream", "one that is being captured", "one that is not: make the graph before");
  std::vector<at::Tensor> allocated;
  const auto table = [&](at::IntArrayRef sizes, int value, at::Tensor* tensor) {
    if (tensor->defined()) return;
    *tensor = at::detail::empty_cuda(sizes, at::kInt, device, std::nullopt).fill_(value);
    allocated.push_back(*tensor);
  };
  if (request.IsCsr()) {
    table({request.max_batch + 1}, 0, &tensors->page_indptr);
    table({request.max_pages}, 0, &tensors->page_indices);
    table({request.max_batch}, 0, &tensors->last_page_len);
  } else {
    table({request.max_batch, request.max_columns}, 0, &tensors->block_table);
    table({request.max_batch}, -1, &tensors->seq_lens);
  }
  const std::vector<int64_t> queries{request.max_batch, request.num_query_heads, cache.size(3)};
  const std::vector<int64_t> rows{request.max_batch, cache.size(2), cache.size(3)};
  AllocateLayers(num_layers, queries, dtype, device, &tensors->q, &allocated);
  AllocateLayers(num_layers, queries, dtype, device, &tensors->out, &allocated);
  if (request.return_lse) {
    AllocateLayers(num_layers, {request.max_batch, request.num_query_heads}, at::kFloat, device,
                   &tensors->lse, &allocated);
  }
  if (request.append) {
    AllocateLayers(num_layers, rows, dtype, device, &tensors->k, &allocated);
    AllocateLayers(num_layers, rows, dtype, device, &tensors->v, &allocated);
  }
  return allocated;
}

GraphSpec SpecOf(const GraphRequest& request, const GraphTensors& tensors) {
  const size_t num_layers = tensors.k_cache.size();
  CheckCount("v_cache", tensors.v_cache, num_layers);
  CheckCount("q", tensors.q, num_layers);
  CheckCount("out", tensors.out, num_layers);
  CheckCount("lse", tensors.lse, request.return_lse ? num_layers : 0);
  CheckCount("k", tensors.k, request.append ? num_layers : 0);
  CheckCount("v", tensors.v, request.append ? num_layers : 0);
  GraphSpec spec;
  for (size_t layer = 0; layer < num_layers; ++layer) {
    AttentionShape shape;
    AttentionOptions options;
    Faults faults = CheckCall(DecodeCallOf(request, tensors, layer), &shape, &options);
    if (faults.empty() && request.append)
      faults = CheckAppend(AppendCallOf(request, tensors, layer));
    if (layer == 0) {
      spec.shape = shape;
      spec.num_pages = tensors.k_cache[0].dim() == 4 ? tensors.k_cache[0].size(0) : 0;
    }
    if (faults.empty())
      CheckLikeFirst(shape, spec.shape, tensors.k_cache[layer], spec.num_pages, &faults);
    RaiseFirst(faults, layer, num_layers);
    spec.layers.push_back(LayerOf(request, tensors, layer, options));
  }
  const auto check_asked = [](const char* name, int64_t asked, int64_t bound, const char* of) {
    if (asked == bound) return;
    ThrowFault(name, std::to_string(asked), std::to_string(bound) + ", " + of);
  };
  check_asked("max_batch", request.max_batch, spec.shape.batch, "the batch of q");
  check_asked("num_query_heads", request.num_query_heads, spec.shape.num_query_heads,
              "the heads of q");
  SetTable(request, tensors, &spec);
  spec.live_batch = request.live_batch;
  spec.dependent_launch = request.dependent_launch;
  spec.return_lse = request.return_lse;
  spec.append = request.append;
  spec.rotate_appended = request.rotate_appended;
  return spec;
}

void CheckAsCaptured(const GraphTensors& got, const GraphTensors& expected) {
  // Which there are, first: tensors are compared one by one below.
  std::vector<size_t> counts;
  GraphTensors::Visit(
      expected,
      [&](const char*, const at::Tensor& tensor) { counts.push_back(tensor.defined() ? 1 : 0); },
      [&](const char*, const LayerTensors& tensors) { counts.push_back(tensors.size()); });
  size_t i = 0;
  GraphTensors::Visit(
      got,
      [&](const char* name, const at::Tensor& tensor) {
        if (counts[i++] == 0 && tensor.defined())
          ThrowFault(name, "a tensor", "none: the graph has another kind of page table");
      },
      [&](const char* name, const LayerTensors& tensors) {
        CheckCount(name, tensors, counts[i++]);
      });
  std::vector<at::Tensor> captured;
  expected.ForEach([&](const char*, const at::Tensor& tensor) { captured.push_back(tensor); });
  i = 0;
  got.ForEach([&](const char* name, const at::Tensor& tensor) {
    const at::Tensor& old = captured[i++];
    const bool is_block_table = name == std::string("block_table");
    const size_t first = tensor.dim() == 4 || name == std::string("page_indices") ? 1 : 0;
    const size_t count = tensor.sizes().size() - first - (is_block_table ? 1 : 0);
    if (tensor.scalar_type() != old.scalar_type())
      ThrowFault(name, DTypeText(tensor), DTypeText(old) + " as captured");
    if (tensor.dim() != old.dim() ||
        tensor.sizes().slice(first, count) != old.sizes().slice(first, count))
      ThrowFault(name, ShapeText(tensor), ShapeText(old) + " as captured");
  });
}

}  // namespace pgqa::binding
