// Plan: a step planned once for its layers, each a call whose tensors are checked and bound beforehand.
// SPDX-License-Identifier: Apache-2.0
#include "binding/step_plan.h"

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "binding/args.h"
#include "binding/backend.h"
#include "binding/read_call.h"
#include "binding/watch.h"
#if PGQA_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "pgqa/step_plan.h"
#include "pgqa/workspace.h"
#endif

namespace pgqa::binding {
namespace {

namespace py = pybind11;
using Object = const py::object&;

constexpr char kExpected[] = "that which was bound: bind a new call";

// What the calls of a step share.
struct Step {
  TableTensors table;
  AttentionShape shape;
  int32_t window_left = -1;
  bool is_planned = false;
#if PGQA_WITH_CUDA
  LaunchPlan plan;
  std::optional<Workspace> memory = {};  // the calls' workspace, then the plan of the step

  WorkspaceView CallWorkspace() const { return {memory->View().data, plan.workspace_bytes}; }
  void* StepPlan() const {
    return static_cast<char*>(memory->View().data) + AlignedBytes(plan.workspace_bytes);
  }
#endif
};

// A checked call with all its tensors.
class PlannedCall {
 public:
  PlannedCall(std::shared_ptr<Step> step, DecodeCall call, const AttentionOptions& options)
      : step_(std::move(step)), call_(std::move(call)), options_(options), watch_(kExpected) {
    const at::Tensor& q = call_.q;
    if (!call_.out.has_value()) call_.out = at::empty(q.sizes(), q.options().requires_grad(false));
    if (call_.return_lse) {
      call_.lse =
          at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat).requires_grad(false));
    }
    result_ = ToPython(*call_.out);
    if (call_.return_lse) result_ = py::make_tuple(result_, ToPython(*call_.lse));
    watch_.Add("q", q);
    watch_.Add("k_cache", call_.k_cache);
    watch_.Add("v_cache", call_.v_cache);
    watch_.Add("page_indptr", call_.table.indptr);
    watch_.Add("page_indices", call_.table.indices);
    watch_.Add("last_page_len", call_.table.lengths);
    watch_.Add("out", *call_.out);
    if (call_.lse.has_value()) watch_.Add("lse", *call_.lse);
#if PGQA_WITH_CUDA
    if (!q.is_cuda()) return;
    args_ = DecodeArgsOf(call_, options_, *call_.out, call_.lse.value_or(at::Tensor()));
    args_.step_plan = step_->StepPlan();
#endif
  }

  const py::object& Run() const {
    if (!step_->is_planned)
      throw std::runtime_error(FaultText("plan", "none yet", "plan() before run()"));
    watch_.Check();
    if (!call_.q.is_cuda()) {
      ThrowIfError(
          RunOnCpu(call_, step_->shape, options_, *call_.out, call_.lse.value_or(at::Tensor())));
      return result_;
    }
#if PGQA_WITH_CUDA
    const c10::cuda::OptionalCUDAGuard guard(call_.q.device());
    const auto stream = c10::cuda::getCurrentCUDAStream(call_.q.get_device());
    ThrowIfError(Decode(step_->plan, args_, step_->CallWorkspace(), stream.stream()));
#endif
    return result_;
  }

 protected:
  const std::shared_ptr<Step>& step() const { return step_; }
  const at::Tensor& query() const { return call_.q; }
  const Watch& watch() const { return watch_; }

 private:
  std::shared_ptr<Step> step_;
  DecodeCall call_;
  AttentionOptions options_;
  Watch watch_;
  py::object result_;
#if PGQA_WITH_CUDA
  DecodeArgs args_;
#endif
};

struct CheckedCall {
  DecodeCall call;
  AttentionShape shape;
  AttentionOptions options;
};

CheckedCall Check(DecodeCall call, Object out, Object return_lse) {
  call.out = ToOptionalTensor("out", out);
  call.return_lse = ToBool("return_lse", return_lse);
  CheckedCall checked{std::move(call), {}, {}};
  const Faults faults = CheckCall(checked.call, &checked.shape, &checked.options);
  if (!faults.empty()) ThrowValueError(faults.front());
  return checked;
}

// The first call of a step, which says what all its calls have in common.
class TensorPlan : public PlannedCall {
 public:
  explicit TensorPlan(CheckedCall first)
      : PlannedCall(MakeStep(first), first.call, first.options) {}

  void Plan() {
    watch().Check();
#if PGQA_WITH_CUDA
    const at::Device device = step()->table.lengths.device();
    if (device.is_cuda()) {
      const c10::cuda::OptionalCUDAGuard guard(device);
      const auto stream = c10::cuda::getCurrentCUDAStream(device.index());
      const StepPlanArgs args{TableOf(step()->table, 0, step()->shape.page_size),
                              step()->window_left, step()->StepPlan(), step()->CallWorkspace()};
      ThrowIfError(PlanStep(step()->plan, args, stream.stream()));
    }
#endif
    step()->is_planned = true;
  }

