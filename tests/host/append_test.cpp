// Appending in host memory: which bytes of the caches change, turned rows, and refusals.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/append.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/append_problem.h"
#include "tests/host/expect_refused.h"

namespace pgqa::testing {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();

// What the caches hold once the rows are in: a copy made element by element.
std::vector<uint8_t> Appended(const AppendProblem& problem, const std::vector<uint8_t>& rows,
                              std::vector<uint8_t> cache) {
  const AttentionShape& shape = problem.spec.shape;
  const size_t bytes = shape.dtype == DType::kFloat32 ? 4 : 2;
  for (size_t request = 0; request < problem.spec.kv_lens.size(); ++request) {
    for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t slot = problem.SlotOf(request, head);
      if (slot < 0) continue;
      const int64_t row =
          static_cast<int64_t>(request) * problem.k_strides.batch + head * problem.k_strides.head;
      std::memcpy(&cache[static_cast<size_t>(slot) * bytes],
                  &rows[static_cast<size_t>(row) * bytes],
                  static_cast<size_t>(shape.head_dim) * bytes);
    }
  }
  return cache;
}

TEST(AppendOnCpu, ChangesTheNewSlotsAndNothingElse) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int32_t page_size : {1, 4, 7}) {
      for (const int64_t gap : {0, 3, 8}) {
        for (const bool heads_first : {false, true}) {
          AppendProblem problem({.shape = {0, 6, 3, 10, page_size, dtype},
                                 .kv_lens = {9, 0, 1, 4, 5, 7, 8, 0, 14},
                                 .gap = gap,
                                 .heads_first = heads_first});
          const std::vector<uint8_t> keys = Appended(problem, problem.k, problem.k_cache);
          const std::vector<uint8_t> values = Appended(problem, problem.v, problem.v_cache);
          ASSERT_NE(keys, problem.k_cache);
          ASSERT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
          EXPECT_EQ(problem.k_cache, keys);
          EXPECT_EQ(problem.v_cache, values);
        }
      }
    }
  }
}

// Of element `element` of a buffer of float32.
float At(const std::vector<uint8_t>& buffer, int64_t element) {
  float value = 0.0F;
  std::memcpy(&value, &buffer[static_cast<size_t>(element) * sizeof value], sizeof value);
  return value;
}

// The largest difference of a row from `from`, turned by `position` in fp64.
double TurnError(const AppendProblem& problem, const std::vector<uint8_t>& from, int64_t from_row,
                 const std::vector<uint8_t>& to, int64_t to_row, int64_t position, double scale,
                 double theta) {
  const int32_t half = problem.spec.shape.head_dim / 2;
  double worst = 0.0;
  for (int32_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) * std::pow(theta, -static_cast<double>(i) / half) / scale;
    const double a = At(from, from_row + i), b = At(from, from_row + half + i);
    worst = std::max(
        {worst, std::abs(At(to, to_row + i) - (a * std::cos(angle) - b * std::sin(angle))),
         std::abs(At(to, to_row + half + i) - (b * std::cos(angle) + a * std::sin(angle)))});
  }
  return worst;
}

