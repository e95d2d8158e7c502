// Operators of torch over the same checked calls as the functions of the Python module.
// SPDX-License-Identifier: Apache-2.0
#include "binding/ops.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "binding/append.h"
#include "binding/args.h"
#include "binding/backend.h"

namespace pgqa::binding {
namespace {

using Tensor = const at::Tensor&;
using OptionalTensor = const std::optional<at::Tensor>&;
using Scale = std::optional<double>;

// What the operators that decode begin and end with. All may be given by position, which costs the caller least.
constexpr char kInputs[] =
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr, Tensor page_indices, "
    "Tensor last_page_len, float? sm_scale";
constexpr char kOptions[] =
    "int window_left=-1, float logits_soft_cap=0.0, int pos_encoding_mode=0, "
    "float rope_scale=1.0, float rope_theta=10000.0, bool batch_invariant=False";
constexpr char kAppendSchema[] =
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_indptr, "
    "Tensor page_indices, Tensor last_page_len, Tensor? q=None, Tensor(c!)? q_out=None, "
    "int pos_encoding_mode=0, float rope_scale=1.0, float rope_theta=10000.0) -> ()";

void Check(const absl::Status& status) {
  if (status.ok()) return;
  const std::string message(status.message());
  TORCH_CHECK_VALUE(status.code() != absl::StatusCode::kInvalidArgument, message);
  TORCH_CHECK(false, message);
}

void Run(const DecodeCall& call, at::Tensor* out, at::Tensor* lse) {
  Check(RunCall(call, out, lse));
}

DecodeCall MakeCall(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr,
                    Tensor page_indices, Tensor last_page_len, Scale sm_scale, int64_t window_left,
                    double logits_soft_cap, int64_t pos_encoding_mode, double rope_scale,
                    double rope_theta, bool batch_invariant) {
  DecodeCall call;
  call.q = q;
  call.k_cache = k_cache;
  call.v_cache = v_cache;
  call.table = {page_indptr, page_indices, last_page_len, 0};
  call.sm_scale = sm_scale;
  call.window_left = window_left;
  call.logits_soft_cap = logits_soft_cap;
  call.pos_encoding_mode = pos_encoding_mode;
  call.rope_scale = rope_scale;
  call.rope_theta = rope_theta;
  call.batch_invariant = batch_invariant;
  return call;
}

std::tuple<at::Tensor, at::Tensor> DecodeWithLse(Tensor q, Tensor k_cache, Tensor v_cache,
                                                 Tensor page_indptr, Tensor page_indices,
                                                 Tensor last_page_len, Scale sm_scale,
                                                 int64_t window_left, double logits_soft_cap,
                                                 int64_t pos_encoding_mode, double rope_scale,
                                                 double rope_theta, bool batch_invariant) {
  DecodeCall call =
      MakeCall(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
               logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, batch_invariant);
  call.return_lse = true;
  at::Tensor out;
  at::Tensor lse;
  Run(call, &out, &lse);
  return {std::move(out), std::move(lse)};
}

at::Tensor Decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr, Tensor page_indices,
                  Tensor last_page_len, Scale sm_scale, int64_t window_left, double logits_soft_cap,
                  int64_t pos_encoding_mode, double rope_scale, double rope_theta,
                  bool batch_invariant) {
  at::Tensor out;
  at::Tensor no_lse;
  Run(MakeCall(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
               logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, batch_invariant),
      &out, &no_lse);
  return out;
}

void DecodeOut(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr, Tensor page_indices,
               Tensor last_page_len, Scale sm_scale, Tensor out, OptionalTensor lse,
               int64_t window_left, double logits_soft_cap, int64_t pos_encoding_mode,
               double rope_scale, double rope_theta, bool batch_invariant) {
  DecodeCall call =
      MakeCall(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
               logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, batch_invariant);
  call.out = out;
  call.lse = lse;
  call.return_lse = lse.has_value();
  at::Tensor written_out;
  at::Tensor written_lse;
  Run(call, &written_out, &written_lse);
}

void AppendKv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor page_indptr,
              Tensor page_indices, Tensor last_page_len, OptionalTensor q, OptionalTensor q_out,
              int64_t pos_encoding_mode, double rope_scale, double rope_theta) {
  AppendCall call;
  call.k = k;
  call.v = v;
  call.k_cache = k_cache;
  call.v_cache = v_cache;
  call.table = {page_indptr, page_indices, last_page_len};
  call.q = q;
  call.q_out = q_out;
  call.pos_encoding_mode = pos_encoding_mode;
  call.rope_scale = rope_scale;
  call.rope_theta = rope_theta;
  TORCH_CHECK_VALUE(!q.has_value() || q_out.has_value(),
                    FaultText("q_out", "none", "a tensor for the turned q"));
  Check(RunAppend(&call));
}

torch::Library* DefineOps() {
  auto* library =
      new torch::Library(torch::Library::DEF, "pgqa", std::nullopt, "src/binding/ops.cpp", 0);
  // Strides are the layout of a cache: a compiler that changed them would copy the cache.
  const auto define_as = [library](const std::string& schema) {
    library->def(schema.c_str(), {at::Tag::needs_exact_strides, at::Tag::pt2_compliant_tag});
  };
  const auto define = [&](const std::string& name, const std::string& outputs,
                          const std::string& results) {
    define_as(name + "(" + kInputs + outputs + ", " + kOptions + ") -> " + results);
  };
  define("decode", "", "Tensor");
  define("decode_with_lse", "", "(Tensor, Tensor)");
  define("decode_out", ", Tensor(a!) out, Tensor(b!)? lse=None", "()");
  define_as(kAppendSchema);
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    library->impl("decode", torch::dispatch(key, TORCH_FN(Decode)));
    library->impl("decode_with_lse", torch::dispatch(key, TORCH_FN(DecodeWithLse)));
    library->impl("decode_out", torch::dispatch(key, TORCH_FN(DecodeOut)));
    library->impl("append_kv", torch::dispatch(key, TORCH_FN(AppendKv)));
  }
  return library;
}

}  // namespace

void RegisterOps() {
  // Never destroyed: operators may be called while the process ends.
  [[maybe_unused]] static const torch::Library* library = DefineOps();
}

}  // namespace pgqa::binding
