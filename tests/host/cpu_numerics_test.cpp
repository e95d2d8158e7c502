// Tests of the arithmetic of the CPU executor: conversions, exponentials, caps, scales, angles.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu_kernels.h"
#include "cpu_problem.h"

namespace pgqa::testing {
namespace {

// Of every instruction set that this machine can run.
std::vector<const CpuKernels*> RunnableKernels() {
  std::vector<const CpuKernels*> kernels = {&BaseCpuKernels()};
#ifdef PGQA_X86_CPU_KERNELS
  if (IsRunnable(Avx2CpuKernels())) kernels.push_back(&Avx2CpuKernels());
  if (IsRunnable(Avx512CpuKernels())) kernels.push_back(&Avx512CpuKernels());
#endif
  return kernels;
}

uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

TEST(CpuNumerics, EverySixteenBitValueWidensExactly) {
  std::vector<uint16_t> bits(65536);
  for (uint32_t i = 0; i < 65536; ++i) bits[i] = static_cast<uint16_t>(i);
  for (const CpuKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    // 65535 elements, so that the tail of a row is walked as well.
    std::vector<float> halves(65535);
    std::vector<float> bfloats(65535);
    kernels->load_row(bits.data(), DType::kFloat16, 65535, {}, halves.data());
    kernels->load_row(bits.data(), DType::kBFloat16, 65535, {}, bfloats.data());
    for (uint32_t i = 0; i < 65535; ++i) {
      _Float16 half;
      std::memcpy(&half, &bits[i], sizeof half);
      const float expected = static_cast<float>(half);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(halves[i])) << i;
      } else {
        EXPECT_EQ(BitsOf(halves[i]), BitsOf(expected)) << i;
      }
      EXPECT_EQ(BitsOf(bfloats[i]), i << 16) << i;
    }
  }
}

TEST(CpuNumerics, NarrowingRoundsToNearestEven) {
  std::mt19937 random(3);
  std::vector<float> values = {
      0.0F,     -0.0F,        65504.0F,       65519.99F,      65520.0F,    1e-8F,      6e-8F,
      2.98e-8F, 2.980232e-8F, 6.1e-5F,        6.103e-5F,      INFINITY,    -INFINITY,  NAN,
      3e38F,    -1.0F,        1.00048828125F, 1.00146484375F, 1.00390625F, 1.01171875F};
  while (values.size() < 200003) values.push_back(FloatOf(static_cast<uint32_t>(random())));
  for (uint32_t bits = BitsOf(1e-8F); values.size() < 400003; bits += 997) {
    values.push_back(FloatOf(bits));
  }
  const auto count = static_cast<int32_t>(values.size());
  std::vector<uint16_t> halves(count);
  std::vector<uint16_t> bfloats(count);
  for (const CpuKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    kernels->store_row(values.data(), 1.0F, DType::kFloat16, count, halves.data());
    kernels->store_row(values.data(), 1.0F, DType::kBFloat16, count, bfloats.data());
    for (int32_t i = 0; i < count; ++i) {
      if (std::isnan(values[i])) {
        EXPECT_GT(halves[i] & 0x7fff, 0x7c00) << i;
        EXPECT_GT(bfloats[i] & 0x7fff, 0x7f80) << i;
        continue;
      }
      const _Float16 half = static_cast<_Float16>(values[i]);
      uint16_t expected;
      std::memcpy(&expected, &half, sizeof expected);
      EXPECT_EQ(halves[i], expected) << values[i];
      const uint32_t bits = BitsOf(values[i]);
      EXPECT_EQ(bfloats[i], (bits + 0x7fff + ((bits >> 16) & 1)) >> 16) << values[i];
    }
  }
}

// Two tokens with logits x and 0 and values 1 and 0 give the logistic function of x.
TEST(CpuNumerics, WeightsAreExactToFp32) {
  ProblemSpec spec = SpecOf(997, 1, 1, 16);
  spec.kv_lens = {2};
  spec.options.sm_scale = 1.0F;
  Problem problem(spec);
  const int32_t page = problem.indices()[2];
  for (const int32_t slot : {0, 1}) {
    problem.SetKey(page, slot, 0, 0, slot == 0 ? 1.0F : 0.0F);
    problem.SetValue(page, slot, 0, 0, slot == 0 ? 1.0F : 0.0F);
  }
  for (int32_t h = 0; h < 997; ++h) {
    problem.SetQuery(0, h, 0, -80.0F + static_cast<float>(h) * 0.1F);
  }
  for (const CpuKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    problem.RunWithKernels(*kernels);
    for (int32_t h = 0; h < 997; ++h) {
      const double x = problem.QueryAt(0, h, 0);
      const double expected = 1.0 / (1.0 + std::exp(-x));
      // The logit in base 2 has an error of half a unit in the last place.
      const double allowed = expected * (3e-7 + std::abs(x) * 1.2e-7);
      EXPECT_NEAR(problem.OutputAt(0, h, 0), expected, allowed) << x;
    }
  }
}

