// Module functions that look at plans and page tables without computing.
// SPDX-License-Identifier: Apache-2.0
#include "binding/inspect.h"

#include <ATen/Parallel.h>
#include <pybind11/stl.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <vector>

#include "binding/args.h"
#include "binding/backend.h"
#include "binding/table.h"
#include "binding/tensor_checks.h"
#include "pgqa/schedule.h"
#include "pgqa/validate.h"

namespace pgqa::binding {
namespace {

namespace py = pybind11;

// An H200, where no GPU is asked: shapes and tables can be looked at on any machine.
constexpr int32_t kDefaultSms = 132;
constexpr int32_t kDefaultSharedMemory = 232448;

// Takes torch.bfloat16 or "bfloat16".
DType ReadDType(const py::object& dtype) {
  std::string name = py::str(dtype);
  if (name.rfind("torch.", 0) == 0) name = name.substr(6);
  if (name == "float16") return DType::kFloat16;
  if (name == "bfloat16") return DType::kBFloat16;
  if (name == "float32") return DType::kFloat32;
  ThrowFault("dtype", name, "float16, bfloat16 or float32");
}

PosEncoding ReadPosEncoding(int mode) {
  if (mode == 0) return PosEncoding::kNone;
  if (mode == 1) return PosEncoding::kRopeLlama;
  ThrowFault("pos_encoding_mode", std::to_string(mode), "0 (none) or 1 (ROPE_LLAMA)");
}

AttentionShape MakeShape(int32_t num_query_heads, int32_t num_kv_heads, int32_t head_dim,
                         int32_t page_size, const py::object& dtype, int pos_encoding_mode) {
  return {.batch = 0,
          .num_query_heads = num_query_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .page_size = page_size,
          .dtype = ReadDType(dtype),
          .pos_encoding = ReadPosEncoding(pos_encoding_mode)};
}

std::vector<std::string> SupportsShape(const std::string& device, const py::object& dtype,
                                       int32_t num_query_heads, int32_t num_kv_heads,
                                       int32_t head_dim, int32_t page_size, float sm_scale,
                                       int32_t window_left, float logits_soft_cap,
                                       int pos_encoding_mode, double rope_scale,
                                       double rope_theta) {
  std::vector<std::string> faults;
  const auto add = [&](const std::vector<std::string>& more) {
    faults.insert(faults.end(), more.begin(), more.end());
  };
  const bool cuda = device.rfind("cuda", 0) == 0;
  if (!cuda && device != "cpu") faults.push_back(FaultText("device", device, "cuda or cpu"));
#if !PGQA_WITH_CUDA
  if (cuda) faults.push_back(FaultText("device", device, "cpu: this pgqa was built without CUDA"));
#endif
  try {
    const AttentionShape shape =
        MakeShape(num_query_heads, num_kv_heads, head_dim, page_size, dtype, pos_encoding_mode);
    add(ShapeFaults(shape, cuda ? Backend::kGpu : Backend::kCpu));
  } catch (const py::value_error& error) {
    faults.emplace_back(error.what());
  }
  add(OptionFaults({sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta}));
  return faults;
}

// The plan for a device: None is an H200 with num_sms SMs, "cpu" the CPU executor, an int or "cuda:N" that GPU.
LaunchPlan PlanFor(const AttentionShape& shape, const py::object& device, int32_t num_sms) {
  if (device.is_none()) {
    return ValueOrThrow(MakeGpuLaunchPlan(
        shape, {.num_sms = num_sms, .shared_memory_per_block_optin = kDefaultSharedMemory}));
  }
  const std::string name = py::str(device);
  if (name == "cpu") return ValueOrThrow(MakeCpuLaunchPlan(shape, at::get_num_threads()));
#if PGQA_WITH_CUDA
  const std::string digits = name.rfind("cuda:", 0) == 0 ? name.substr(5)
                             : name == "cuda"            ? "0"
                                                         : name;
  if (!digits.empty() && digits.size() < 5 &&
      digits.find_first_not_of("0123456789") == std::string::npos) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess) (void)cudaGetLastError();
    if (std::stoi(digits) >= devices) {
      ThrowFault("device", name, "one of " + std::to_string(devices) + " visible CUDA devices");
    }
    return ValueOrThrow(GpuPlan(shape, std::stoi(digits)));
  }
#endif
  ThrowFault("device", name,
             PGQA_WITH_CUDA ? "None, cpu or the number of a CUDA device"
                            : "None or cpu: this pgqa was built without CUDA");
}

