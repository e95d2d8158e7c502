// Tests of the CPU executor against a dense fp64 reference, on poisoned tensors.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/cpu_executor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "cpu_problem.h"

namespace pgqa::testing {
namespace {

TEST(CpuExecutor, EveryGroupSize) {
  for (const DType dtype : kAllDTypes) {
    for (const int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 71}) {
      ProblemSpec spec = SpecOf(group, 2, 64, 16, dtype);
      spec.kv_lens = {1, 47, 130};
      ExpectRight(spec);
    }
  }
}

TEST(CpuExecutor, EveryHeadDim) {
  for (const DType dtype : kAllDTypes) {
    for (const int32_t head_dim : {1, 2, 7, 8, 16, 40, 64, 80, 100, 128, 256, 320}) {
      ProblemSpec spec = SpecOf(3, 2, head_dim, 16, dtype);
      spec.kv_lens = {77, 33};
      ExpectRight(spec);
      spec.shape.pos_encoding = PosEncoding::kRopeLlama;
      if (head_dim % 2 == 0) ExpectRight(spec);
    }
  }
}

TEST(CpuExecutor, EveryPageSizeAndLength) {
  for (const int32_t page_size : {1, 3, 16, 17, 512}) {
    for (const int64_t kv_len : {1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 200}) {
      ProblemSpec spec = SpecOf(4, 2, 32, page_size);
      spec.kv_lens = {kv_len};
      ExpectRight(spec);
    }
  }
}

TEST(CpuExecutor, EveryNumberOfKvHeads) {
  for (const int32_t kv_heads : {1, 2, 3, 4, 5, 6, 8, 12}) {
    ProblemSpec spec = SpecOf(2, kv_heads, 64, 16, DType::kBFloat16);
    spec.kv_lens = {100, 0, 500};
    for (const int32_t num_threads : {1, 2, 3, 7}) ExpectRight(spec, num_threads);
  }
}

TEST(CpuExecutor, LayoutsAndStrides) {
  for (const Layout layout : {Layout::kNhd, Layout::kHnd, Layout::kInterleaved, Layout::kPadded}) {
    for (const DType dtype : kAllDTypes) {
      ProblemSpec spec = SpecOf(4, 4, 48, 5, dtype);
      spec.layout = layout;
      spec.padded_queries = true;
      spec.kv_lens = {23, 61};
      ExpectRight(spec);
    }
  }
}

TEST(CpuExecutor, EmptyRequestsAreZeroWithLseMinusInfinity) {
  for (const std::vector<int64_t>& kv_lens :
       {std::vector<int64_t>{0}, {0, 0, 0}, {0, 40, 0, 0, 9, 0}, {300, 0}}) {
    ProblemSpec spec = SpecOf(4, 2, 64, 16, DType::kBFloat16);
    spec.kv_lens = kv_lens;
    spec.options.window_left = 0;
    ExpectRight(spec);
    spec.options.window_left = -1;
    ExpectRight(spec);
    Problem problem(spec);
    ASSERT_TRUE(problem.Run(2).ok());
    for (int32_t request = 0; request < problem.shape().batch; ++request) {
      if (kv_lens[request] > 0) continue;
      EXPECT_EQ(problem.lse()[request * 8 + 3], -INFINITY);
      EXPECT_EQ(problem.OutputAt(request, 3, 11), 0.0F);
    }
  }
}

TEST(CpuExecutor, BatchOfNone) {
  ProblemSpec spec;
  spec.kv_lens = {};
  Problem problem(spec);
  EXPECT_TRUE(problem.Run(2).ok());
}

TEST(CpuExecutor, Windows) {
  for (const int32_t window_left : {0, 1, 14, 15, 16, 17, 31, 32, 100, 127, 128, INT32_MAX}) {
    for (const int64_t kv_len : {1, 16, 17, 33, 128, 129, 257}) {
      ProblemSpec spec = SpecOf(2, 2, 32, 16);
      spec.options.window_left = window_left;
      spec.kv_lens = {kv_len, kv_len + 5};
      ExpectRight(spec);
      spec.shape.pos_encoding = PosEncoding::kRopeLlama;
      ExpectRight(spec);
    }
  }
}

TEST(CpuExecutor, RandomCombinations) {
  std::mt19937 random(20240117);
  const auto pick = [&random](const std::vector<int32_t>& from) {
    return from[random() % from.size()];
  };
  for (uint32_t i = 0; i < 300; ++i) {
    ProblemSpec spec = SpecOf(pick({1, 2, 3, 4, 5, 7, 8, 13}), pick({1, 2, 3, 4, 8}),
                              pick({6, 16, 24, 64, 72, 128}), pick({1, 3, 8, 16, 17, 64}),
                              kAllDTypes[random() % 3]);
    spec.seed = i;
    spec.layout = static_cast<Layout>(random() % 4);
    spec.padded_queries = random() % 2 == 0;
    spec.options.window_left = pick({-1, -1, 0, 15, 63, 200});
    spec.options.logits_soft_cap = static_cast<float>(pick({0, 0, 1, 30}));
    spec.shape.pos_encoding = static_cast<PosEncoding>(random() % 2);
    spec.kv_lens.resize(pick({1, 2, 5, 9}));
    for (int64_t& len : spec.kv_lens) len = pick({0, 1, 17, 64, 130, 333});
    ExpectRight(spec, pick({1, 2, 3, 5, 16}));
    if (HasFailure()) return;
  }
}

TEST(CpuExecutor, SameBitsEveryTimeAndFromEveryThread) {
  ProblemSpec spec = SpecOf(4, 8, 128, 16, DType::kFloat16);
  spec.shape.pos_encoding = PosEncoding::kRopeLlama;
  spec.kv_lens = {700, 3, 0, 1500, 90};
  Problem first(spec);
  ASSERT_TRUE(first.Run(3).ok());
  EXPECT_LE(WorstError(first), 1.0);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&first, &spec] {
      Problem own(spec);
      for (int i = 0; i < 5; ++i) {
        ASSERT_TRUE(own.Run(3).ok());
        EXPECT_EQ(own.OutputBytes(), first.OutputBytes());
        EXPECT_EQ(own.lse(), first.lse());
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// More workers than tiles, and requests cut into many pieces.
TEST(CpuExecutor, AnyNumberOfThreads) {
  for (const int32_t num_threads : {1, 2, 3, 8, 61, 400}) {
    ProblemSpec spec = SpecOf(4, 2, 64, 16, DType::kBFloat16);
    spec.kv_lens = {3000, 1, 0, 257};
    ExpectRight(spec, num_threads);
  }
}

TEST(CpuExecutor, LseIsOptional) {
  ProblemSpec spec;
  Problem problem(spec);
  ASSERT_TRUE(problem.Run(1).ok());
  const std::vector<uint8_t> with_lse = problem.OutputBytes();
  CpuDecodeArgs args = problem.args();
  args.lse = nullptr;
  ASSERT_TRUE(DecodeOnCpu(*MakeCpuLaunchPlan(problem.shape(), 1), args).ok());
  EXPECT_EQ(problem.OutputBytes(), with_lse);
}

// Malformed rows do no harm, and the rows beside them are right.
TEST(CpuExecutor, MalformedTablesStayInBounds) {
  ProblemSpec spec = SpecOf(4, 2, 64, 16);
  spec.kv_lens = {50, 100, 70};
  const auto expect_others_right = [&spec](auto&& damage) {
    Problem problem(spec);
    damage(&problem);
    ASSERT_TRUE(problem.Run(2).ok());
    for (const int32_t request : {0, 2}) {
      const Problem::Reference reference = problem.ReferenceOf(request, 5);
      EXPECT_NEAR(problem.OutputAt(request, 5, 17), reference.output[17], 1e-5);
    }
  };
  for (const int32_t length : {INT32_MIN, -1, 0, 17, INT32_MAX}) {
    expect_others_right([length](Problem* p) { p->last_page_len()[1] = length; });
  }
  for (const int32_t id : {INT32_MIN, -1, 18, INT32_MAX}) {
    expect_others_right([id](Problem* p) { p->indices()[p->indptr()[1] + 3] = id; });
  }
  Problem problem(spec);
  problem.indptr() = {INT32_MIN, INT32_MAX, 3, -7};
  EXPECT_TRUE(problem.Run(2).ok());
}

TEST(CpuExecutor, PagesOutsideTheCacheCountAsZeros) {
  ProblemSpec spec = SpecOf(2, 1, 32, 16);
  spec.kv_lens = {48};
  for (const DType dtype : kAllDTypes) {
    spec.shape.dtype = dtype;
    for (const PosEncoding rope : {PosEncoding::kNone, PosEncoding::kRopeLlama}) {
      spec.shape.pos_encoding = rope;
      Problem zeros(spec);
      Problem outside(spec);
      for (int32_t slot = 0; slot < 16; ++slot) {
        for (int32_t d = 0; d < 32; ++d) {
          zeros.SetKey(zeros.indices()[3], slot, 0, d, 0.0F);
          zeros.SetValue(zeros.indices()[3], slot, 0, d, 0.0F);
        }
      }
      outside.indices()[3] = 1 << 30;
      ASSERT_TRUE(zeros.Run(1).ok());
      ASSERT_TRUE(outside.Run(1).ok());
      EXPECT_EQ(outside.OutputBytes(), zeros.OutputBytes());
    }
  }
}

TEST(CpuExecutor, RefusesWhatDoesNotFit) {
  ProblemSpec spec;
  Problem problem(spec);
  const LaunchPlan plan = *MakeCpuLaunchPlan(problem.shape(), 1);
  const auto expect_refused = [&](const char* argument, auto&& damage) {
    LaunchPlan bad_plan = plan;
    CpuDecodeArgs args = problem.args();
    damage(&bad_plan, &args);
    const absl::Status status = DecodeOnCpu(bad_plan, args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << argument;
    EXPECT_NE(status.message().find(argument), std::string::npos) << status;
  };
  using P = LaunchPlan*;
  using A = CpuDecodeArgs*;
  expect_refused("q:", [](P, A args) { args->q = nullptr; });
  expect_refused("out:", [](P, A args) { args->out = nullptr; });
  expect_refused("k_cache:", [](P, A args) { args->k_cache = nullptr; });
  expect_refused("v_cache:", [](P, A args) { args->v_cache = nullptr; });
  expect_refused("page_indptr:", [](P, A args) { args->table.indptr = nullptr; });
  expect_refused("page_indices:", [](P, A args) { args->table.indices = nullptr; });
  expect_refused("last_page_len:", [](P, A args) { args->table.last_page_len = nullptr; });
  expect_refused("table.batch", [](P, A args) { args->table.batch = 2; });
  expect_refused("table.page_size", [](P, A args) { args->table.page_size = 8; });
  expect_refused("sm_scale", [](P, A args) { args->options.sm_scale = NAN; });
  expect_refused("window_left", [](P, A args) { args->options.window_left = -2; });
  expect_refused("logits_soft_cap", [](P, A args) { args->options.logits_soft_cap = -1.0F; });
  expect_refused("rope_theta", [](P, A args) { args->options.rope_theta = 0.0; });
  expect_refused("row blocks", [](P bad_plan, A) { bad_plan->row_blocks = 2; });
  expect_refused("head_dim", [](P bad_plan, A) { bad_plan->shape.head_dim = 0; });
  EXPECT_TRUE(problem.Run(1).ok());
}

}  // namespace
}  // namespace pgqa::testing
