// Runs a problem with guarded output, LSE and workspace, and compares it with the reference.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/cuda/decode_problem.cuh"

namespace pgqa::testing {

constexpr size_t kGuard = 512;  // elements or bytes before and after; keeps 16-byte alignment
constexpr int kGuardByte = 0xA5;

// An array with guards, whose bytes must stay as they are. What lies between is not initialised.
template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(size_t size) : array_(size + 2 * kGuard) {
    Check(cudaMemset(array_.data(), kGuardByte, kGuard * sizeof(T)));
    Check(cudaMemset(data() + size, kGuardByte, kGuard * sizeof(T)));
  }
  T* data() const { return array_.data() + kGuard; }
  size_t size() const { return array_.size() - 2 * kGuard; }
  void Fill(int byte) const { Check(cudaMemset(data(), byte, size() * sizeof(T))); }
  std::vector<T> Read() const {
    std::vector<T> values(size());
    Check(cudaMemcpy(values.data(), data(), size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
  void CheckGuards() const {
    EXPECT_TRUE(IsGuard(array_.data())) << "written before the array";
    EXPECT_TRUE(IsGuard(data() + size())) << "written past the array";
  }

 private:
  static bool IsGuard(const T* guard) {
    std::vector<unsigned char> bytes(kGuard * sizeof(T));
    Check(cudaMemcpy(bytes.data(), guard, bytes.size(), cudaMemcpyDeviceToHost));
    return std::all_of(bytes.begin(), bytes.end(),
                       [](unsigned char byte) { return byte == kGuardByte; });
  }

  DeviceArray<T> array_;
};

// Everything that calls of one problem need.
class Runner {
 public:
  explicit Runner(const Problem& problem)
      : problem_(problem),
        out_(problem.OutElements()),
        lse_(problem.LseElements()),
        plan_(MakeGpuLaunchPlan(problem.Shape(), QueryDevice(0).value()).value()),
        workspace_(static_cast<size_t>(plan_.workspace_bytes)) {
    workspace_.Fill(0x7F);
  }

  WorkspaceView View() const { return {workspace_.data(), plan_.workspace_bytes}; }

  absl::Status Launch(cudaStream_t stream = nullptr) const {
    return Decode(plan_, problem_.Args(out_.data(), lse_.data()), View(), stream);
  }

  // Waits, then checks output and LSE of all requests but `unspecified`, and the guards.
  void CheckResult(const std::set<int32_t>& unspecified = {}) const {
    Check(cudaDeviceSynchronize());
    const std::vector<uint16_t> out = out_.Read();
    const std::vector<float> lse = lse_.Read();
    out_.CheckGuards();
    lse_.CheckGuards();
    workspace_.CheckGuards();
    for (int32_t request = 0; request < problem_.batch(); ++request) {
      if (unspecified.count(request) == 0) CheckRequest(request, out, lse);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  // Overwrites output and LSE with NaN.
  void Forget() const {
    out_.Fill(0xFF);
    lse_.Fill(0xFF);
    Check(cudaDeviceSynchronize());
  }

  const LaunchPlan& plan() const { return plan_; }
  const GuardedArray<unsigned char>& workspace() const { return workspace_; }
  const GuardedArray<uint16_t>& out() const { return out_; }
  const GuardedArray<float>& lse() const { return lse_; }

 private:
  void CheckRequest(int32_t request, const std::vector<uint16_t>& out,
                    const std::vector<float>& lse) const {
    const ProblemSpec& spec = problem_.spec();
    const double bound = spec.dtype == DType::kFloat16 ? 2e-3 : 1.6e-2;
    for (int32_t head = 0; head < spec.query_heads; ++head) {
      const std::vector<double> expected = problem_.Expected(request, head);
      const size_t row = static_cast<size_t>(request) * spec.query_heads + head;
      for (int32_t i = 0; i < spec.head_dim; ++i) {
        const double got = FromBits(out[row * spec.head_dim + i], spec.dtype);
        ASSERT_NEAR(got, expected[i], bound * (1 + std::abs(expected[i])))
            << "request " << request << ", head " << head << ", element " << i;
      }
      if (std::isinf(expected.back())) {
        ASSERT_EQ(lse[row], -std::numeric_limits<float>::infinity())
            << "request " << request << ", head " << head;
      } else {
        ASSERT_NEAR(lse[row], expected.back(), 2e-3) << "request " << request << ", head " << head;
      }
    }
  }

  const Problem& problem_;
  GuardedArray<uint16_t> out_;
  GuardedArray<float> lse_;
  LaunchPlan plan_;
  GuardedArray<unsigned char> workspace_;
};

inline void RunAndCheck(const ProblemSpec& spec, Unused unused = Unused::kNan) {
  const Problem problem(spec, unused);
  const Runner runner(problem);
  for (int run = 0; run < 2; ++run) {
    if (run == 1) runner.workspace().Fill(0xFF);
    const absl::Status status = runner.Launch();
    ASSERT_TRUE(status.ok()) << status.message();
    runner.CheckResult();
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace pgqa::testing