int64_t WorkspaceBytes(int32_t num_query_heads, int32_t num_kv_heads, int32_t head_dim,
                       int32_t page_size, const py::object& dtype, int pos_encoding_mode,
                       const py::object& device, bool batch_invariant, const py::object& batch,
                       const py::object& num_indices) {
  AttentionShape shape =
      MakeShape(num_query_heads, num_kv_heads, head_dim, page_size, dtype, pos_encoding_mode);
  shape.batch_invariant = batch_invariant;
  const auto count = [batch_invariant](const char* name, const py::object& object, int64_t most) {
    if (!batch_invariant && object.is_none()) return int64_t{0};
    if (object.is_none()) ThrowFault(name, "None", "the table's with batch_invariant");
    return ToIntInside(name, object, 0, most);
  };
  const LaunchPlan plan = PlanFor(shape, device, kDefaultSms);
  const auto requests = static_cast<int32_t>(count("batch", batch, INT32_MAX));
  return ValueOrThrow(WorkspaceFor(plan, requests, count("num_indices", num_indices, INT64_MAX)))
      .bytes;
}

// A host copy of an index tensor; waits for the device where it lies on one.
at::Tensor ToHost(const char* name, const py::object& object) {
  const at::Tensor& tensor = ToTensor(name, object);
  std::vector<std::string> faults;
  CheckIndexTensor(name, tensor, &faults);
  if (!faults.empty()) ThrowValueError(faults.front());
  return tensor.cpu();
}

PageTableView HostTable(const at::Tensor& indptr, const at::Tensor& last_page_len,
                        int32_t page_size) {
  if (indptr.numel() != last_page_len.numel() + 1) {
    ThrowFault("page_indptr", std::to_string(indptr.numel()) + " elements",
               std::to_string(last_page_len.numel() + 1) + " (batch + 1)");
  }
  PageTableView table;
  table.indptr = indptr.data_ptr<int32_t>();
  table.last_page_len = last_page_len.data_ptr<int32_t>();
  table.batch = static_cast<int32_t>(last_page_len.numel());
  table.page_size = page_size;
  // Large enough for every row: what can be wrong is the rows themselves.
  table.num_indices = std::max(0, *std::max_element(table.indptr, table.indptr + table.batch + 1));
  return table;
}

Schedule MakeSchedule(const py::object& page_indptr, const py::object& last_page_len,
                      int32_t num_query_heads, int32_t num_kv_heads, int32_t head_dim,
                      int32_t page_size, const py::object& dtype, int32_t window_left,
                      int pos_encoding_mode, int32_t num_sms, const py::object& device,
                      bool batch_invariant) {
  const at::Tensor indptr = ToHost("page_indptr", page_indptr);
  const at::Tensor last = ToHost("last_page_len", last_page_len);
  AttentionShape shape =
      MakeShape(num_query_heads, num_kv_heads, head_dim, page_size, dtype, pos_encoding_mode);
  shape.batch_invariant = batch_invariant;
  const LaunchPlan plan = PlanFor(shape, device, num_sms);
  return ValueOrThrow(Schedule::Make(plan.partition, HostTable(indptr, last, page_size),
                                     window_left, plan.segment_tokens));
}

void ValidateTable(const py::object& page_indptr, const py::object& page_indices,
                   const py::object& last_page_len, int64_t num_pages, int32_t page_size) {
  const at::Tensor indptr = ToHost("page_indptr", page_indptr);
  const at::Tensor indices = ToHost("page_indices", page_indices);
  const at::Tensor last = ToHost("last_page_len", last_page_len);
  PageTableView table = HostTable(indptr, last, page_size);
  table.indices = indices.data_ptr<int32_t>();
  table.num_indices = indices.numel();
  table.num_pages = num_pages;
  ThrowIfError(ValidatePageTable(table));
}

// A checked block table, its lengths on the host; waits for the device where they lie on one.
TableTensors ToHostLengths(const py::object& block_table, const py::object& seq_lens,
                           const py::object& new_tokens) {
  TableTensors table = ReadBlockTable(block_table, seq_lens, new_tokens);
  Faults faults;
  CheckTableLayout(table, &faults);
  if (!faults.empty()) ThrowValueError(faults.front());
  if (table.indices.size(0) != table.lengths.numel()) {
    ThrowFault("block_table", ShapeText(table.indices),
               std::to_string(table.lengths.numel()) + " rows (of seq_lens)");
  }
  table.lengths = table.lengths.cpu();
  return table;
}

Schedule MakeBlockTableSchedule(const py::object& block_table, const py::object& seq_lens,
                                const py::object& new_tokens, int32_t num_query_heads,
                                int32_t num_kv_heads, int32_t head_dim, int32_t page_size,
                                const py::object& dtype, int32_t window_left, int pos_encoding_mode,
                                int32_t num_sms, const py::object& device, bool batch_invariant) {
  const TableTensors table = ToHostLengths(block_table, seq_lens, new_tokens);
  AttentionShape shape =
      MakeShape(num_query_heads, num_kv_heads, head_dim, page_size, dtype, pos_encoding_mode);
  shape.batch_invariant = batch_invariant;
  const LaunchPlan plan = PlanFor(shape, device, num_sms);
  return ValueOrThrow(Schedule::Make(plan.partition, TableOf(table, /*num_pages=*/0, page_size),
                                     window_left, plan.segment_tokens));
}

