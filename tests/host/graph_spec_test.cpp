// What makes two graphs differ, what a graph refuses, and which capacity serves a step.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/graph_spec.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/hash/hash.h"
#include "tests/host/expect_refused.h"

namespace pgqa {
namespace {

using Change = std::function<void(GraphKey*)>;

const void* Address(uintptr_t value) { return reinterpret_cast<const void*>(value); }

GraphKey MakeKey() {
  GraphKey key;
  key.spec.shape = {8, 32, 8, 128, 16, DType::kBFloat16, PosEncoding::kNone};
  key.spec.max_pages = 100;
  key.spec.num_pages = 50;
  key.spec.layers.resize(2);
  return key;
}

// One change for each field of GraphKey, named; a struct's fields are counted where they are
// listed.
struct NamedChange {
  const char* name;
  Change change;
};

std::vector<NamedChange> ShapeChanges() {
  // A new field does not compile here until it is listed below.
  [[maybe_unused]] const auto [batch, query_heads, kv_heads, dim, page, dtype, pos, invariant] =
      AttentionShape();
  return {
      {"batch", [](GraphKey* k) { ++k->spec.shape.batch; }},
      {"num_query_heads", [](GraphKey* k) { k->spec.shape.num_query_heads *= 2; }},
      {"num_kv_heads", [](GraphKey* k) { k->spec.shape.num_kv_heads = 4; }},
      {"head_dim", [](GraphKey* k) { k->spec.shape.head_dim = 64; }},
      {"page_size", [](GraphKey* k) { k->spec.shape.page_size = 32; }},
      {"dtype", [](GraphKey* k) { k->spec.shape.dtype = DType::kFloat16; }},
      {"pos_encoding", [](GraphKey* k) { k->spec.shape.pos_encoding = PosEncoding::kRopeLlama; }},
      {"batch_invariant", [](GraphKey* k) { k->spec.shape.batch_invariant ^= true; }}};
}

std::vector<NamedChange> SpecChanges() {
  [[maybe_unused]] const auto [shape, num_pages, max_pages, indptr, indices, last, columns, blocks,
                               stride, seq_lens, new_tokens, live, lse, append, rotate, dependent,
                               layers] = GraphSpec();
  return {
      {"max_pages", [](GraphKey* k) { ++k->spec.max_pages; }},
      {"num_pages", [](GraphKey* k) { ++k->spec.num_pages; }},
      {"page_indptr",
       [](GraphKey* k) { k->spec.page_indptr = static_cast<const int32_t*>(Address(64)); }},
      {"page_indices",
       [](GraphKey* k) { k->spec.page_indices = static_cast<const int32_t*>(Address(64)); }},
      {"last_page_len",
       [](GraphKey* k) { k->spec.last_page_len = static_cast<const int32_t*>(Address(64)); }},
      {"max_columns", [](GraphKey* k) { ++k->spec.max_columns; }},
      {"block_table",
       [](GraphKey* k) { k->spec.block_table = static_cast<const int32_t*>(Address(64)); }},
      {"block_table_stride", [](GraphKey* k) { ++k->spec.block_table_stride; }},
      {"seq_lens",
       [](GraphKey* k) { k->spec.seq_lens = static_cast<const int32_t*>(Address(64)); }},
      {"new_tokens", [](GraphKey* k) { ++k->spec.new_tokens; }},
      {"live_batch", [](GraphKey* k) { k->spec.live_batch = !k->spec.live_batch; }},
      {"dependent_launch", [](GraphKey* k) { k->spec.dependent_launch ^= true; }},
      {"return_lse", [](GraphKey* k) { k->spec.return_lse = !k->spec.return_lse; }},
      {"append", [](GraphKey* k) { k->spec.append = !k->spec.append; }},
      {"rotate_appended", [](GraphKey* k) { k->spec.rotate_appended = !k->spec.rotate_appended; }},
      {"layers", [](GraphKey* k) { k->spec.layers.pop_back(); }}};
}

std::vector<NamedChange> LayerChanges() {
  [[maybe_unused]] const auto [q, q_strides, k_cache, v_cache, kc, vc, new_k, new_v, ks, vs, out,
                               lse, options] = GraphLayer();
  [[maybe_unused]] const auto [batch, head] = RowStrides();
  [[maybe_unused]] const auto [page, token, cache_head] = CacheStrides();
  const auto layer = [](GraphKey* k) -> GraphLayer& { return k->spec.layers[1]; };
  void* const address = reinterpret_cast<void*>(64);
  std::vector<NamedChange> changes = {
      {"q", [=](GraphKey* k) { layer(k).q = address; }},
      {"k_cache", [=](GraphKey* k) { layer(k).k_cache = address; }},
      {"v_cache", [=](GraphKey* k) { layer(k).v_cache = address; }},
      {"k", [=](GraphKey* k) { layer(k).k = address; }},
      {"v", [=](GraphKey* k) { layer(k).v = address; }},
      {"out", [=](GraphKey* k) { layer(k).out = address; }},
      {"lse", [=](GraphKey* k) { layer(k).lse = static_cast<float*>(address); }}};
  for (RowStrides GraphLayer::*strides :
       {&GraphLayer::q_strides, &GraphLayer::k_strides, &GraphLayer::v_strides}) {
    for (int64_t RowStrides::*stride : {&RowStrides::batch, &RowStrides::head}) {
      changes.push_back({"row stride", [=](GraphKey* k) { ++(layer(k).*strides.*stride); }});
    }
  }
  for (CacheStrides GraphLayer::*strides :
       {&GraphLayer::k_cache_strides, &GraphLayer::v_cache_strides}) {
    for (int64_t CacheStrides::*stride :
         {&CacheStrides::page, &CacheStrides::token, &CacheStrides::head}) {
      changes.push_back({"cache stride", [=](GraphKey* k) { ++(layer(k).*strides.*stride); }});
    }
  }
  return changes;
}

std::vector<NamedChange> OptionChanges() {
  [[maybe_unused]] const auto [scale, window, cap, rope_scale, theta] = AttentionOptions();
  const auto options = [](GraphKey* k) -> AttentionOptions& { return k->spec.layers[0].options; };
  return {{"sm_scale", [=](GraphKey* k) { options(k).sm_scale = 0.5F; }},
          {"window_left", [=](GraphKey* k) { options(k).window_left = 7; }},
          {"logits_soft_cap", [=](GraphKey* k) { options(k).logits_soft_cap = 30.0F; }},
          {"rope_scale", [=](GraphKey* k) { options(k).rope_scale = 8.0; }},
          {"rope_theta", [=](GraphKey* k) { options(k).rope_theta = 5e5; }}};
}

std::vector<NamedChange> AllChanges() {
  std::vector<NamedChange> all = {{"device", [](GraphKey* k) { ++k->device; }}};
  for (const auto& part : {ShapeChanges(), SpecChanges(), LayerChanges(), OptionChanges()})
    all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(GraphKey, EqualKeysHashAlike) {
  EXPECT_TRUE(MakeKey() == MakeKey());
  EXPECT_EQ(absl::HashOf(MakeKey()), absl::HashOf(MakeKey()));
}

TEST(GraphKey, EachFieldAloneMakesAnotherKey) {
  [[maybe_unused]] const auto [device, spec] = GraphKey();
  const GraphKey key = MakeKey();
  for (const NamedChange& field : AllChanges()) {
    GraphKey changed = key;
    field.change(&changed);
    EXPECT_FALSE(changed == key) << field.name;
    EXPECT_NE(absl::HashOf(changed), absl::HashOf(key)) << field.name;
  }
}

TEST(GraphKey, LayersCountInOrder) {
  GraphKey a = MakeKey();
  a.spec.layers[0].options.window_left = 127;
  GraphKey b = MakeKey();
  b.spec.layers[1].options.window_left = 127;
  EXPECT_FALSE(a == b);
}

TEST(GraphSpec, RefusalsNameTheArgument) {
  constexpr int64_t kTooMany = int64_t{1} << 31;
  ExpectRefused<GraphSpec>(
      MakeKey().spec,
      {{[](GraphSpec* s) { s->shape.batch = 0; }, "max_batch: got 0, expected at least 1"},
       {[](GraphSpec* s) { s->shape.head_dim = 12; },
        "head_dim: got 12, expected a multiple of 8 from 8 to 256"},
       {[](GraphSpec* s) { s->shape.dtype = DType::kFloat32; },
        "dtype: got float32, expected float16 or bfloat16 on a GPU"},
       {[](GraphSpec* s) { s->max_pages = -1; }, "max_pages: got -1, expected 0 to 2147483647"},
       {[](GraphSpec* s) { s->max_pages = kTooMany; },
        "max_pages: got 2147483648, expected 0 to 2147483647"},
       {[](GraphSpec* s) { s->new_tokens = 1; },
        "new_tokens: got 1, expected 0 without max_columns: a CSR table counts the step's token"},
       {[](GraphSpec* s) { s->num_pages = -1; }, "num_pages: got -1, expected 0 to 2147483647"},
       {[](GraphSpec* s) { s->rotate_appended = true; },
        "rotate_appended: got true without append, expected append, whose keys are turned"},
       {[](GraphSpec* s) {
          s->append = s->rotate_appended = true;
          s->shape.pos_encoding = PosEncoding::kRopeLlama;
        },
        "rotate_appended: got true with pos_encoding_mode 1 (ROPE_LLAMA), expected one of the "
        "two: keys are turned once"},
       {[](GraphSpec* s) { s->layers[1].options.window_left = -2; },
        "window_left: got -2, expected -1 (no window) or more"}},
      &ValidateGraphSpec);
}

TEST(GraphSpec, RefusalsOfBlockTablesNameTheArgument) {
  const auto* const address = static_cast<const int32_t*>(Address(64));
  GraphSpec spec = MakeKey().spec;
  spec.max_pages = 0;
  spec.max_columns = 12;
  ExpectRefused<GraphSpec>(
      spec,
      {{[](GraphSpec* s) { s->max_columns = -2; }, "max_columns: got -2, expected 0 to 2147483647"},
       {[](GraphSpec* s) { s->max_pages = 7; },
        "max_pages: got 7, expected 0 with max_columns: the table has rows of its own"},
       {[](GraphSpec* s) { s->new_tokens = 2; }, "new_tokens: got 2, expected 0 to 1"},
       {[](GraphSpec* s) { s->block_table_stride = -1; },
        "block_table_stride: got -1, expected at least 0"},
       {[=](GraphSpec* s) { s->page_indices = address; },
        "page_indptr, page_indices, last_page_len: got an address with max_columns, expected none"},
       {[=](GraphSpec* s) {
          s->max_columns = GraphSpec::kCsr;
          s->seq_lens = address;
        },
        "max_columns: got none, expected that of block_table and seq_lens"}},
      &ValidateGraphSpec);
  EXPECT_EQ(CapacityOf(spec).max_pages, 12);
  EXPECT_EQ(CapacityOf(MakeKey().spec).max_pages, 100);
}

TEST(GraphCapacity, WhatFits) {
  const GraphCapacity capacity{8, 100};
  EXPECT_TRUE(CheckFits(capacity, 0, 0).ok());
  EXPECT_TRUE(CheckFits(capacity, 8, 100).ok());
  EXPECT_EQ(CheckFits(capacity, 9, 100).message(),
            "live_batch: got 9, expected 0 to 8 (the capacity of the graph)");
  EXPECT_EQ(CheckFits(capacity, -1, 100).message(),
            "live_batch: got -1, expected 0 to 8 (the capacity of the graph)");
  EXPECT_EQ(CheckFits(capacity, 8, 101).message(),
            "num_pages: got 101, expected 0 to 100 (the capacity of the graph)");
}

TEST(GraphCapacity, BucketsArePowersOfTwoUpToTheLimit) {
  const GraphCapacity limit{100, 1000};
  const auto bucket = [&](int32_t batch, int64_t pages) { return *BucketFor(limit, batch, pages); };
  EXPECT_EQ(bucket(0, 0).max_batch, 1);
  EXPECT_EQ(bucket(0, 0).max_pages, 1);
  EXPECT_EQ(bucket(1, 512).max_pages, 512);
  EXPECT_EQ(bucket(33, 513).max_batch, 64);
  EXPECT_EQ(bucket(33, 513).max_pages, 1000);
  EXPECT_EQ(bucket(65, 1).max_batch, 100);
  for (int32_t live = 0; live <= limit.max_batch; ++live)
    EXPECT_TRUE(CheckFits(bucket(live, live * 10), live, live * 10).ok()) << live;
  EXPECT_FALSE(BucketFor(limit, 101, 0).ok());
  EXPECT_FALSE(BucketFor(limit, 1, 1001).ok());
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  EXPECT_EQ(BucketFor({kMax, kMax}, kMax - 1, kMax)->max_batch, kMax);
}

// Two layers whose tensors lie apart: q at 1 MB, caches at 2 and 3, outputs at 4, a layer 64 MB from the other.
GraphSpec SpecOfApartLayers() {
  GraphSpec spec = MakeKey().spec;
  uintptr_t base = 0;
  for (GraphLayer& layer : spec.layers) {
    const auto place = [&](uintptr_t megabytes) {
      return const_cast<void*>(Address(base + (megabytes << 20)));
    };
    layer.q = place(1);
    layer.q_strides = {32 * 128, 128};
    layer.k_cache = place(2);
    layer.v_cache = place(12);
    layer.k_cache_strides = layer.v_cache_strides = {16 * 8 * 128, 8 * 128, 128};
    layer.out = place(22);
    layer.lse = static_cast<float*>(place(23));
    base += uintptr_t{64} << 20;
  }
  return spec;
}

TEST(LayersReadOutputs, FindsEveryOverlap) {
  EXPECT_FALSE(LayersReadOutputs(SpecOfApartLayers()));
  const uintptr_t q_bytes = 8 * 32 * 128 * 2;
  const auto reads_when = [&](const std::function<void(GraphSpec*)>& change) {
    GraphSpec spec = SpecOfApartLayers();
    change(&spec);
    return LayersReadOutputs(spec);
  };
  EXPECT_TRUE(reads_when([](GraphSpec* s) { s->layers[1].q = s->layers[0].out; }));
  EXPECT_TRUE(reads_when([](GraphSpec* s) { s->layers[0].q = s->layers[1].out; }));
  EXPECT_TRUE(reads_when([](GraphSpec* s) { s->layers[1].k_cache = s->layers[0].out; }));
  EXPECT_TRUE(reads_when([](GraphSpec* s) { s->layers[1].v_cache = s->layers[0].lse; }));
  const auto q_ends = [&](int64_t behind_out) {
    return [=](GraphSpec* s) {
      s->layers[1].q = static_cast<const char*>(s->layers[0].out) - q_bytes + behind_out;
    };
  };
  EXPECT_FALSE(reads_when(q_ends(0)));
  EXPECT_TRUE(reads_when(q_ends(2)));
  // A negative stride reaches back from the address.
  EXPECT_TRUE(reads_when([](GraphSpec* s) {
    s->layers[1].q = static_cast<const char*>(s->layers[0].out) + (1 << 20);
    s->layers[1].q_strides.batch = -(1 << 18);
  }));
}

}  // namespace
}  // namespace pgqa
