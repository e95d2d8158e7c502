// Plain value types shared by every layer: dtypes, shapes and options of one decode call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace pgqa {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32 };

// kRopeLlama rotates the half-split pairs (i, i + head_dim / 2): q at position kv_len - 1, key j at
// position j, by the frequency rope_theta^(-2 i / head_dim) / rope_scale.
enum class PosEncoding : int32_t { kNone = 0, kRopeLlama = 1 };

// What a launch plan depends on. No lengths.
struct AttentionShape {
  int32_t batch = 0;
  int32_t num_query_heads = 0;  // a multiple of num_kv_heads
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;   // GPU: a multiple of 8 up to 256; CPU: any even number (any without RoPE)
  int32_t page_size = 0;  // tokens
  DType dtype = DType::kBFloat16;
  PosEncoding pos_encoding = PosEncoding::kNone;
  // A request gives the same bits alone and in any batch, wherever its pages lie, eager and in any
  // graph, on one device. Costs time and workspace: see segments.h and docs/batch_invariant.md.
  bool batch_invariant = false;

  int32_t GroupSize() const { return num_query_heads / num_kv_heads; }
};

// The scalars of one decode call.
struct AttentionOptions {
  float sm_scale = 1.0F;         // finite; zero and negative values are valid
  int32_t window_left = -1;      // -1: no window; w >= 0: the last w + 1 tokens count
  float logits_soft_cap = 0.0F;  // 0: none; c > 0: s = c * tanh(s / c)
  double rope_scale = 1.0;       // > 0
  double rope_theta = 10000.0;   // > 0
};

// Element strides of a cache [pages, page_size, kv_heads, head_dim]; the last dimension is
// contiguous.
struct CacheStrides {
  int64_t page = 0;
  int64_t token = 0;
  int64_t head = 0;
};

// Element strides of the rows of a step, [batch, heads, head_dim]: q, the output, new keys and
// values; the last dimension is contiguous.
struct RowStrides {
  int64_t batch = 0;
  int64_t head = 0;
};

// How a call follows the kernels ahead of it on its stream. kStream: it begins when they have ended. The others begin
// earlier (programmatic dependent launch, compute capability 9.0 or newer) and write nothing before that; they differ
// in what the kernels since the last call with kStream or kAny may have written of what this call reads.
enum class Dependence : int32_t {
  kStream,
  kAny,      // anything: it only begins earlier
  kTensors,  // q and the caches, but not the page table or its step plan
  kNothing,  // nothing of it: a layer that follows another
};

}  // namespace pgqa
