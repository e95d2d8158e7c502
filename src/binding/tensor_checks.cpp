// Checks of single tensors that every call shares.
// SPDX-License-Identifier: Apache-2.0
#include "binding/tensor_checks.h"

#include <ATen/core/grad_mode.h>

#include "binding/args.h"

namespace pgqa::binding {

std::string DeviceText(const at::Tensor& tensor) { return "a tensor on " + tensor.device().str(); }

std::string DTypeText(const at::Tensor& tensor) {
  return std::string("dtype ") + c10::toString(tensor.scalar_type());
}

bool ReadDType(const at::Tensor& tensor, DType* dtype) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      *dtype = DType::kFloat16;
      return true;
    case at::kBFloat16:
      *dtype = DType::kBFloat16;
      return true;
    case at::kFloat:
      *dtype = DType::kFloat32;
      return true;
    default:
      return false;
  }
}

void CheckResolved(const char* name, const at::Tensor& tensor, Faults* faults) {
  if (!tensor.is_neg()) return;
  faults->push_back(FaultText(name, "a view to be negated when read", "one after resolve_neg()"));
}

bool CheckDense(const char* name, const at::Tensor& tensor, int64_t rank, const at::Tensor& like,
                Faults* faults, const char* like_name) {
  if (tensor.layout() != at::kStrided) {
    faults->push_back(FaultText(name, "a sparse tensor", "a dense one"));
    return false;
  }
  if (tensor.dim() != rank) {
    faults->push_back(FaultText(name, ShapeText(tensor), "rank " + std::to_string(rank)));
    return false;
  }
  CheckResolved(name, tensor, faults);
  CheckDevice(name, tensor, like, like_name, faults);
  if (tensor.requires_grad() && at::GradMode::is_enabled()) {
    faults->push_back(FaultText(name, "a tensor that requires grad",
                                "none while grad mode is on: there is no backward"));
  }
  return true;
}

void CheckDevice(const char* name, const at::Tensor& tensor, const at::Tensor& like,
                 const char* like_name, Faults* faults) {
  if (tensor.device() == like.device()) return;
  faults->push_back(
      FaultText(name, DeviceText(tensor), "one on " + like.device().str() + " like " + like_name));
}

void CheckContiguousRows(const char* name, const at::Tensor& tensor, Faults* faults) {
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) {
    faults->push_back(
        FaultText(name, "last-dimension stride " + std::to_string(tensor.stride(last)), "1"));
  }
}

void CheckRows(const char* name, const at::Tensor& tensor, Faults* faults) {
  CheckContiguousRows(name, tensor, faults);
  const int64_t last = tensor.dim() - 1;
  if (!tensor.is_cuda()) return;
  if (tensor.numel() > 0 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kGpuRowBytes != 0) {
    faults->push_back(FaultText(name, "rows that are not 16-byte aligned", "16-byte aligned rows"));
  }
  const int64_t unit = kGpuRowBytes / static_cast<int64_t>(tensor.element_size());
  for (int64_t dim = 0; dim < last; ++dim) {
    if (StrideOf(tensor, dim) % unit != 0) {
      faults->push_back(FaultText(
          name,
          "stride " + std::to_string(tensor.stride(dim)) + " in dimension " + std::to_string(dim),
          "a multiple of " + std::to_string(unit) + " elements (16-byte aligned rows)"));
    }
  }
}

void CheckSize(const char* name, const at::Tensor& tensor, int64_t expected, const char* meaning,
               Faults* faults) {
  if (tensor.dim() != 1 || tensor.numel() == expected) return;
  faults->push_back(FaultText(name, std::to_string(tensor.numel()) + " elements",
                              std::to_string(expected) + " (" + meaning + ")"));
}

bool Overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!b.defined() || b.layout() != at::kStrided || a.numel() == 0 || b.numel() == 0 ||
      !a.is_alias_of(b))
    return false;
  const auto range = [](const at::Tensor& t) {
    const char* begin = static_cast<const char*>(t.data_ptr());
    int64_t last = 0;
    for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
    return std::pair(begin, begin + (last + 1) * static_cast<int64_t>(t.element_size()));
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

int64_t StrideOf(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) <= 1 ? 0 : tensor.stride(dim);
}

bool CheckIntTensor(const char* name, const at::Tensor& tensor, int64_t rank, Faults* faults) {
  if (tensor.scalar_type() != at::kInt)
    faults->push_back(FaultText(name, DTypeText(tensor), "dtype Int (int32)"));
  CheckResolved(name, tensor, faults);
  if (tensor.layout() != at::kStrided) {
    faults->push_back(FaultText(name, "a sparse tensor", "a dense one"));
    return false;
  }
  if (tensor.dim() == rank) return true;
  faults->push_back(FaultText(name, ShapeText(tensor), "rank " + std::to_string(rank)));
  return false;
}

void CheckIndexTensor(const char* name, const at::Tensor& tensor, Faults* faults) {
  if (CheckIntTensor(name, tensor, 1, faults) && !tensor.is_contiguous()) {
    faults->push_back(
        FaultText(name, "stride " + std::to_string(tensor.stride(0)), "a contiguous tensor"));
  }
}

void CheckOwnMemory(const char* name, const at::Tensor& written,
                    absl::Span<const at::Tensor* const> inputs, Faults* faults) {
  for (const at::Tensor* input : inputs) {
    if (!Overlap(written, *input)) continue;
    faults->push_back(FaultText(name, "memory that overlaps an input", "memory of its own"));
    return;
  }
}

}  // namespace pgqa::binding
