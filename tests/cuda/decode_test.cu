// Decode() without torch: small calls against a host reference, malformed tables, and refusals; for sanitizers too.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/cuda/decode_run.cuh"

namespace pgqa::testing {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr DType kHalf = DType::kFloat16;
constexpr DType kBrain = DType::kBFloat16;

// Each row differs in what can go wrong in it: padding of the head dim, row blocks of a group, pages cut by
// stages, one head or several a worker, RoPE, window, cap.
const ProblemSpec kSpecs[] = {
    {{0, 1, 17, 40}, 4, 1, 64, 16, kBrain},
    {{33, 0}, 2, 2, 8, 1, kHalf},
    {{5, 70, 0}, 5, 1, 80, 3, kBrain, true},
    {{64, 65}, 16, 2, 128, 16, kHalf, false, 20},
    {{129, 3}, 9, 1, 128, 5, kBrain, true, 63},
    {{30}, 33, 1, 128, 16, kBrain},
    {{30, 50}, 17, 1, 72, 7, kHalf, true, -1, 5.0F},
    {{20, 33}, 14, 2, 256, 16, kBrain, false, 0, 3.0F},
    {{40, 1}, 32, 1, 256, 32, kHalf, true},
    {{90}, 128, 1, 64, 16, kBrain, false, 50},
    {{200, 100}, 8, 8, 64, 64, kBrain, true, 100, 30.0F},
};

class DecodeSpecs : public ::testing::TestWithParam<ProblemSpec> {};

TEST_P(DecodeSpecs, MeetsTheReference) { RunAndCheck(GetParam()); }

TEST_P(DecodeSpecs, NeverReadsUnusedSlots) { RunAndCheck(GetParam(), Unused::kNothing); }

INSTANTIATE_TEST_SUITE_P(Small, DecodeSpecs, ::testing::ValuesIn(kSpecs));

TEST(DecodeMerge, OneRequestOverManyWorkers) {
  RunAndCheck({{2500}, 4, 1, 64, 16, kBrain});
  RunAndCheck({{1800, 700}, 12, 1, 128, 16, kHalf, true});
  RunAndCheck({{900}, 20, 2, 256, 1, kBrain});
}

TEST(DecodeMerge, ManyRequestsOfOneTokenBesideALongOne) {
  std::vector<int32_t> lengths(40, 1);
  lengths[20] = 1500;
  RunAndCheck({lengths, 4, 2, 64, 16, kHalf});
}

// Each warp plans alone up to 32 requests; CTAs plan together beyond.
TEST(DecodeBatch, EveryPlanningPath) {
  for (const size_t batch : {32U, 33U, 256U, 257U}) {
    SCOPED_TRACE(::testing::Message() << "batch " << batch);
    std::vector<int32_t> lengths(batch, 3);
    for (size_t i = 0; i < batch; i += 7) lengths[i] = 0;
    lengths[batch / 2] = 100;
    RunAndCheck({lengths, 2, 1, 64, 16, kBrain});
  }
}

TEST(DecodeBatch, NothingButEmptyRequests) {
  RunAndCheck({{0, 0, 0}, 4, 1, 64, 16, kHalf});
  RunAndCheck({std::vector<int32_t>(300, 0), 4, 1, 64, 16, kBrain, true, 5});
}

TEST(DecodeBatch, NoRequestLaunchesNothing) {
  const Problem problem(ProblemSpec{{}});
  const Runner runner(problem);
  EXPECT_TRUE(runner.Launch().ok());
  runner.CheckResult();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// The last of three requests, or its row, holds `value`s where they may be anything.
enum class Where { kIndptrEnd, kIndptrStart, kIndices, kLastPageLen };

void RunMalformed(Where where, int32_t value, bool rope) {
  SCOPED_TRACE(::testing::Message() << "place " << static_cast<int>(where) << ", value " << value);
  const Problem problem({{40, 33, 100}, 8, 2, 64, 16, kBrain, rope});
  const Runner runner(problem);
  std::set<int32_t> unspecified = {2};
  switch (where) {
    case Where::kIndptrEnd:
      problem.indptr.WriteAt(3, &value, 1);
      break;
    case Where::kIndptrStart:
      problem.indptr.WriteAt(0, &value, 1);
      unspecified = {0};
      break;
    case Where::kIndices:
      for (size_t entry = 6; entry < problem.indices.size(); ++entry)
        problem.indices.WriteAt(entry, &value, 1);
      break;
    case Where::kLastPageLen:
      problem.last_page_len.WriteAt(2, &value, 1);
      break;
  }
  ASSERT_TRUE(runner.Launch().ok());
  runner.CheckResult(unspecified);
}

TEST(DecodeMalformed, OtherRequestsAreRight) {
  for (const bool rope : {false, true}) {
    for (const int32_t value : {kMin, -1, 1, 12, 13, 1000, kMax})
      RunMalformed(Where::kIndptrEnd, value, rope);
    for (const int32_t value : {kMin, -1, 2, 5, kMax})
      RunMalformed(Where::kIndptrStart, value, rope);
    for (const int32_t value : {kMin, -1, 14, 65536, kMax})
      RunMalformed(Where::kIndices, value, rope);
    for (const int32_t value : {kMin, -1, 0, 17, kMax})
      RunMalformed(Where::kLastPageLen, value, rope);
  }
}

TEST(DecodeMalformed, EveryValueAbsurd) {
  for (const int32_t value : {kMin, -1, 7, kMax}) {
    for (const size_t batch : {3U, 40U, 300U}) {
      const Problem problem({std::vector<int32_t>(batch, 2), 2, 1, 64, 16, kBrain});
      const Runner runner(problem);
      for (const auto* array : {&problem.indptr, &problem.indices, &problem.last_page_len}) {
        array->Write(std::vector<int32_t>(array->size(), value));
      }
      ASSERT_TRUE(runner.Launch().ok());
      Check(cudaDeviceSynchronize());
    }
  }
}

std::string RefusalOf(const LaunchPlan& plan, const DecodeArgs& args, const WorkspaceView& view) {
  const absl::Status status = Decode(plan, args, view, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(DecodeRefusals, NameTheArgument) {
  const Problem problem(ProblemSpec{});
  const Runner runner(problem);
  runner.out().Fill(kGuardByte);
  const WorkspaceView view = runner.View();
  const DecodeArgs good = problem.Args(runner.out().data(), nullptr);
  const auto expect_refused = [&](const char* argument, const DecodeArgs& args,
                                  const WorkspaceView& workspace) {
    EXPECT_EQ(RefusalOf(runner.plan(), args, workspace).find(std::string(argument) + ": got "), 0U)
        << argument;
  };
  DecodeArgs args = good;
  args.q = nullptr;
  expect_refused("q", args, view);
  args = good;
  args.k_cache = static_cast<const char*>(good.k_cache) + 2;
  expect_refused("k_cache", args, view);
  args = good;
  args.v_strides.token += 1;
  expect_refused("v_cache", args, view);
  args = good;
  args.out = nullptr;
  expect_refused("out", args, view);
  args = good;
  args.table.page_size = 17;
  expect_refused("page_size", args, view);
  args = good;
  args.options.window_left = -2;
  expect_refused("window_left", args, view);
  args = good;
  args.options.sm_scale = std::numeric_limits<float>::quiet_NaN();
  expect_refused("sm_scale", args, view);
  WorkspaceView small = view;
  small.bytes -= 1;
  expect_refused("workspace", good, small);
  small = view;
  small.data = nullptr;
  expect_refused("workspace", good, small);
  Check(cudaDeviceSynchronize());
  for (const uint16_t value : runner.out().Read())
    ASSERT_EQ(value, 0xA5A5) << "a refused call wrote";
  ASSERT_TRUE(runner.Launch().ok());
  runner.CheckResult();
}

}  // namespace
}  // namespace pgqa::testing
