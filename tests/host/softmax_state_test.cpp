// The online-softmax state: merge is associative and commutative, empty states are its identity.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/softmax_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace pgqa {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kHuge = std::numeric_limits<float>::max();

// A state with the accumulator of one value column.
struct Weighted {
  SoftmaxState state;
  float acc = 0.0F;
};

Weighted Merged(const Weighted& a, const Weighted& b) {
  const SoftmaxState state = Merge(a.state, b.state);
  return {state, a.acc * Rescale(a.state.max, state.max) + b.acc * Rescale(b.state.max, state.max)};
}

// State of scores in base 2 with their values, token by token.
Weighted Of(const std::vector<float>& scores, const std::vector<float>& values) {
  Weighted all;
  for (size_t i = 0; i < scores.size(); ++i) all = Merged(all, {{scores[i], 1.0F}, values[i]});
  return all;
}

bool SameBits(const Weighted& a, const Weighted& b) {
  return a.state.max == b.state.max && a.state.sum == b.state.sum && a.acc == b.acc;
}

void ExpectClose(const Weighted& a, const Weighted& b) {
  EXPECT_EQ(a.state.max, b.state.max);
  EXPECT_NEAR(a.state.sum, b.state.sum, 1e-5F * std::max(1.0F, a.state.sum));
  EXPECT_NEAR(a.acc, b.acc, 1e-5F * std::max(1.0F, a.state.sum));
}

// A state of up to nine tokens with scores in [-range, range]; sometimes empty.
Weighted RandomState(std::mt19937* random, float range) {
  std::uniform_real_distribution<float> score(-range, range);
  std::uniform_real_distribution<float> value(-1.0F, 1.0F);
  std::vector<float> scores((*random)() % 10);
  std::vector<float> values(scores.size());
  for (float& s : scores) s = score(*random);
  for (float& v : values) v = value(*random);
  return Of(scores, values);
}

TEST(SoftmaxStateTest, EmptyIsTheIdentityBitForBit) {
  std::mt19937 random(1);
  for (int32_t trial = 0; trial < 1000; ++trial) {
    const Weighted state = RandomState(&random, 200.0F);
    EXPECT_TRUE(SameBits(Merged(state, Weighted{}), state));
    EXPECT_TRUE(SameBits(Merged(Weighted{}, state), state));
  }
}

TEST(SoftmaxStateTest, ExtremeScoresStayThemselvesBesideAnEmptyState) {
  for (const float score : {-kHuge, -5e4F, 0.0F, std::numeric_limits<float>::denorm_min(), kHuge}) {
    const Weighted state{{score, 1.0F}, 3.0F};
    EXPECT_TRUE(SameBits(Merged(state, Weighted{}), state)) << score;
    EXPECT_TRUE(SameBits(Merged(Weighted{}, state), state)) << score;
    EXPECT_TRUE(SameBits(Merged(state, state), {{score, 2.0F}, 6.0F})) << score;
  }
}

TEST(SoftmaxStateTest, MergesOfEmptyStatesAreEmpty) {
  Weighted all;
  for (int32_t i = 0; i < 5; ++i) all = Merged(all, Weighted{});
  EXPECT_TRUE(SameBits(all, Weighted{}));
  EXPECT_EQ(OutputScale(all.state), 0.0F);
  EXPECT_EQ(LogSumExp(all.state), -kInf);
}

TEST(SoftmaxStateTest, MergeIsCommutativeBitForBit) {
  std::mt19937 random(2);
  for (int32_t trial = 0; trial < 1000; ++trial) {
    const Weighted a = RandomState(&random, 50.0F);
    const Weighted b = RandomState(&random, 50.0F);
    EXPECT_TRUE(SameBits(Merged(a, b), Merged(b, a)));
  }
}

TEST(SoftmaxStateTest, MergeIsAssociative) {
  std::mt19937 random(3);
  for (int32_t trial = 0; trial < 3000; ++trial) {
    const float range = trial % 3 == 0 ? 1.0F : trial % 3 == 1 ? 30.0F : 1000.0F;
    const Weighted a = RandomState(&random, range);
    const Weighted b = RandomState(&random, range);
    const Weighted c = RandomState(&random, range);
    ExpectClose(Merged(Merged(a, b), c), Merged(a, Merged(b, c)));
  }
}

TEST(SoftmaxStateTest, IsTheSoftmaxOfAllTokensHoweverTheyAreCut) {
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  for (int32_t trial = 0; trial < 200; ++trial) {
    std::vector<float> scores(200);
    std::vector<float> values(200);
    for (float& s : scores) s = 8.0F * normal(random);
    for (float& v : values) v = normal(random);
    double max = -std::numeric_limits<double>::infinity();
    for (const float s : scores) max = std::max<double>(max, s);
    double sum = 0.0;
    double weighted = 0.0;
    for (size_t i = 0; i < scores.size(); ++i) {
      sum += std::exp2(scores[i] - max);
      weighted += std::exp2(scores[i] - max) * values[i];
    }
    Weighted all;
    for (size_t begin = 0; begin < scores.size();) {
      const size_t end = std::min<size_t>(scores.size(), begin + random() % 70);
      all = Merged(all, Of({scores.begin() + begin, scores.begin() + end},
                           {values.begin() + begin, values.begin() + end}));
      begin = end;
    }
    EXPECT_NEAR(all.acc * OutputScale(all.state), weighted / sum, 1e-5);
    EXPECT_NEAR(LogSumExp(all.state), (max + std::log2(sum)) * std::log(2.0),
                1e-5 * (1.0 + std::abs(max)));
  }
}

TEST(SoftmaxStateTest, TheLargerOfTwoFarScoresWinsOutright) {
  const Weighted low{{-524288.0F, 1.0F}, 7.0F};
  const Weighted high{{3e38F, 1.0F}, 5.0F};
  for (const Weighted& all : {Merged(low, high), Merged(high, low)}) {
    EXPECT_EQ(all.state.max, 3e38F);
    EXPECT_EQ(all.acc * OutputScale(all.state), 5.0F);
  }
  const Weighted alone = Merged(Weighted{}, low);  // no finite sentinel swallows it
  EXPECT_EQ(alone.acc * OutputScale(alone.state), 7.0F);
}

TEST(LogSumExpTest, IsNatural) {
  EXPECT_EQ(LogSumExp({0.0F, 1.0F}), 0.0F);
  EXPECT_NEAR(LogSumExp({0.0F, 2.0F}), 0.69314718F, 1e-6F);
  EXPECT_NEAR(LogSumExp({kLog2e * 5.0F, 1.0F}), 5.0F, 1e-6F);
  EXPECT_NEAR(LogSumExp({kLog2e * -524288.0F, 8.0F}), -524288.0F + std::log(8.0F), 0.1F);
}

TEST(RescaleTest, EdgeValues) {
  EXPECT_EQ(Rescale(-kInf, -kInf), 0.0F);
  EXPECT_EQ(Rescale(-kInf, 0.0F), 0.0F);
  EXPECT_EQ(Rescale(-kHuge, kHuge), 0.0F);
  EXPECT_EQ(Rescale(kHuge, kHuge), 1.0F);
  EXPECT_EQ(Rescale(3.0F, 5.0F), 0.25F);
}

}  // namespace
}  // namespace pgqa