TEST(CpuNumerics, EveryInstructionSetIsRight) {
  std::mt19937 random(5);
  for (const CpuKernels* kernels : RunnableKernels()) {
    SCOPED_TRACE(kernels->name);
    for (uint32_t i = 0; i < 60; ++i) {
      ProblemSpec spec = SpecOf(1 + i % 9, 2, i % 4 == 0 ? 40 : 64, 1 + i % 17, kAllDTypes[i % 3]);
      spec.seed = i;
      spec.kv_lens = {static_cast<int64_t>(random() % 100), static_cast<int64_t>(random() % 300)};
      spec.shape.pos_encoding = static_cast<PosEncoding>(i / 3 % 2);
      spec.options.logits_soft_cap = i / 6 % 2 == 0 ? 0.0F : 5.0F;
      spec.options.window_left = i / 12 % 2 == 0 ? -1 : 37;
      SCOPED_TRACE(spec.Name());
      Problem problem(spec);
      problem.RunWithKernels(*kernels);
      EXPECT_LE(WorstError(problem), 1.0);
    }
  }
}

TEST(CpuNumerics, SoftCapIsAccurateFromTinyToSaturatedLogits) {
  for (const float cap : {1e-3F, 0.5F, 30.0F, 1e4F}) {
    for (const float key_scale : {1e-4F, 1e-2F, 1.0F, 100.0F, 1e6F}) {
      ProblemSpec spec = SpecOf(2, 2, 64, 16);
      spec.options.logits_soft_cap = cap;
      spec.key_scale = key_scale;
      spec.kv_lens = {65};
      SCOPED_TRACE(spec.Name());
      Problem problem(spec);
      ASSERT_TRUE(problem.Run(2).ok());
      EXPECT_LE(WorstError(problem, std::fmin(cap, 10.0F * key_scale)), 1.0) << key_scale;
    }
  }
}

TEST(CpuNumerics, ScalesOfEitherSignAndZero) {
  for (const float scale : {0.0F, -0.125F, -1.0F, 1.0F}) {
    for (const float cap : {0.0F, 5.0F}) {
      ProblemSpec spec = SpecOf(4, 2, 64, 16, DType::kFloat16);
      spec.options.sm_scale = scale;
      spec.options.logits_soft_cap = cap;
      spec.kv_lens = {70};
      ExpectRight(spec);
    }
  }
}

// Raw logits of -524288 on every token: the output is the mean of the values.
TEST(CpuNumerics, HugeEqualLogits) {
  ProblemSpec spec = SpecOf(8, 4, 128, 1, DType::kBFloat16);
  spec.options.sm_scale = 1.0F;
  spec.kv_lens = {2};
  Problem problem(spec);
  const int32_t* pages = &problem.indices()[2];
  for (int32_t d = 0; d < 128; ++d) {
    for (int32_t h = 0; h < 32; ++h) problem.SetQuery(0, h, d, 64.0F);
    for (int32_t h = 0; h < 4; ++h) {
      for (const int32_t page : {pages[0], pages[1]}) {
        problem.SetKey(page, 0, h, d, -64.0F);
        problem.SetValue(page, 0, h, d, 1.0F);
      }
    }
  }
  ASSERT_TRUE(problem.Run(2).ok());
  for (int32_t h = 0; h < 32; ++h) {
    EXPECT_EQ(problem.OutputAt(0, h, 77), 1.0F);
    EXPECT_NEAR(problem.lse()[h], -524288.0 + std::log(2.0), 0.0625);
  }
}

// The last size is past the range of fp32 once it is in base 2.
TEST(CpuNumerics, LogitsNearTheEndOfFp32PickTheLargest) {
  for (const float size : {1e30F, 1e38F, 3.3e38F}) {
    ProblemSpec spec = SpecOf(1, 1, 16, 16);
    spec.options.sm_scale = 1.0F;
    spec.kv_lens = {40};
    Problem problem(spec);
    for (int32_t d = 0; d < 16; ++d) {
      problem.SetQuery(0, 0, d, d == 0 ? size : 0.0F);
      for (int32_t t = 0; t < 40; ++t) {
        problem.SetKey(problem.indices()[2 + t / 16], t % 16, 0, d, t == 21 ? 1.0F : -1.0F);
      }
    }
    ASSERT_TRUE(problem.Run(1).ok());
    for (int32_t d = 0; d < 16; ++d) {
      EXPECT_EQ(problem.OutputAt(0, 0, d), problem.ValueAt(problem.indices()[3], 5, 0, d));
    }
    if (size < 2e38F) {
      EXPECT_FLOAT_EQ(problem.lse()[0], size);
    }
  }
}

TEST(CpuNumerics, RopeBehindAMillionTokens) {
  for (const int64_t kv_len : {131072 + 1, 131072 + 77, 1000003}) {
    ProblemSpec spec = SpecOf(4, 2, 128, 16);
    spec.shape.pos_encoding = PosEncoding::kRopeLlama;
    spec.options.window_left = 299;
    spec.kv_lens = {kv_len, 12};
    spec.shared_pages = 40;
    ExpectRight(spec);
    spec.options.rope_theta = 5e5;
    spec.options.rope_scale = 8.0;
    ExpectRight(spec);
  }
}

// Long enough for tens of thousands of steps of the query's turn.
TEST(CpuNumerics, RopeOverAllOfALongRequest) {
  ProblemSpec spec = SpecOf(1, 1, 16, 16);
  spec.shape.pos_encoding = PosEncoding::kRopeLlama;
  spec.kv_lens = {300001};
  spec.shared_pages = 7;
  spec.options.sm_scale = 0.25F;
  ExpectRight(spec, 1);
}

}  // namespace
}  // namespace pgqa::testing