void ValidateBlockTable(const py::object& block_table, const py::object& seq_lens,
                        int64_t num_pages, int32_t page_size, const py::object& new_tokens) {
  TableTensors table = ToHostLengths(block_table, seq_lens, new_tokens);
  table.indices = table.indices.cpu();
  ThrowIfError(ValidatePageTable(TableOf(table, num_pages, page_size)));
}

py::list PiecesOf(const Schedule& schedule, int32_t worker) {
  if (worker < 0 || worker >= schedule.num_workers()) {
    throw py::index_error(FaultText("worker", std::to_string(worker),
                                    "one of 0 to " + std::to_string(schedule.num_workers() - 1)));
  }
  py::list pieces;
  for (const Piece& piece : schedule.PiecesOf(worker)) {
    py::dict entry;
    entry["request"] = piece.request;
    entry["head_group"] = piece.head_group;
    entry["first_tile"] = piece.first_tile;
    entry["num_tiles"] = piece.num_tiles;
    entry["request_tiles"] = piece.request_tiles;
    entry["slot"] = schedule.SlotOf(worker, piece);
    pieces.append(entry);
  }
  return pieces;
}

void DefineSchedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", py::module_local(),
                       "The work partition of one page table; str() prints it.")
      .def("__str__", &Schedule::ToString)
      .def("__repr__", &Schedule::ToString)
      .def("__eq__", [](const Schedule& a, const Schedule& b) { return a == b; })
      .def("pieces", &PiecesOf, py::arg("worker"),
           "The pieces of a worker, in order, as dicts; slot -1: none.")
      .def_property_readonly("batch", &Schedule::batch)
      .def_property_readonly("num_workers", &Schedule::num_workers)
      .def_property_readonly("num_pieces", &Schedule::num_pieces)
      .def_property_readonly("num_workers_with_partials", &Schedule::NumWorkersWithPartials)
      .def_property_readonly("heads_per_worker",
                             [](const Schedule& s) { return s.partition().heads_per_worker; })
      .def_property_readonly("tile_tokens",
                             [](const Schedule& s) { return s.partition().tile_tokens; })
      .def_property_readonly("segment_tokens",
                             [](const Schedule& s) { return s.partition().segment_tokens; })
      .def_property_readonly("active_workers_per_axis",
                             [](const Schedule& s) { return s.partition().active_workers; });
  // What both schedules take by name, in this order.
  const auto define = [&m](const char* name, auto function, auto... table) {
    m.def(name, function, table..., py::arg("num_query_heads"), py::arg("num_kv_heads"),
          py::arg("head_dim"), py::arg("page_size"), py::arg("dtype") = "bfloat16",
          py::arg("window_left") = -1, py::arg("pos_encoding_mode") = 0,
          py::arg("num_sms") = kDefaultSms, py::arg("device") = py::none(),
          py::arg("batch_invariant") = false);
  };
  define("schedule", &MakeSchedule, py::arg("page_indptr"), py::arg("last_page_len"),
         py::kw_only());
  define("schedule_block_table", &MakeBlockTableSchedule, py::arg("block_table"),
         py::arg("seq_lens"), py::kw_only(), py::arg("new_tokens") = 0);
}

py::dict WorkspaceUsage() {
  py::dict usage;
#if PGQA_WITH_CUDA
  const PoolUsage pool = GetPoolUsage();
  usage["workspaces"] = pool.workspaces;
  usage["bytes"] = pool.bytes;
#endif
  return usage;
}

}  // namespace

void DefineInspection(py::module_& m) {
  DefineSchedule(m);
  m.def("supports_shape", &SupportsShape, py::kw_only(), py::arg("device") = "cuda",
        py::arg("dtype") = "bfloat16", py::arg("num_query_heads"), py::arg("num_kv_heads"),
        py::arg("head_dim"), py::arg("page_size") = 16, py::arg("sm_scale") = 1.0,
        py::arg("window_left") = -1, py::arg("logits_soft_cap") = 0.0,
        py::arg("pos_encoding_mode") = 0, py::arg("rope_scale") = 1.0,
        py::arg("rope_theta") = 10000.0);
  m.def("workspace_bytes", &WorkspaceBytes, py::kw_only(), py::arg("num_query_heads"),
        py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("page_size") = 16,
        py::arg("dtype") = "bfloat16", py::arg("pos_encoding_mode") = 0,
        py::arg("device") = py::none(), py::arg("batch_invariant") = false,
        py::arg("batch") = py::none(), py::arg("num_indices") = py::none());
  m.def("validate_page_table", &ValidateTable, py::arg("page_indptr"), py::arg("page_indices"),
        py::arg("last_page_len"), py::arg("num_pages"), py::arg("page_size"));
  m.def("validate_block_table", &ValidateBlockTable, py::arg("block_table"), py::arg("seq_lens"),
        py::arg("num_pages"), py::arg("page_size"), py::kw_only(), py::arg("new_tokens") = 0);
  m.def("workspace_usage", &WorkspaceUsage);
}

}  // namespace pgqa::binding
