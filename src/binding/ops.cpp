// Operators of torch over the same checked calls as the functions of the Python module.
// SPDX-License-Identifier: Apache-2.0
#include "binding/ops.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "binding/backend.h"

namespace pgqa::binding {
namespace {

using Tensor = const at::Tensor&;
using OptionalTensor = const std::optional<at::Tensor>&;
using Scale = std::optional<double>;

// What every operator begins and ends with. All may be given by position, which costs the caller least.
constexpr char kInputs[] =
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr, Tensor page_indices, "
    "Tensor last_page_len, float? sm_scale";
constexpr char kOptions[] =
    "int window_left=-1, float logits_soft_cap=0.0, int pos_encoding_mode=0, "
    "float rope_scale=1.0, float rope_theta=10000.0, bool batch_invariant=False";

void Run(const DecodeCall& call, at::Tensor* out, at::Tensor* lse) {
  const absl::Status status = RunCall(call, out, lse);
  if (status.ok()) return;
  const std::string message(status.message());
  TORCH_CHECK_VALUE(status.code() != absl::StatusCode::kInvalidArgument, message);
  TORCH_CHECK(false, message);
}

DecodeCall MakeCall(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_indptr,
                    Tensor page_indices, Tensor last_page_len, Scale sm_scale, int64_t window_left,
                    double logits_soft_cap, int64_t pos_encoding_mode, double rope_scale,
                    double rope_theta, bool batch_invariant) {
  DecodeCall call;
  call.q = q;
  call.k_cache = k_cache;
  call.v_cache = v_cache;
  call.page_indptr = page_indptr;
  call.page_indices = page_indices;
  call.last_page_len = last_page_len;
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

torch::Library* DefineOps() {
  auto* library =
      new torch::Library(torch::Library::DEF, "pgqa", std::nullopt, "src/binding/ops.cpp", 0);
  const auto define = [library](const std::string& name, const std::string& outputs,
                                const std::string& results) {
    // Strides are the layout of a cache: a compiler that changed them would copy the cache.
    const std::string schema = name + "(" + kInputs + outputs + ", " + kOptions + ") -> " + results;
    library->def(schema.c_str(), {at::Tag::needs_exact_strides, at::Tag::pt2_compliant_tag});
  };
  define("decode", "", "Tensor");
  define("decode_with_lse", "", "(Tensor, Tensor)");
  define("decode_out", ", Tensor(a!) out, Tensor(b!)? lse=None", "()");
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    library->impl("decode", torch::dispatch(key, TORCH_FN(Decode)));
    library->impl("decode_with_lse", torch::dispatch(key, TORCH_FN(DecodeWithLse)));
    library->impl("decode_out", torch::dispatch(key, TORCH_FN(DecodeOut)));
  }
  return library;
}

}  // namespace

void RegisterOps() {
  // Never destroyed: operators may be called while the process ends.
  [[maybe_unused]] static const torch::Library* library = DefineOps();
}

}  // namespace pgqa::binding
