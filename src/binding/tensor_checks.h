// Checks of single tensors that every call shares: each adds one text a fault, and reads no values.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "pgqa/types.h"

namespace pgqa::binding {

using Faults = std::vector<std::string>;

// Alignment of every row that the GPU reads or writes.
inline constexpr int64_t kGpuRowBytes = 16;

std::string DeviceText(const at::Tensor& tensor);
std::string DTypeText(const at::Tensor& tensor);

// False for a dtype that no call takes.
bool ReadDType(const at::Tensor& tensor, DType* dtype);

// The stride of a dimension, 0 where its size is 1.
int64_t StrideOf(const at::Tensor& tensor, int64_t dim);

// Of rows [batch, heads, head_dim].
inline RowStrides RowStridesOf(const at::Tensor& rows) {
  return {StrideOf(rows, 0), StrideOf(rows, 1)};
}

// That the memory holds the values: torch negates some views only when they are read.
void CheckResolved(const char* name, const at::Tensor& tensor, Faults* faults);

// Rank, grad, the device of `like` and a dense layout. False when later checks would have nothing
// to stand on.
bool CheckDense(const char* name, const at::Tensor& tensor, int64_t rank, const at::Tensor& like,
                Faults* faults, const char* like_name = "q");

// That a tensor lies where `like` does.
void CheckDevice(const char* name, const at::Tensor& tensor, const at::Tensor& like,
                 const char* like_name, Faults* faults);

// That rows are contiguous.
void CheckContiguousRows(const char* name, const at::Tensor& tensor, Faults* faults);

// That rows are contiguous and, on the GPU, aligned.
void CheckRows(const char* name, const at::Tensor& tensor, Faults* faults);

// That a one-dimensional tensor has `expected` elements, which are `meaning`.
void CheckSize(const char* name, const at::Tensor& tensor, int64_t expected, const char* meaning,
               Faults* faults);

// A dense int32 tensor of `rank` dimensions. False when its shape and strides do not count.
bool CheckIntTensor(const char* name, const at::Tensor& tensor, int64_t rank, Faults* faults);

// One array of a page table: int32, one-dimensional, contiguous.
void CheckIndexTensor(const char* name, const at::Tensor& tensor, Faults* faults);

// Whether two dense tensors share bytes; an undefined one has none.
bool Overlap(const at::Tensor& a, const at::Tensor& b);

// That what the call writes shares no memory with what it reads.
void CheckOwnMemory(const char* name, const at::Tensor& written,
                    absl::Span<const at::Tensor* const> inputs, Faults* faults);

}  // namespace pgqa::binding
