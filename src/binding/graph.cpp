// DecodeGraph on torch tensors, which stay alive and in place as long as it does.
// SPDX-License-Identifier: Apache-2.0
#include "binding/graph.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "binding/args.h"
#include "binding/graph_tensors.h"
#include "pgqa/decode_graph.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;

// Where each of a graph's tensors lay when the graph was captured.
class Watch {
 public:
  explicit Watch(const GraphTensors& tensors) {
    tensors.ForEach([&](const char* name, const at::Tensor& tensor) {
      entries_.push_back({name, tensor, tensor.const_data_ptr()});
    });
  }

  // Raises RuntimeError where a tensor has been given other memory since, or none.
  void Check() const {
    for (const Entry& entry : entries_) {
      if (entry.tensor.const_data_ptr() == entry.address) continue;
      throw std::runtime_error(FaultText(entry.name, "a tensor whose memory was freed or replaced",
                                         "that of the capture: rebind() takes another"));
    }
  }

 private:
  struct Entry {
    const char* name;
    at::Tensor tensor;
    const void* address;
  };
  std::vector<Entry> entries_;
};

class TensorGraph {
 public:
  TensorGraph(const GraphRequest& request, GraphTensors tensors)
      : request_(request),
        tensors_(std::move(tensors)),
        allocated_(AllocateMissing(request_, &tensors_)),
        device_(tensors_.k_cache.front().device()),
        graph_(Make()),
        watch_(tensors_),
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
    watch_ = Watch(tensors_);
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
      throw py::value_error(
          FaultText("live_batch", std::to_string(live),
                    "0 to " + std::to_string(request_.max_batch) + " (the capacity of the graph)"));
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

std::unique_ptr<TensorGraph> MakeGraph(const py::dict& tensors, Object num_query_heads,
                                       Object max_batch, Object max_pages, Object sm_scale,
                                       const py::list& window_left, Object logits_soft_cap,
                                       Object pos_encoding_mode, Object rope_scale,
                                       Object rope_theta, Object return_lse, Object append,
                                       Object rotate_appended, Object live_batch,
                                       Object dependent_launch, Object batch_invariant) {
  GraphRequest request;
  request.num_query_heads = ToInt("num_query_heads", num_query_heads);
  request.max_batch = ToInt("max_batch", max_batch);
  request.max_pages = ToInt("max_pages", max_pages);
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
  if (given.page_indices.defined() && given.page_indices.numel() != request.max_pages) {
    throw py::value_error(
        FaultText("max_pages", std::to_string(request.max_pages),
                  std::to_string(given.page_indices.numel()) + ", the elements of page_indices"));
  }
  return std::make_unique<TensorGraph>(request, std::move(given));
}

py::object Wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// Properties that hand out the tensors themselves.
void DefineTensors(py::class_<TensorGraph>* graph) {
  const auto one = [graph](const char* name, at::Tensor GraphTensors::*tensor) {
    graph->def_property_readonly(
        name, [tensor](const TensorGraph& self) { return Wrapped(self.tensors().*tensor); });
  };
  one("page_indptr", &GraphTensors::page_indptr);
  one("page_indices", &GraphTensors::page_indices);
  one("last_page_len", &GraphTensors::last_page_len);
  const auto layers = [graph](const char* name, LayerTensors GraphTensors::*tensors) {
    graph->def_property_readonly(name, [tensors](const TensorGraph& self) {
      py::list list;
      for (const at::Tensor& tensor : self.tensors().*tensors) list.append(Wrapped(tensor));
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
           py::arg("max_batch"), py::arg("max_pages"), py::arg("sm_scale"), py::arg("window_left"),
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
           "first max_batch. num_pages: refused above max_pages.")
      .def("_rebind", &TensorGraph::Rebind, py::arg("tensors"))
      .def_property_readonly("max_batch",
                             [](const TensorGraph& g) { return g.graph().spec().shape.batch; })
      .def_property_readonly("max_pages",
                             [](const TensorGraph& g) { return g.graph().spec().max_pages; })
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