  std::unique_ptr<PlannedCall> Bind(Object q, Object k_cache, Object v_cache, Object sm_scale,
                                    Object logits_soft_cap, Object rope_scale, Object rope_theta,
                                    Object out, Object return_lse) const {
    const AttentionShape& shape = step()->shape;
    const bool turned = shape.pos_encoding == PosEncoding::kRopeLlama;
    CheckedCall checked =
        Check(ReadCall(q, k_cache, v_cache, step()->table, sm_scale, py::int_(step()->window_left),
                       logits_soft_cap, py::int_(turned ? 1 : 0), rope_scale, rope_theta),
              out, return_lse);
    const auto same = [](const char* name, int64_t got, int64_t expected) {
      if (got == expected) return;
      ThrowFault(name, std::to_string(got), std::to_string(expected) + " as planned");
    };
    same("query_heads", checked.shape.num_query_heads, shape.num_query_heads);
    same("kv_heads", checked.shape.num_kv_heads, shape.num_kv_heads);
    same("head_dim", checked.shape.head_dim, shape.head_dim);
    same("page_size", checked.shape.page_size, shape.page_size);
    if (checked.shape.dtype != shape.dtype)
      ThrowFault("q", DTypeText(checked.call.q), DTypeText(query()) + " as planned");
    return std::make_unique<PlannedCall>(step(), std::move(checked.call), checked.options);
  }

 private:
  static std::shared_ptr<Step> MakeStep(const CheckedCall& first) {
    auto step = std::make_shared<Step>();
    step->table = first.call.table;
    step->shape = first.shape;
    step->window_left = first.options.window_left;
    if (!first.call.q.is_cuda()) return step;
#if PGQA_WITH_CUDA
    const c10::cuda::OptionalCUDAGuard guard(first.call.q.device());
    step->plan = ValueOrThrow(GpuPlan(first.shape, first.call.q.get_device()));
    const int64_t call_bytes = AlignedBytes(step->plan.workspace_bytes);
    step->memory = ValueOrThrow(Workspace::Create(call_bytes + StepPlanBytes(step->plan)));
#else
    ThrowValueError(WithoutCudaText("q"));
#endif
    return step;
  }
};

std::unique_ptr<TensorPlan> MakePlan(Object q, Object k_cache, Object v_cache, Object page_indptr,
                                     Object page_indices, Object last_page_len, Object sm_scale,
                                     Object window_left, Object logits_soft_cap,
                                     Object pos_encoding_mode, Object rope_scale, Object rope_theta,
                                     Object out, Object return_lse) {
  return std::make_unique<TensorPlan>(Check(
      ReadCall(q, k_cache, v_cache, ReadCsr(page_indptr, page_indices, last_page_len), sm_scale,
               window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
      out, return_lse));
}

}  // namespace

void DefineStepPlan(py::module_& m) {
  py::class_<PlannedCall>(m, "PlannedCall", py::module_local(),
                          "A call of a planned step, its tensors checked and bound.")
      .def("run", &PlannedCall::Run,
           "Computes the call on the current stream and returns its tensors, always the same: out, "
           "or (out, lse). RuntimeError before plan(), and where a tensor has lost its memory.");
  py::class_<TensorPlan, PlannedCall>(
      m, "Plan", py::module_local(),
      "The calls of a decode step, planned once a step for all layers that share the page table "
      "and the window.\n\nTakes the arguments of pgqa.decode, for the first layer; bind() adds the "
      "others. After the table has been rewritten in place, plan() has to come before the next "
      "run() of any of them: behind an older plan outputs are undefined, until the next plan(). "
      "May be captured in a CUDA graph, which must not outlive the plan. The "
      "calls share a workspace: they run one after another, on one stream or ordered streams.")
      .def(py::init(&MakePlan), py::arg("q"), py::arg("k_cache"), py::arg("v_cache"),
           py::arg("page_indptr"), py::arg("page_indices"), py::arg("last_page_len"),
           py::arg("sm_scale") = py::none(), py::kw_only(), py::arg("window_left") = -1,
           py::arg("logits_soft_cap") = 0.0, py::arg("pos_encoding_mode") = 0,
           py::arg("rope_scale") = 1.0, py::arg("rope_theta") = 10000.0,
           py::arg("out") = py::none(), py::arg("return_lse") = false)
      .def("plan", &TensorPlan::Plan,
           "Plans the step from the present values of the page table, on the current stream and "
           "without synchronisation.")
      .def("bind", &TensorPlan::Bind,
           "The call of another layer, with tensors and scalars of its own. ValueError names what "
           "does not fit.",
           py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("sm_scale") = py::none(),
           py::kw_only(), py::arg("logits_soft_cap") = 0.0, py::arg("rope_scale") = 1.0,
           py::arg("rope_theta") = 10000.0, py::arg("out") = py::none(),
           py::arg("return_lse") = false);
}

}  // namespace pgqa::binding
