// DecodeGraph on torch tensors, which stay alive and in place as long as it does.
// SPDX-License-Identifier: Apache-2.0
#include "binding/graph.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "binding/args.h"
#include "binding/graph_tensors.h"
#include "binding/watch.h"
#include "pgqa/decode_graph.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;

// Where each of a graph's tensors lay when the graph was captured.
Watch WatchOver(const GraphTensors& tensors) {
  Watch watch("that of the capture: rebind() takes another");
  tensors.ForEach([&](const char* name, const at::Tensor& tensor) { watch.Add(name, tensor); });
  return watch;
}

class TensorGraph {
 public:
  TensorGraph(const GraphRequest& request, GraphTensors tensors)
      : request_(request),
        tensors_(std::move(tensors)),
        allocated_(AllocateMissing(request_, &tensors_)),
        device_(tensors_.k_cache.front().device()),
        graph_(Make()),
        watch_(WatchOver(tensors_)),
        streams_{CurrentStream()} {}

  void Replay(const py::object& live_batch, const py::object& num_pages) {
    watch_.Check();
    if (!num_pages.is_none()) ThrowIfError(graph_.CheckStep(0, ToInt("num_pages", num_pages)));
    const c10::cuda::CUDAStream stream = CurrentStream();
    if (stream != streams_.back()) Record(stream);
    if (c10::cuda::current_device() == device_.index()) {
      Launch(live_batch, stream);
    } else {
      const c10::cuda::CUDAGuard guard(device_);
      Launch(live_batch, stream);
    }
  }

  // By name; what is None stays.
  void Rebind(const py::dict& changes) {
    GraphTensors tensors = tensors_;
    SetTensors(changes, &tensors);
    CheckAsCaptured(tensors, tensors_);
    const GraphSpec spec = SpecOf(request_, tensors);
    const c10::cuda::OptionalCUDAGuard guard(device_);
    ThrowIfError(graph_.Rebind(spec));
    tensors_ = std::move(tensors);
    watch_ = WatchOver(tensors_);
  }

  const GraphTensors& tensors() const { return tensors_; }
  const DecodeGraph& graph() const { return graph_; }

  int64_t DeviceBytes() const {
    int64_t bytes = graph_.device_bytes();
    for (const at::Tensor& tensor : allocated_) bytes += static_cast<int64_t>(tensor.nbytes());
    return bytes;
  }

  std::vector<std::string> NodeTypes() const {
    const absl::StatusOr<std::vector<GraphNode>> nodes = graph_.Nodes();
    ThrowIfError(nodes.status());
    std::vector<std::string> types;
    for (const GraphNode& node : *nodes) {
      types.push_back(node.type == cudaGraphNodeTypeKernel
                          ? "kernel"
                          : "type " + std::to_string(static_cast<int>(node.type)));
    }
    return types;
  }

 private:
  c10::cuda::CUDAStream CurrentStream() const {
    return c10::cuda::getCurrentCUDAStream(device_.index());
  }

  DecodeGraph Make() const {
    const c10::cuda::OptionalCUDAGuard guard(device_);
    absl::StatusOr<DecodeGraph> graph = DecodeGraph::Create(SpecOf(request_, tensors_));
    ThrowIfError(graph.status());
    ThrowIfError(graph->Capture(CurrentStream().stream()));
    return *std::move(graph);
  }

  void Launch(const py::object& live_batch, cudaStream_t stream) {
    if (live_batch.is_none()) return ThrowIfError(graph_.Replay(stream));
    const int64_t live = ToInt("live_batch", live_batch);
    if (live < 0 || live > request_.max_batch) {
      ThrowFault("live_batch", std::to_string(live),
                 "0 to " + std::to_string(request_.max_batch) + " (the capacity of the graph)");
    }
    ThrowIfError(graph_.Replay(static_cast<int32_t>(live), stream));
  }

  // Tells torch's allocator of a stream that uses memory which was allocated on another.
  void Record(const c10::cuda::CUDAStream& stream) {
    const c10::cuda::CUDAGuard guard(device_);
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return;
    const auto known = std::find(streams_.begin(), streams_.end(), stream);
    if (known != streams_.end()) {
      std::iter_swap(known, streams_.end() - 1);
      return;
    }
    for (const at::Tensor& tensor : allocated_) {
      c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), stream);
    }
    streams_.push_back(stream);
  }

  GraphRequest request_;
  GraphTensors tensors_;
  std::vector<at::Tensor> allocated_;
  c10::Device device_;
  DecodeGraph graph_;
  Watch watch_;
  std::vector<c10::cuda::CUDAStream>
      streams_;  // that torch's allocator knows of; the last used last
};

using Object = const py::object&;

int64_t ReadMaxColumns(Object max_columns, Object max_pages) {
  if (!max_pages.is_none()) ThrowFault("max_pages", "a number with a block table", "none");
  const int64_t columns = ToInt("max_columns", max_columns);
  if (columns >= 0 && columns <= std::numeric_limits<int32_t>::max()) return columns;
  ThrowFault("max_columns", std::to_string(columns), "0 to 2147483647");
}

