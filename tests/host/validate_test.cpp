// Every fault of shapes, options and partition settings is refused by name.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/host/expect_refused.h"

namespace pgqa {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

AttentionShape ValidShape() {
  AttentionShape shape;
  shape.batch = 8;
  shape.num_query_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_dim = 128;
  shape.page_size = 16;
  return shape;
}

TEST(ValidateShapeTest, NamesEveryFaultOnBothBackends) {
  const std::vector<Fault<AttentionShape>> cases = {
      {[](auto* s) { s->batch = -1; }, "batch: got -1, expected at least 0"},
      {[](auto* s) { s->num_query_heads = 0; }, "num_query_heads: got 0, expected at least 1"},
      {[](auto* s) { s->num_kv_heads = 0; }, "num_kv_heads: got 0, expected at least 1"},
      {[](auto* s) { s->num_kv_heads = kMin; },
       "num_kv_heads: got -2147483648, expected at least 1"},
      {[](auto* s) { s->num_query_heads = 30; },
       "num_query_heads: got 30, expected a multiple of num_kv_heads (8)"},
      {[](auto* s) { s->num_query_heads = 4; },
       "num_query_heads: got 4, expected a multiple of num_kv_heads (8)"},
      {[](auto* s) { s->page_size = 0; }, "page_size: got 0, expected at least 1"},
      {[](auto* s) { s->page_size = -16; }, "page_size: got -16, expected at least 1"},
      {[](auto* s) { s->dtype = static_cast<DType>(9); },
       "dtype: got DType 9, expected float16, bfloat16 or float32"},
      {[](auto* s) { s->pos_encoding = static_cast<PosEncoding>(2); },
       "pos_encoding_mode: got 2, expected 0 (NONE) or 1 (ROPE_LLAMA)"},
      {[](auto* s) { s->pos_encoding = static_cast<PosEncoding>(-1); },
       "pos_encoding_mode: got -1, expected 0 (NONE) or 1 (ROPE_LLAMA)"},
  };
  for (const Backend backend : {Backend::kCpu, Backend::kGpu}) {
    ExpectRefused(ValidShape(), cases,
                  [backend](const AttentionShape& s) { return ValidateShape(s, backend); });
  }
}

TEST(ValidateShapeTest, NamesWhatOnlyAGpuRefuses) {
  const std::vector<Fault<AttentionShape>> cases = {
      {[](auto* s) { s->head_dim = 0; }, "head_dim: got 0, expected a multiple of 8 from 8 to 256"},
      {[](auto* s) { s->head_dim = 4; }, "head_dim: got 4, expected a multiple of 8 from 8 to 256"},
      {[](auto* s) { s->head_dim = 100; },
       "head_dim: got 100, expected a multiple of 8 from 8 to 256"},
      {[](auto* s) { s->head_dim = 264; },
       "head_dim: got 264, expected a multiple of 8 from 8 to 256"},
      {[](auto* s) { s->num_query_heads = 129 * 8; },
       "num_query_heads: got 1032, expected at most 128 times num_kv_heads (8)"},
      {[](auto* s) { s->dtype = DType::kFloat32; },
       "dtype: got float32, expected float16 or bfloat16 on a GPU"},
  };
  ExpectRefused(ValidShape(), cases,
                [](const AttentionShape& s) { return ValidateShape(s, Backend::kGpu); });
  for (const Fault<AttentionShape>& c : cases) {
    AttentionShape shape = ValidShape();
    c.change(&shape);
    EXPECT_EQ(ValidateShape(shape, Backend::kCpu).ok(), shape.head_dim > 0) << c.message;
  }
}

TEST(ValidateShapeTest, CpuRefusesOddHeadDimsWithRopeOnly) {
  AttentionShape shape = ValidShape();
  shape.head_dim = 33;
  EXPECT_TRUE(ValidateShape(shape, Backend::kCpu).ok());
  shape.pos_encoding = PosEncoding::kRopeLlama;
  EXPECT_EQ(std::string(ValidateShape(shape, Backend::kCpu).message()),
            "head_dim: got 33, expected an even number with pos_encoding_mode 1 (ROPE_LLAMA)");
  shape.head_dim = 2;
  EXPECT_TRUE(ValidateShape(shape, Backend::kCpu).ok());
  shape.head_dim = 0;
  EXPECT_EQ(std::string(ValidateShape(shape, Backend::kCpu).message()),
            "head_dim: got 0, expected at least 1");
}

TEST(ValidateShapeTest, TakesTheLimits) {
  AttentionShape shape = ValidShape();
  shape.batch = 0;
  shape.head_dim = 8;
  shape.page_size = 1;
  shape.num_query_heads = 128 * 8;
  EXPECT_TRUE(ValidateShape(shape, Backend::kGpu).ok());
  shape.head_dim = 256;
  shape.page_size = kMax;
  shape.batch = kMax;
  EXPECT_TRUE(ValidateShape(shape, Backend::kGpu).ok());
}

TEST(ShapeFaultsTest, ListsAllOfThemInArgumentOrder) {
  AttentionShape shape;
  shape.batch = -2;
  shape.head_dim = 12;
  shape.num_query_heads = 3;
  shape.num_kv_heads = 2;
  shape.page_size = 0;
  shape.dtype = DType::kFloat32;
  const std::vector<std::string> faults = ShapeFaults(shape, Backend::kGpu);
  ASSERT_EQ(faults.size(), 5U);
  const std::vector<std::string> names = {"batch", "num_query_heads", "head_dim", "page_size",
                                          "dtype"};
  for (size_t i = 0; i < names.size(); ++i) EXPECT_EQ(faults[i].find(names[i] + ": got "), 0U);
  EXPECT_TRUE(ShapeFaults(ValidShape(), Backend::kGpu).empty());
}

TEST(ValidateOptionsTest, NamesEveryFault) {
  const auto inf = static_cast<float>(kInf);
  const auto nan = static_cast<float>(kNan);
  const std::string cap = ", expected 0 (no cap) or a finite number above 0";
  const std::string positive = ", expected a finite number above 0";
  ExpectRefused<AttentionOptions>(
      AttentionOptions{},
      {
          {[=](auto* o) { o->sm_scale = nan; }, "sm_scale: got nan, expected a finite number"},
          {[=](auto* o) { o->sm_scale = inf; }, "sm_scale: got inf, expected a finite number"},
          {[=](auto* o) { o->sm_scale = -inf; }, "sm_scale: got -inf, expected a finite number"},
          {[=](auto* o) { o->window_left = -2; },
           "window_left: got -2, expected -1 (no window) or more"},
          {[=](auto* o) { o->window_left = kMin; },
           "window_left: got -2147483648, expected -1 (no window) or more"},
          {[=](auto* o) { o->logits_soft_cap = -0.5F; }, "logits_soft_cap: got -0.5" + cap},
          {[=](auto* o) { o->logits_soft_cap = nan; }, "logits_soft_cap: got nan" + cap},
          {[=](auto* o) { o->logits_soft_cap = inf; }, "logits_soft_cap: got inf" + cap},
          {[=](auto* o) { o->rope_scale = 0.0; }, "rope_scale: got 0" + positive},
          {[=](auto* o) { o->rope_scale = -1.0; }, "rope_scale: got -1" + positive},
          {[=](auto* o) { o->rope_scale = kNan; }, "rope_scale: got nan" + positive},
          {[=](auto* o) { o->rope_scale = kInf; }, "rope_scale: got inf" + positive},
          {[=](auto* o) { o->rope_theta = 0.0; }, "rope_theta: got 0" + positive},
          {[=](auto* o) { o->rope_theta = -1e4; }, "rope_theta: got -10000" + positive},
          {[=](auto* o) { o->rope_theta = kNan; }, "rope_theta: got nan" + positive},
          {[=](auto* o) { o->rope_theta = kInf; }, "rope_theta: got inf" + positive},
      },
      ValidateOptions);
}

TEST(ValidateOptionsTest, TakesTheLimits) {
  AttentionOptions options;
  for (const float scale : {0.0F, -0.0F, -3.5F, std::numeric_limits<float>::max()}) {
    options.sm_scale = scale;
    EXPECT_TRUE(ValidateOptions(options).ok());
  }
  for (const int32_t window_left : {-1, 0, kMax}) {
    options.window_left = window_left;
    EXPECT_TRUE(ValidateOptions(options).ok());
  }
  options.logits_soft_cap = std::numeric_limits<float>::min();
  options.rope_scale = options.rope_theta = std::numeric_limits<double>::min();
  EXPECT_TRUE(ValidateOptions(options).ok());
}

TEST(ValidatePartitionConfigTest, NamesEveryFault) {
  PartitionConfig valid;
  valid.num_workers = 132;
  valid.warps_per_worker = 8;
  valid.num_heads = 12;
  valid.max_heads_per_worker = 4;
  const std::string heads =
      ", expected a power of two that divides num_heads (12) and is at most warps_per_worker (8) "
      "and 8";
  ExpectRefused<PartitionConfig>(
      valid,
      {
          {[](auto* c) { c->num_workers = 0; }, "num_workers: got 0, expected 1 to 1048576"},
          {[](auto* c) { c->num_workers = 1 << 21; },
           "num_workers: got 2097152, expected 1 to 1048576"},
          {[](auto* c) { c->warps_per_worker = 0; },
           "warps_per_worker: got 0, expected a power of two"},
          {[](auto* c) { c->warps_per_worker = 6; },
           "warps_per_worker: got 6, expected a power of two"},
          {[](auto* c) { c->stage_tokens = 0; }, "stage_tokens: got 0, expected at least 1"},
          {[](auto* c) { c->num_heads = 0; }, "num_heads: got 0, expected at least 1"},
          {[](auto* c) { c->max_heads_by_work = 0; },
           "max_heads_by_work: got 0, expected at least 1"},
          {[](auto* c) { c->min_fill_eighths = 9; }, "min_fill_eighths: got 9, expected 0 to 8"},
          {[](auto* c) { c->min_tiles_per_worker = 0; },
           "min_tiles_per_worker: got 0, expected at least 1"},
          {[](auto* c) { c->double_heads_from = 0; },
           "double_heads_from: got 0, expected at least 1"},
          {[](auto* c) { c->max_heads_per_worker = 0; }, "max_heads_per_worker: got 0" + heads},
          {[](auto* c) { c->max_heads_per_worker = 3; }, "max_heads_per_worker: got 3" + heads},
          {[](auto* c) { c->max_heads_per_worker = 8; }, "max_heads_per_worker: got 8" + heads},
          {[](auto* c) { c->max_heads_per_worker = 16; }, "max_heads_per_worker: got 16" + heads},
          {[](auto* c) { c->num_heads = c->max_heads_per_worker = 16; },
           "max_heads_per_worker: got 16, expected a power of two that divides num_heads (16) and "
           "is at most warps_per_worker (8) and 8"},
      },
      ValidatePartitionConfig);
}

}  // namespace
}  // namespace pgqa
