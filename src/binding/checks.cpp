// Checks the tensors and scalars of a decode call.
// SPDX-License-Identifier: Apache-2.0
#include "binding/checks.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "binding/args.h"
#include "binding/tensor_checks.h"
#include "pgqa/validate.h"

namespace pgqa::binding {
namespace {

void CheckCaches(const DecodeCall& call, Faults* faults) {
  const at::Tensor& q = call.q;
  const struct {
    const char* name;
    const at::Tensor& cache;
  } caches[] = {{"k_cache", call.k_cache}, {"v_cache", call.v_cache}};
  for (const auto& [name, cache] : caches) {
    if (!CheckDense(name, cache, 4, q, faults)) continue;
    if (cache.scalar_type() != q.scalar_type()) {
      faults->push_back(FaultText(name, DTypeText(cache), "that of q, " + DTypeText(q)));
    }
    if (q.dim() == 3 && cache.size(3) != q.size(2)) {
      faults->push_back(FaultText(name, "head_dim " + std::to_string(cache.size(3)),
                                  "that of q, " + std::to_string(q.size(2))));
    }
    CheckRows(name, cache, faults);
  }
  if (call.k_cache.dim() == 4 && call.v_cache.dim() == 4 &&
      call.k_cache.sizes() != call.v_cache.sizes()) {
    faults->push_back(FaultText("v_cache", ShapeText(call.v_cache),
                                "that of k_cache, " + ShapeText(call.k_cache)));
  }
}

// What the call reads.
std::array<const at::Tensor*, 6> InputsOf(const DecodeCall& call) {
  return {&call.q,
          &call.k_cache,
          &call.v_cache,
          &call.table.indptr,
          &call.table.indices,
          &call.table.lengths};
}

void CheckOut(const DecodeCall& call, Faults* faults) {
  if (!call.out.has_value()) return;
  const at::Tensor& out = *call.out;
  if (!CheckDense("out", out, 3, call.q, faults)) return;
  if (out.scalar_type() != call.q.scalar_type()) {
    faults->push_back(FaultText("out", DTypeText(out), "that of q, " + DTypeText(call.q)));
  }
  if (out.sizes() != call.q.sizes()) {
    faults->push_back(FaultText("out", ShapeText(out), "that of q, " + ShapeText(call.q)));
  }
  if (!out.is_contiguous())
    faults->push_back(FaultText("out", "a strided tensor", "a contiguous one"));
  if (out.is_cuda() && reinterpret_cast<uintptr_t>(out.data_ptr()) % kGpuRowBytes != 0) {
    faults->push_back(
        FaultText("out", "rows that are not 16-byte aligned", "16-byte aligned rows"));
  }
  CheckOwnMemory("out", out, InputsOf(call), faults);
}

// That `written` shares no memory with `out` either.
void CheckApartFromOut(const char* name, const at::Tensor& written, const DecodeCall& call,
                       Faults* faults) {
  if (!call.out.has_value() || call.out->layout() != at::kStrided || !Overlap(written, *call.out))
    return;
  faults->push_back(FaultText(name, "memory that overlaps out", "memory of its own"));
}

void CheckLse(const DecodeCall& call, Faults* faults) {
  if (!call.lse.has_value()) return;
  const at::Tensor& lse = *call.lse;
  if (!CheckDense("lse", lse, 2, call.q, faults)) return;
  if (lse.scalar_type() != at::kFloat)
    faults->push_back(FaultText("lse", DTypeText(lse), "dtype Float (float32)"));
  if (call.q.dim() == 3 && lse.sizes() != call.q.sizes().slice(0, 2)) {
    faults->push_back(
        FaultText("lse", ShapeText(lse), "[batch, query_heads] of q, " + ShapeText(call.q)));
  }
  if (!lse.is_contiguous())
    faults->push_back(FaultText("lse", "a strided tensor", "a contiguous one"));
  CheckOwnMemory("lse", lse, InputsOf(call), faults);
  CheckApartFromOut("lse", lse, call, faults);
}

void CheckWorkspace(const DecodeCall& call, Faults* faults) {
  if (!call.workspace.has_value()) return;
  const at::Tensor& workspace = *call.workspace;
  CheckDevice("workspace", workspace, call.q, "q", faults);
  if (workspace.layout() != at::kStrided || !workspace.is_contiguous()) {
    faults->push_back(FaultText("workspace", "a strided or sparse tensor", "a contiguous one"));
    return;
  }
  if (workspace.is_cuda() &&
      reinterpret_cast<uintptr_t>(workspace.data_ptr()) % kGpuRowBytes != 0) {
    faults->push_back(
        FaultText("workspace", "an address that is not 16-byte aligned", "a 16-byte aligned one"));
  }
  CheckOwnMemory("workspace", workspace, InputsOf(call), faults);
  CheckApartFromOut("workspace", workspace, call, faults);
}

int32_t ReadInt32(const char* name, int64_t value, Faults* faults) {
  if (value >= std::numeric_limits<int32_t>::min() &&
      value <= std::numeric_limits<int32_t>::max()) {
    return static_cast<int32_t>(value);
  }
  faults->push_back(FaultText(name, std::to_string(value), "a 32-bit integer"));
  return 0;
}

// A finite number that float32 would make infinite or 0 is refused.
float ReadFloat(const char* name, double value, Faults* faults) {
  const auto narrow = static_cast<float>(value);
  const bool fits =
      !std::isfinite(value) || (std::isfinite(narrow) && (narrow != 0.0F) == (value != 0.0));
  if (fits) return narrow;
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  faults->push_back(FaultText(name, text, "a number of float32's range"));
  return 0.0F;
}

void ReadOptions(const DecodeCall& call, AttentionOptions* options, Faults* faults) {
  const double head_dim = call.q.dim() == 3 ? static_cast<double>(call.q.size(2)) : 1.0;
  options->sm_scale =
      ReadFloat("sm_scale", call.sm_scale.value_or(1.0 / std::sqrt(head_dim)), faults);
  options->window_left = ReadInt32("window_left", call.window_left, faults);
  options->logits_soft_cap = ReadFloat("logits_soft_cap", call.logits_soft_cap, faults);
  options->rope_scale = call.rope_scale;
  options->rope_theta = call.rope_theta;
  const std::vector<std::string> more = OptionFaults(*options);
  faults->insert(faults->end(), more.begin(), more.end());
  if (call.pos_encoding_mode != 0 && call.pos_encoding_mode != 1) {
    faults->push_back(FaultText("pos_encoding_mode", std::to_string(call.pos_encoding_mode),
                                "0 (none) or 1 (ROPE_LLAMA)"));
  }
}

void ReadShape(const DecodeCall& call, AttentionShape* shape, Faults* faults) {
  shape->batch = ReadInt32("q", call.q.size(0), faults);
  shape->num_query_heads = ReadInt32("q", call.q.size(1), faults);
  shape->head_dim = ReadInt32("q", call.q.size(2), faults);
  shape->page_size = ReadInt32("k_cache", call.k_cache.size(1), faults);
  shape->num_kv_heads = ReadInt32("k_cache", call.k_cache.size(2), faults);
  shape->pos_encoding = call.pos_encoding_mode == 1 ? PosEncoding::kRopeLlama : PosEncoding::kNone;
  shape->batch_invariant = call.batch_invariant;
  const std::vector<std::string> more =
      ShapeFaults(*shape, call.q.is_cuda() ? Backend::kGpu : Backend::kCpu);
  faults->insert(faults->end(), more.begin(), more.end());
}

}  // namespace

CacheStrides CacheStridesOf(const at::Tensor& cache) {
  return {StrideOf(cache, 0), StrideOf(cache, 1), StrideOf(cache, 2)};
}

PageTableView TableOf(const DecodeCall& call) {
  return TableOf(call.table, call.k_cache.size(0), call.k_cache.size(1));
}

Faults CheckCall(const DecodeCall& call, AttentionShape* shape, AttentionOptions* options) {
  Faults faults;
  if (!call.q.is_cuda() && !call.q.is_cpu()) {
    faults.push_back(FaultText("q", DeviceText(call.q), "one on a CUDA device or the CPU"));
  }
  if (!ReadDType(call.q, &shape->dtype)) {
    faults.push_back(
        FaultText("q", DTypeText(call.q), "float16 or bfloat16, or float32 on the CPU"));
  }
  const bool dense = CheckDense("q", call.q, 3, call.q, &faults);
  if (dense) CheckRows("q", call.q, &faults);
  CheckCaches(call, &faults);
  if (dense && call.k_cache.dim() == 4) ReadShape(call, shape, &faults);
  CheckTable(call.table, call.q, "q", &faults);
  ReadOptions(call, options, &faults);
  CheckOut(call, &faults);
  CheckLse(call, &faults);
  CheckWorkspace(call, &faults);
  return faults;
}

}  // namespace pgqa::binding
