// Python objects to tensors and scalars.
// SPDX-License-Identifier: Apache-2.0
#include "binding/args.h"

#include <torch/csrc/autograd/python_variable.h>

#include <sstream>
#include <stdexcept>
#include <utility>

#include "fault.h"

namespace pgqa::binding {
namespace {

[[noreturn]] void RaiseType(const char* argument, pybind11::handle object, const char* expected) {
  throw pybind11::type_error(FaultText(argument, Py_TYPE(object.ptr())->tp_name, expected));
}

}  // namespace

std::string FaultText(const char* argument, const std::string& got, const std::string& expected) {
  return Fault(argument, got, expected);
}

void ThrowIfError(const absl::Status& status) {
  if (status.ok()) return;
  const std::string message(status.message());
  if (status.code() == absl::StatusCode::kInvalidArgument) throw pybind11::value_error(message);
  throw std::runtime_error(message);
}

const at::Tensor& ToTensor(const char* argument, pybind11::handle object) {
  if (!THPVariable_Check(object.ptr())) RaiseType(argument, object, "a torch.Tensor");
  return THPVariable_Unpack(object.ptr());
}

std::optional<at::Tensor> ToOptionalTensor(const char* argument, pybind11::handle object) {
  if (object.is_none()) return std::nullopt;
  return ToTensor(argument, object);
}

pybind11::object ToPython(at::Tensor tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(tensor)));
}

std::string WithoutCudaText(const char* argument) {
  return FaultText(argument, "a CUDA tensor", "a CPU tensor: this pgqa was built without CUDA");
}

double ToDouble(const char* argument, pybind11::handle object) {
  if (PyFloat_CheckExact(object.ptr())) return PyFloat_AS_DOUBLE(object.ptr());
  // A tensor would be read, which waits for its device.
  if (PyBool_Check(object.ptr()) || THPVariable_Check(object.ptr()))
    RaiseType(argument, object, "a number");
  const double value = PyFloat_AsDouble(object.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    RaiseType(argument, object, "a number");
  }
  return value;
}

int64_t ToInt(const char* argument, pybind11::handle object) {
  if (PyBool_Check(object.ptr()) || THPVariable_Check(object.ptr()) ||
      !PyIndex_Check(object.ptr())) {
    RaiseType(argument, object, "an int");
  }
  const auto index = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Index(object.ptr()));
  if (!index) throw pybind11::error_already_set();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    throw pybind11::value_error(
        FaultText(argument, pybind11::str(index).cast<std::string>(), "a 64-bit integer"));
  }
  return value;
}

int64_t ToIntInside(const char* argument, pybind11::handle object, int64_t least, int64_t most) {
  const int64_t value = ToInt(argument, object);
  if (value >= least && value <= most) return value;
  ThrowFault(argument, std::to_string(value),
             std::to_string(least) + " to " + std::to_string(most));
}

bool ToBool(const char* argument, pybind11::handle object) {
  if (!PyBool_Check(object.ptr())) RaiseType(argument, object, "a bool");
  return object.ptr() == Py_True;
}

std::string ShapeText(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "shape " << tensor.sizes();
  return text.str();
}

}  // namespace pgqa::binding