std::unique_ptr<TensorGraph> MakeGraph(const py::dict& tensors, Object num_query_heads,
                                       Object max_batch, Object max_pages, Object max_columns,
                                       Object new_tokens, Object sm_scale,
                                       const py::list& window_left, Object logits_soft_cap,
                                       Object pos_encoding_mode, Object rope_scale,
                                       Object rope_theta, Object return_lse, Object append,
                                       Object rotate_appended, Object live_batch,
                                       Object dependent_launch, Object batch_invariant) {
  GraphRequest request;
  request.num_query_heads = ToInt("num_query_heads", num_query_heads);
  request.max_batch = ToInt("max_batch", max_batch);
  if (max_columns.is_none()) {
    request.max_pages = ToInt("max_pages", max_pages);
  } else {
    request.max_columns = ReadMaxColumns(max_columns, max_pages);
  }
  request.new_tokens = ToInt("new_tokens", new_tokens);
  if (!sm_scale.is_none()) request.sm_scale = ToDouble("sm_scale", sm_scale);
  for (const py::handle window : window_left)
    request.window_left.push_back(ToInt("window_left", window));
  request.logits_soft_cap = ToDouble("logits_soft_cap", logits_soft_cap);
  request.pos_encoding_mode = ToInt("pos_encoding_mode", pos_encoding_mode);
  request.rope_scale = ToDouble("rope_scale", rope_scale);
  request.rope_theta = ToDouble("rope_theta", rope_theta);
  request.return_lse = ToBool("return_lse", return_lse);
  request.append = ToBool("append", append);
  request.rotate_appended = ToBool("rotate_appended", rotate_appended);
  request.live_batch = ToBool("live_batch", live_batch);
  request.dependent_launch = ToBool("dependent_launch", dependent_launch);
  request.batch_invariant = ToBool("batch_invariant", batch_invariant);
  GraphTensors given;
  SetTensors(tensors, &given);
  if (request.IsCsr() && given.page_indices.defined() &&
      given.page_indices.numel() != request.max_pages) {
    ThrowFault("max_pages", std::to_string(request.max_pages),
               std::to_string(given.page_indices.numel()) + ", the elements of page_indices");
  }
  if (!request.IsCsr() && given.block_table.defined() && given.block_table.dim() == 2 &&
      given.block_table.size(1) != request.max_columns) {
    ThrowFault("max_columns", std::to_string(request.max_columns),
               std::to_string(given.block_table.size(1)) + ", the columns of block_table");
  }
  return std::make_unique<TensorGraph>(request, std::move(given));
}

// Properties that hand out the tensors themselves.
void DefineTensors(py::class_<TensorGraph>* graph) {
  const auto one = [graph](const char* name, at::Tensor GraphTensors::*tensor) {
    graph->def_property_readonly(
        name, [tensor](const TensorGraph& self) { return ToPython(self.tensors().*tensor); });
  };
  one("page_indptr", &GraphTensors::page_indptr);
  one("page_indices", &GraphTensors::page_indices);
  one("last_page_len", &GraphTensors::last_page_len);
  one("block_table", &GraphTensors::block_table);
  one("seq_lens", &GraphTensors::seq_lens);
  const auto layers = [graph](const char* name, LayerTensors GraphTensors::*tensors) {
    graph->def_property_readonly(name, [tensors](const TensorGraph& self) {
      py::list list;
      for (const at::Tensor& tensor : self.tensors().*tensors) list.append(ToPython(tensor));
      return py::tuple(list);
    });
  };
  layers("q", &GraphTensors::q);
  layers("k_cache", &GraphTensors::k_cache);
  layers("v_cache", &GraphTensors::v_cache);
  layers("out", &GraphTensors::out);
  layers("lse", &GraphTensors::lse);
  layers("k", &GraphTensors::k);
  layers("v", &GraphTensors::v);
}

}  // namespace

void DefineGraph(py::module_& m) {
  py::class_<TensorGraph> graph(m, "DecodeGraph", py::module_local());
  graph
      .def(py::init(&MakeGraph), py::arg("tensors"), py::kw_only(), py::arg("num_query_heads"),
           py::arg("max_batch"), py::arg("max_pages"), py::arg("max_columns"),
           py::arg("new_tokens"), py::arg("sm_scale"), py::arg("window_left"),
           py::arg("logits_soft_cap"), py::arg("pos_encoding_mode"), py::arg("rope_scale"),
           py::arg("rope_theta"), py::arg("return_lse"), py::arg("append"),
           py::arg("rotate_appended"), py::arg("live_batch"), py::arg("dependent_launch"),
           py::arg("batch_invariant") = false)
      .def("replay", &TensorGraph::Replay, py::arg("live_batch") = py::none(), py::kw_only(),
           py::arg("num_pages") = py::none(),
           "Launches the step on the current stream, where it is being captured into that capture; "
           "does not "
           "synchronise. live_batch: rows from there on are empty requests, from now on; None: as "
           "told last, at "
           "first max_batch. num_pages: refused above max_pages, or above max_columns.")
      .def("_rebind", &TensorGraph::Rebind, py::arg("tensors"))
      .def_property_readonly("max_batch",
                             [](const TensorGraph& g) { return g.graph().spec().shape.batch; })
      .def_property_readonly("max_pages",
                             [](const TensorGraph& g) { return g.graph().spec().max_pages; })
      .def_property_readonly("max_columns",
                             [](const TensorGraph& g) -> py::object {
                               const GraphSpec& spec = g.graph().spec();
                               if (spec.IsCsr()) return py::none();
                               return py::int_(spec.max_columns);
                             })
      .def_property_readonly("live_batch",
                             [](const TensorGraph& g) { return g.graph().live_batch(); })
      .def_property_readonly("device_bytes", &TensorGraph::DeviceBytes)
      .def_property_readonly("node_types", &TensorGraph::NodeTypes)
      .def_property_readonly("executable", [](const TensorGraph& g) {
        return reinterpret_cast<uintptr_t>(g.graph().exec());
      });
  DefineTensors(&graph);
}

}  // namespace pgqa::binding
