// The cache of graphs with values that need no GPU: order, bounds, counts, and what a key finds.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/graph_cache.h"

#include <gtest/gtest.h>

#include <memory>

#include "absl/status/status.h"
#include "pgqa/graph_spec.h"

namespace pgqa {
namespace {

// Move-only, as graphs are.
class FakeGraph {
 public:
  explicit FakeGraph(int64_t bytes) : bytes_(std::make_unique<int64_t>(bytes)) {}
  int64_t device_bytes() const { return *bytes_; }

 private:
  std::unique_ptr<int64_t> bytes_;
};

using Cache = GraphCache<int, FakeGraph>;

// Gets `key`, with a value of `bytes` where there is none; whether it was made.
bool Made(Cache* cache, int key, int64_t bytes = 10) {
  bool made = false;
  const auto value = cache->GetOrMake(key, [&]() -> absl::StatusOr<FakeGraph> {
    made = true;
    return FakeGraph(bytes);
  });
  EXPECT_TRUE(value.ok());
  return made;
}

TEST(GraphCache, MakesOnceAndCounts) {
  Cache cache({.max_count = 4});
  EXPECT_TRUE(Made(&cache, 1));
  EXPECT_FALSE(Made(&cache, 1));
  EXPECT_TRUE(Made(&cache, 2, 30));
  const Cache::Usage usage = cache.GetUsage();
  EXPECT_EQ(usage.count, 2);
  EXPECT_EQ(usage.bytes, 40);
  EXPECT_EQ(usage.hits, 1);
  EXPECT_EQ(usage.misses, 2);
  EXPECT_EQ(usage.evictions, 0);
}

TEST(GraphCache, TheLeastRecentlyUsedGoes) {
  Cache cache({.max_count = 3});
  for (const int key : {1, 2, 3}) Made(&cache, key);
  Made(&cache, 1);                    // order: 1 3 2
  EXPECT_NE(cache.Find(2), nullptr);  // order: 2 1 3
  Made(&cache, 4);                    // 3 goes
  EXPECT_EQ(cache.Find(3), nullptr);
  for (const int key : {1, 2, 4}) EXPECT_NE(cache.Find(key), nullptr) << key;
  EXPECT_EQ(cache.GetUsage().count, 3);
  EXPECT_EQ(cache.GetUsage().bytes, 30);
  EXPECT_EQ(cache.GetUsage().evictions, 1);
}

TEST(GraphCache, BytesAreBounded) {
  Cache cache({.max_count = 100, .max_bytes = 100});
  for (int key = 0; key < 10; ++key) Made(&cache, key, 10);
  EXPECT_EQ(cache.GetUsage().bytes, 100);
  Made(&cache, 10, 35);  // 0 to 3 go
  EXPECT_EQ(cache.GetUsage().bytes, 95);
  EXPECT_EQ(cache.GetUsage().count, 7);
  EXPECT_EQ(cache.Find(3), nullptr);
  EXPECT_NE(cache.Find(4), nullptr);
}

TEST(GraphCache, OneLargerThanTheBoundIsHandedOutButNotKept) {
  Cache cache({.max_count = 100, .max_bytes = 100});
  Made(&cache, 1, 60);
  EXPECT_TRUE(Made(&cache, 2, 101));
  EXPECT_EQ(cache.Find(2), nullptr);
  EXPECT_NE(cache.Find(1), nullptr);
  EXPECT_EQ(cache.GetUsage().bytes, 60);
}

TEST(GraphCache, KeepsAtLeastOne) {
  Cache cache({.max_count = 0});
  Made(&cache, 1);
  EXPECT_FALSE(Made(&cache, 1));
  EXPECT_TRUE(Made(&cache, 2));
  EXPECT_EQ(cache.GetUsage().count, 1);
}

TEST(GraphCache, FailuresComeBackAndChangeNothing) {
  Cache cache({.max_count = 1});
  Made(&cache, 1);
  const auto failed = cache.GetOrMake(
      2, []() -> absl::StatusOr<FakeGraph> { return absl::ResourceExhaustedError("full"); });
  EXPECT_EQ(failed.status(), absl::ResourceExhaustedError("full"));
  EXPECT_NE(cache.Find(1), nullptr);
  EXPECT_EQ(cache.GetUsage().count, 1);
  EXPECT_TRUE(Made(&cache, 2)) << "a failure was kept";
}

TEST(GraphCache, WhatFallsOutLivesOnForItsHolder) {
  Cache cache({.max_count = 1});
  Made(&cache, 1, 77);
  const std::shared_ptr<FakeGraph> held = cache.Find(1);
  Made(&cache, 2);
  EXPECT_EQ(cache.Find(1), nullptr);
  EXPECT_EQ(held->device_bytes(), 77);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(GraphCache, ClearForgetsValuesAndKeepsCounts) {
  Cache cache({.max_count = 3});
  for (const int key : {1, 2, 2}) Made(&cache, key);
  cache.Clear();
  EXPECT_EQ(cache.GetUsage().count, 0);
  EXPECT_EQ(cache.GetUsage().bytes, 0);
  EXPECT_EQ(cache.GetUsage().hits, 1);
  EXPECT_TRUE(Made(&cache, 2));
}

TEST(GraphCache, GraphKeysHitOnlyWhenNothingChanged) {
  GraphCache<GraphKey, FakeGraph> cache({.max_count = 100});
  GraphKey key;
  key.spec.layers.resize(1);
  const auto get = [&] {
    return cache.GetOrMake(key, []() -> absl::StatusOr<FakeGraph> { return FakeGraph(1); });
  };
  const std::shared_ptr<FakeGraph> first = *get();
  EXPECT_EQ(*get(), first);
  key.spec.layers[0].options.sm_scale = 0.25F;
  EXPECT_NE(*get(), first);
  key.spec.layers[0].options.sm_scale = AttentionOptions().sm_scale;
  EXPECT_EQ(*get(), first);
}

}  // namespace
}  // namespace pgqa
