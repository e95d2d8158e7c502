// Append() against AppendOnCpu(): every byte, over layouts, dtypes and malformed tables.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/append_problem.h"
#include "tests/cuda/decode_problem.cuh"
#include "tests/cuda/device_memory.cuh"

namespace pgqa::testing {
namespace {

constexpr DType kHalf = DType::kFloat16;
constexpr DType kBrain = DType::kBFloat16;
constexpr PosEncoding kRope = PosEncoding::kRopeLlama;

// The buffers of a problem on the device, each its own allocation of exact size.
struct OnDevice {
  explicit OnDevice(const AppendProblem& p)
      : k(p.k),
        v(p.v),
        q(p.q),
        q_out(p.q_out),
        k_cache(p.k_cache),
        v_cache(p.v_cache),
        indptr(p.indptr),
        indices(p.indices),
        last_page_len(p.last_page_len) {}

  AppendArgs Args(const AppendProblem& p) const {
    return p.Args(k.data(), v.data(), k_cache.data(), v_cache.data(),
                  p.Table(indptr.data(), indices.data(), last_page_len.data()), q.data(),
                  q_out.data());
  }

  DeviceArray<uint8_t> k, v, q, q_out, k_cache, v_cache;
  DeviceArray<int32_t> indptr, indices, last_page_len;
};

// Expects equal 16-bit elements, or ones that differ by one rounding.
void ExpectClose(const std::vector<uint8_t>& got, const std::vector<uint8_t>& expected, DType dtype,
                 const char* what) {
  ASSERT_EQ(got.size(), expected.size());
  const double rounding = dtype == kHalf ? 1.0 / 1024 : 1.0 / 128;
  for (size_t i = 0; i + 1 < got.size(); i += 2) {
    uint16_t a = 0, b = 0;
    std::memcpy(&a, &got[i], 2);
    std::memcpy(&b, &expected[i], 2);
    if (a == b) continue;
    const double value = FromBits(b, dtype);
    ASSERT_NEAR(FromBits(a, dtype), value, rounding * std::abs(value) + 1e-6)
        << what << " " << i / 2;
  }
}

void RunBoth(const AppendSpec& spec) {
  SCOPED_TRACE(::testing::Message() << "head_dim " << spec.shape.head_dim << ", gap " << spec.gap);
  AppendProblem problem(spec);
  const OnDevice device(problem);
  const absl::Status status = Append(spec.shape, device.Args(problem), nullptr);
  ASSERT_TRUE(status.ok()) << status.message();
  Check(cudaDeviceSynchronize());
  ASSERT_TRUE(AppendOnCpu(spec.shape, problem.HostArgs()).ok());
  EXPECT_EQ(device.v_cache.Read(), problem.v_cache);
  if (spec.shape.pos_encoding == PosEncoding::kNone) {
    EXPECT_EQ(device.k_cache.Read(), problem.k_cache);
  } else {
    ExpectClose(device.k_cache.Read(), problem.k_cache, spec.shape.dtype, "k_cache");
  }
  ExpectClose(device.q.Read(), problem.q, spec.shape.dtype, "q");
  ExpectClose(device.q_out.Read(), problem.q_out, spec.shape.dtype, "q_out");
  EXPECT_EQ(device.k.Read(), problem.k) << "an input was written";
}

// Aligned and odd layouts take different kernels; head_dim 24 and 8 have halves that 16 bytes do
// not divide.
TEST(Append, EveryLayout) {
  for (const DType dtype : {kHalf, kBrain}) {
    for (const int32_t head_dim : {8, 24, 64, 128, 256}) {
      for (const int64_t gap : {0, 3, 8}) {
        for (const bool heads_first : {false, true}) {
          RunBoth({.shape = {0, 8, 2, head_dim, 16, dtype},
                   .kv_lens = {17, 0, 1, 16, 40},
                   .gap = gap,
                   .heads_first = heads_first});
        }
      }
    }
  }
}

TEST(Append, TurnedKeysAndQueries) {
  for (const DType dtype : {kHalf, kBrain}) {
    for (const int32_t head_dim : {8, 24, 128, 256}) {
      for (const int64_t gap : {0, 1}) {
        for (const bool in_place : {false, true}) {
          RunBoth({.shape = {0, 12, 3, head_dim, 16, dtype, kRope},
                   .kv_lens = {2, 0, 1, 20000},
                   .gap = gap,
                   .queries = true,
                   .in_place = in_place});
        }
      }
    }
  }
  RunBoth({.shape = {0, 4, 4, 64, 1, kBrain, kRope}, .kv_lens = {5, 3}});  // keys alone
}

TEST(Append, ManyRequests) {
  std::vector<int32_t> lengths(3000, 3);
  for (size_t i = 0; i < lengths.size(); i += 5) lengths[i] = 0;
  RunBoth({.shape = {0, 2, 2, 64, 2, kHalf}, .kv_lens = lengths});
}

TEST(Append, MalformedTablesWriteNothingOfTheirRequest) {
  for (const int32_t id : {-1, 1000, std::numeric_limits<int32_t>::max()}) {
    AppendProblem problem({.kv_lens = {9, 6}});
    problem.indices[static_cast<size_t>(problem.indptr[2]) - 1] = id;
    const OnDevice device(problem);
    ASSERT_TRUE(Append(problem.spec.shape, device.Args(problem), nullptr).ok());
    Check(cudaDeviceSynchronize());
    ASSERT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
    EXPECT_EQ(device.k_cache.Read(), problem.k_cache);
    EXPECT_EQ(device.v_cache.Read(), problem.v_cache);
  }
}

TEST(Append, RefusalsLaunchNothing) {
  const AppendProblem problem({});
  const OnDevice device(problem);
  AppendArgs args = device.Args(problem);
  args.v = nullptr;
  EXPECT_EQ(Append(problem.spec.shape, args, nullptr).message(),
            "v: got null, expected an address");
  AttentionShape shape = problem.spec.shape;
  shape.dtype = DType::kFloat32;
  EXPECT_EQ(Append(shape, device.Args(problem), nullptr).message(),
            "dtype: got float32, expected float16 or bfloat16 on a GPU");
  Check(cudaDeviceSynchronize());
  EXPECT_EQ(device.k_cache.Read(), problem.k_cache);
  EXPECT_EQ(device.v_cache.Read(), problem.v_cache);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace pgqa::testing
