// Owning device arrays of exact size, for tests; a failed CUDA call ends the program.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace pgqa::testing {

inline void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::abort();
}

// One cudaMalloc of exactly `size` elements, so that memcheck sees the first one past the end. Not initialised
// unless made of a vector.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t size) : size_(size) {
    Check(cudaMalloc(&data_, size * sizeof(T) + (size == 0)));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Write(values); }
  ~DeviceArray() { Check(cudaFree(data_)); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  size_t size() const { return size_; }
  void Fill(int byte) const { Check(cudaMemset(data_, byte, size_ * sizeof(T))); }
  void Write(const std::vector<T>& values) const {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  void WriteAt(size_t index, const T* values, size_t count) const {
    Check(cudaMemcpy(data() + index, values, count * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    Check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace pgqa::testing