TEST(AppendOnCpu, TurnsKeysAndQueriesByTheirPosition) {
  for (const bool in_place : {false, true}) {
    AppendProblem problem({.shape = {0, 4, 2, 34, 16, DType::kFloat32, PosEncoding::kRopeLlama},
                           .kv_lens = {1, 0, 2, 4097, 131073},
                           .gap = 1,
                           .queries = true,
                           .in_place = in_place});
    const AppendProblem before = problem;
    AppendArgs args = problem.HostArgs();
    args.rope_scale = 2.0;
    args.rope_theta = 5e5;
    ASSERT_TRUE(AppendOnCpu(problem.spec.shape, args).ok());
    EXPECT_EQ(problem.v_cache, Appended(before, before.v, before.v_cache));
    const std::vector<uint8_t>& q_out = in_place ? problem.q : problem.q_out;
    for (size_t request = 0; request < 5; ++request) {
      const int64_t position = problem.spec.kv_lens[request] - 1;
      const auto row = static_cast<int64_t>(request);
      for (int64_t head = 0; head < 2 && position >= 0; ++head) {
        EXPECT_LT(
            TurnError(before, before.k, row * before.k_strides.batch + head * before.k_strides.head,
                      problem.k_cache, before.SlotOf(request, head), position, 2.0, 5e5),
            1e-6);
      }
      for (int64_t head = 0; head < 4 && position >= 0; ++head) {
        const int64_t q_row = row * before.q_strides.batch + head * before.q_strides.head;
        EXPECT_LT(TurnError(before, before.q, q_row, q_out, q_row, position, 2.0, 5e5), 1e-6);
      }
    }
    const int64_t empty = before.q_strides.batch;  // of request 1
    for (int64_t i = 0; i < before.q_strides.batch; ++i) {
      ASSERT_EQ(At(q_out, empty + i), At(in_place ? before.q : before.q_out, empty + i))
          << "the queries of an empty request were touched";
    }
  }
}

TEST(AppendOnCpu, MalformedTablesWriteNothingOfTheirRequest) {
  for (const int32_t id : {-1, kMin, kMax, 1000}) {
    AppendProblem problem({.kv_lens = {9, 6}});
    const AppendProblem before = problem;
    AppendProblem expected = problem;
    expected.spec.kv_lens[1] = 0;  // nothing comes of request 1
    problem.indices[static_cast<size_t>(problem.indptr[2]) - 1] = id;
    ASSERT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
    EXPECT_EQ(problem.k_cache, Appended(expected, before.k, before.k_cache)) << id;
  }
  for (const int32_t value : {kMin, -1, 0, 1000, kMax}) {
    AppendProblem problem({.kv_lens = {9, 6}});
    for (std::vector<int32_t>* array : {&problem.indptr, &problem.last_page_len})
      array->assign(array->size(), value);
    EXPECT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
  }
}

TEST(AppendOnCpu, NoRequests) {
  AppendProblem problem({.kv_lens = {}});
  EXPECT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
}

TEST(ValidateAppend, RefusalsNameTheArgument) {
  AppendProblem problem({});
  const AttentionShape shape = problem.spec.shape;
  ExpectRefused<AppendArgs>(
      problem.HostArgs(),
      {{[](AppendArgs* a) { a->k = nullptr; }, "k: got null, expected an address"},
       {[](AppendArgs* a) { a->dependence = Dependence::kNothing; },
        "dependence: got 3, expected kStream or kAny"},
       {[](AppendArgs* a) { a->v = nullptr; }, "v: got null, expected an address"},
       {[](AppendArgs* a) { a->k_cache = nullptr; }, "k_cache: got null, expected an address"},
       {[](AppendArgs* a) { a->v_cache = nullptr; }, "v_cache: got null, expected an address"},
       {[](AppendArgs* a) { a->table.indptr = nullptr; },
        "page_indptr: got null, expected 6 entries"},
       {[](AppendArgs* a) { a->table.last_page_len = nullptr; },
        "last_page_len: got null, expected 5 entries"},
       {[](AppendArgs* a) { a->table.page_size = 5; },
        "page_size: got 5, expected 4, that of the shape"},
       {[](AppendArgs* a) { a->table.batch = -1; }, "batch: got -1, expected at least 0"},
       {[](AppendArgs* a) { a->rope_theta = 0.0; },
        "rope_theta: got 0, expected a finite number above 0"},
       {[](AppendArgs* a) { a->q = a->k; },
        "q: got queries to turn with pos_encoding_mode 0 (NONE), expected none, or ROPE_LLAMA"}},
      [&](const AppendArgs& args) { return AppendOnCpu(shape, args); });
}

}  // namespace
}  // namespace pgqa::testing
