// Python objects to tensors and scalars, with errors that name the argument.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace pgqa::binding {

// "<argument>: got <x>, expected <y>", as everywhere in pgqa.
std::string FaultText(const char* argument, const std::string& got, const std::string& expected);

// Raises ValueError for InvalidArgument, RuntimeError for any other error.
void ThrowIfError(const absl::Status& status);

[[noreturn]] inline void ThrowValueError(const std::string& message) {
  throw pybind11::value_error(message);
}

[[noreturn]] inline void ThrowFault(const char* argument, const std::string& got,
                                    const std::string& expected) {
  ThrowValueError(FaultText(argument, got, expected));
}

template <class T>
T ValueOrThrow(absl::StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

// A tensor. Raises TypeError for anything else.
const at::Tensor& ToTensor(const char* argument, pybind11::handle object);
std::optional<at::Tensor> ToOptionalTensor(const char* argument, pybind11::handle object);

// The tensor as Python sees it.
pybind11::object ToPython(at::Tensor tensor);

// The fault of a CUDA tensor where there are no kernels.
std::string WithoutCudaText(const char* argument);

// Numbers; bool is not one. Raises TypeError for other types, ValueError where the value does not fit.
double ToDouble(const char* argument, pybind11::handle object);
int64_t ToInt(const char* argument, pybind11::handle object);
int64_t ToIntInside(const char* argument, pybind11::handle object, int64_t least, int64_t most);
bool ToBool(const char* argument, pybind11::handle object);

std::string ShapeText(const at::Tensor& tensor);

}  // namespace pgqa::binding
