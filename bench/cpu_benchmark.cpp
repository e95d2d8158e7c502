// Speed of the CPU executor: bytes of live K and V a second, from memory that is not in a cache.
// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pgqa/cpu_executor.h"
#include "pgqa/launch_plan.h"

namespace pgqa {
namespace {

constexpr int64_t kPoolBytes = int64_t{128} << 20;  // of K, and of V: more than a last-level cache

struct Case {
  const char* name;
  AttentionShape shape;  // of one call
  int32_t kv_len;        // of every request
  int32_t window_left = -1;
  float logits_soft_cap = 0.0F;
};

// A pool of pages, of which each call takes the next ones.
class Pool {
 public:
  explicit Pool(const Case& c)
      : shape_(c.shape),
        element_bytes_(shape_.dtype == DType::kFloat32 ? 4 : 2),
        page_elements_(int64_t{shape_.page_size} * shape_.num_kv_heads * shape_.head_dim),
        pages_per_call_((c.kv_len + shape_.page_size - 1) / shape_.page_size * shape_.batch),
        num_pages_(std::max(pages_per_call_, kPoolBytes / (page_elements_ * element_bytes_))),
        k_(RandomElements(num_pages_ * page_elements_)),
        v_(RandomElements(num_pages_ * page_elements_)),
        q_(RandomElements(int64_t{shape_.batch} * shape_.num_query_heads * shape_.head_dim)),
        out_(q_.size()),
        indices_(num_pages_) {
    std::iota(indices_.begin(), indices_.end(), 0);
    std::shuffle(indices_.begin(), indices_.end(), std::mt19937(1));
    const auto pages = static_cast<int32_t>(pages_per_call_ / std::max(1, shape_.batch));
    for (int32_t r = 0; r <= shape_.batch; ++r) indptr_.push_back(r * pages);
    last_page_len_.assign(shape_.batch, c.kv_len - (pages - 1) * shape_.page_size);
    options_.sm_scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim));
    options_.window_left = c.window_left;
    options_.logits_soft_cap = c.logits_soft_cap;
  }

  CpuDecodeArgs NextArgs() {
    if (first_page_ + pages_per_call_ > num_pages_) first_page_ = 0;
    const int64_t dim = shape_.head_dim;
    CpuDecodeArgs args;
    args.q = q_.data();
    args.k_cache = k_.data();
    args.v_cache = v_.data();
    args.out = out_.data();
    args.q_strides = args.out_strides = {shape_.num_query_heads * dim, dim};
    args.k_strides = args.v_strides = {page_elements_, shape_.num_kv_heads * dim, dim};
    args.table = {indptr_.data(),
                  indices_.data() + first_page_,
                  last_page_len_.data(),
                  pages_per_call_,
                  num_pages_,
                  shape_.batch,
                  shape_.page_size};
    args.options = options_;
    first_page_ += pages_per_call_;
    return args;
  }

  int64_t LiveBytesPerCall(int32_t kv_len) const {
    const int64_t window = options_.window_left < 0 ? kv_len : options_.window_left + int64_t{1};
    return std::min<int64_t>(kv_len, window) * shape_.batch * shape_.num_kv_heads *
           shape_.head_dim * 2 * element_bytes_;
  }

 private:
  // Values of the dtype of the order of 1.
  std::vector<uint8_t> RandomElements(int64_t count) const {
    std::vector<uint8_t> bytes(count * element_bytes_);
    std::minstd_rand random(7);
    auto* halves = reinterpret_cast<uint16_t*>(bytes.data());
    auto* words = reinterpret_cast<uint32_t*>(bytes.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = static_cast<uint32_t>(random());
      switch (shape_.dtype) {
        case DType::kFloat16:
          halves[i] = 0x3800 | (bits & 0x83ff);
          break;
        case DType::kBFloat16:
          halves[i] = 0x3f00 | (bits & 0x807f);
          break;
        case DType::kFloat32:
          words[i] = 0x3f000000 | (bits & 0x7fffff) | (bits << 31);
          break;
      }
    }
    return bytes;
  }

  AttentionShape shape_;
  int64_t element_bytes_;
  int64_t page_elements_;
  int64_t pages_per_call_;
  int64_t num_pages_;
  std::vector<uint8_t> k_, v_, q_, out_;
  std::vector<int32_t> indices_, indptr_, last_page_len_;
  AttentionOptions options_;
  int64_t first_page_ = 0;
};

void Decode(benchmark::State& state, const Case& c, int32_t num_threads) {
  Pool pool(c);
  const LaunchPlan plan = *MakeCpuLaunchPlan(c.shape, num_threads);
  for (auto _ : state) {
    if (const absl::Status status = DecodeOnCpu(plan, pool.NextArgs()); !status.ok()) {
      state.SkipWithError(status.ToString().c_str());
      return;
    }
  }
  state.SetBytesProcessed(state.iterations() * pool.LiveBytesPerCall(c.kv_len));
}

AttentionShape ShapeOf(int32_t batch, int32_t query_heads, int32_t kv_heads, int32_t head_dim,
                       DType dtype, int32_t page_size = 16,
                       PosEncoding pos_encoding = PosEncoding::kNone) {
  return {batch, query_heads, kv_heads, head_dim, page_size, dtype, pos_encoding};
}

void RegisterAll() {
  constexpr DType kBf16 = DType::kBFloat16;
  const std::vector<Case> cases = {
      {"1x100", ShapeOf(1, 32, 8, 128, kBf16), 100},
      {"1x2000", ShapeOf(1, 32, 8, 128, kBf16), 2000},
      {"8x1000/bf16", ShapeOf(8, 32, 8, 128, kBf16), 1000},
      {"8x1000/fp16", ShapeOf(8, 32, 8, 128, DType::kFloat16), 1000},
      {"8x1000/fp32", ShapeOf(8, 32, 8, 128, DType::kFloat32), 1000},
      {"8x1000/rope", ShapeOf(8, 32, 8, 128, kBf16, 16, PosEncoding::kRopeLlama), 1000},
      {"8x1000/cap", ShapeOf(8, 32, 8, 128, kBf16), 1000, -1, 30.0F},
      {"8x1000/window_127", ShapeOf(8, 32, 8, 128, kBf16), 1000, 127},
      {"8x1000/page_1", ShapeOf(8, 32, 8, 128, kBf16, 1), 1000},
      {"8x1000/heads_8_8", ShapeOf(8, 8, 8, 128, kBf16), 1000},
      {"8x1000/heads_64_8", ShapeOf(8, 64, 8, 128, kBf16), 1000},
      {"8x1000/heads_28_4", ShapeOf(8, 28, 4, 128, kBf16), 1000},
      {"8x1000/head_dim_64", ShapeOf(8, 8, 2, 64, kBf16), 1000},
      {"8x1000/head_dim_80", ShapeOf(8, 32, 8, 80, kBf16), 1000},
      {"8x1000/head_dim_256", ShapeOf(8, 8, 4, 256, kBf16), 1000},
      {"16x2000", ShapeOf(16, 32, 8, 128, kBf16), 2000},
  };
  for (const Case& c : cases) {
    for (const int32_t num_threads : {1, 2}) {
      benchmark::RegisterBenchmark(
          (std::string("cpu/") + c.name + "/threads_" + std::to_string(num_threads)).c_str(),
          Decode, c, num_threads)
          ->UseRealTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
}

}  // namespace
}  // namespace pgqa

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  pgqa::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
