// Small decode problems on the device in arrays of exact size, with guards and a float64 reference on the host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "pgqa/decode.h"
#include "pgqa/launch_plan.h"
#include "pgqa/workspace.h"
#include "tests/cuda/device_memory.cuh"

namespace pgqa::testing {

inline uint16_t ToBits(float value, DType dtype) {
  if (dtype == DType::kFloat16) return __half_as_ushort(__float2half(value));
  return __bfloat16_as_ushort(__float2bfloat16(value));
}

inline double FromBits(uint16_t bits, DType dtype) {
  if (dtype == DType::kFloat16) return __half2float(__ushort_as_half(bits));
  return __bfloat162float(__ushort_as_bfloat16(bits));
}

struct ProblemSpec {
  std::vector<int32_t> kv_lens{40};
  int32_t query_heads = 4;
  int32_t kv_heads = 1;
  int32_t head_dim = 64;
  int32_t page_size = 16;
  DType dtype = DType::kBFloat16;
  bool rope = false;
  int32_t window_left = -1;
  float soft_cap = 0.0F;
};

// As GoogleTest names a parameter.
inline void PrintTo(const ProblemSpec& spec, std::ostream* out) {
  *out << spec.query_heads << "/" << spec.kv_heads << " heads of " << spec.head_dim << ", pages of "
       << spec.page_size << (spec.rope ? ", RoPE" : "") << ", window " << spec.window_left
       << ", cap " << spec.soft_cap;
}

// What is written to slots that no live token holds. kNothing leaves them uninitialised, which initcheck sees.
enum class Unused { kNan, kNothing };

// Tensors of one call. Pages are numbered backwards through the pool; page 0 belongs to nobody.
class Problem {
 public:
  explicit Problem(const ProblemSpec& spec, Unused unused = Unused::kNan)
      : spec_(spec),
        batch_(static_cast<int32_t>(spec.kv_lens.size())),
        num_pages_(MakeTable()),
        q_(RandomRows(int64_t{batch_} * spec.query_heads)),
        k_cache_(CacheElements()),
        v_cache_(CacheElements()),
        indptr(table_indptr_),
        indices(table_indices_),
        last_page_len(table_last_) {
    q_values_ = q_.Read();
    for (auto [cache, rows] : {std::pair(&k_cache_, &k_rows_), std::pair(&v_cache_, &v_rows_)}) {
      if (unused == Unused::kNan) cache->Fill(0xFF);
      WriteLive(*cache, rows);
    }
  }

  AttentionShape Shape() const {
    return {batch_,
            spec_.query_heads,
            spec_.kv_heads,
            spec_.head_dim,
            spec_.page_size,
            spec_.dtype,
            spec_.rope ? PosEncoding::kRopeLlama : PosEncoding::kNone};
  }

  DecodeArgs Args(void* out, float* lse) const {
    DecodeArgs args;
    args.q = q_.data();
    args.q_head_stride = spec_.head_dim;
    args.q_batch_stride = int64_t{spec_.query_heads} * spec_.head_dim;
    args.k_cache = k_cache_.data();
    args.v_cache = v_cache_.data();
    args.k_strides = {int64_t{spec_.page_size} * spec_.kv_heads * spec_.head_dim,
                      int64_t{spec_.kv_heads} * spec_.head_dim, spec_.head_dim};
    args.v_strides = args.k_strides;
    args.table = {
        indptr.data(), indices.data(), last_page_len.data(), static_cast<int64_t>(indices.size()),
        num_pages_,    batch_,         spec_.page_size};
    args.out = out;
    args.lse = lse;
    args.options.sm_scale = 1.0F / std::sqrt(static_cast<float>(spec_.head_dim));
    args.options.window_left = spec_.window_left;
    args.options.logits_soft_cap = spec_.soft_cap;
    return args;
  }

  size_t OutElements() const { return q_.size(); }
  size_t LseElements() const { return static_cast<size_t>(batch_) * spec_.query_heads; }
  int32_t batch() const { return batch_; }
  const ProblemSpec& spec() const { return spec_; }

  // Output of (request, query head) in float64, its LSE last.
  std::vector<double> Expected(int32_t request, int32_t head) const;

 private:
  int32_t PagesOf(int32_t request) const {
    return (spec_.kv_lens[static_cast<size_t>(request)] + spec_.page_size - 1) / spec_.page_size;
  }
  TokenRange Live(int32_t request) const {
    const int64_t kv_len = spec_.kv_lens[static_cast<size_t>(request)];
    return PageTableView::ClipToWindow(kv_len, spec_.window_left);
  }
  size_t RowElements() const { return static_cast<size_t>(spec_.kv_heads) * spec_.head_dim; }
  size_t CacheElements() const { return num_pages_ * spec_.page_size * RowElements(); }

  // Fills the host table and returns the number of pages.
  int32_t MakeTable() {
    int32_t total = 0;
    for (int32_t r = 0; r < batch_; ++r) total += PagesOf(r);
    table_indptr_ = {0};
    for (int32_t r = 0; r < batch_; ++r) {
      const int32_t pages = PagesOf(r);
      table_indptr_.push_back(table_indptr_.back() + pages);
      table_last_.push_back(spec_.kv_lens[static_cast<size_t>(r)] - (pages - 1) * spec_.page_size);
    }
    for (int32_t entry = 0; entry < total; ++entry) table_indices_.push_back(total - entry);
    return total + 1;
  }

  std::vector<uint16_t> RandomRows(int64_t rows) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(static_cast<size_t>(rows * spec_.head_dim));
    for (uint16_t& value : values) value = ToBits(normal(random_), spec_.dtype);
    return values;
  }

  // Random rows for the tokens that count, kept in `rows` in the order of requests and tokens.
  void WriteLive(const DeviceArray<uint16_t>& cache, std::vector<uint16_t>* rows) {
    for (int32_t r = 0; r < batch_; ++r) {
      const TokenRange live = Live(r);
      for (int64_t token = live.begin; token < live.end; ++token) {
        const std::vector<uint16_t> row = RandomRows(spec_.kv_heads);
        const int64_t page =
            table_indices_[static_cast<size_t>(table_indptr_[r] + token / spec_.page_size)];
        const int64_t slot = page * spec_.page_size + token % spec_.page_size;
        cache.WriteAt(static_cast<size_t>(slot) * RowElements(), row.data(), row.size());
        rows->insert(rows->end(), row.begin(), row.end());
      }
    }
  }

  ProblemSpec spec_;
  int32_t batch_;
  std::mt19937 random_{7};
  std::vector<int32_t> table_indptr_, table_indices_, table_last_;
  int32_t num_pages_;
  DeviceArray<uint16_t> q_, k_cache_, v_cache_;
  std::vector<uint16_t> q_values_, k_rows_, v_rows_;

 public:
  DeviceArray<int32_t> indptr, indices, last_page_len;  // tests may write them
};

inline void Turn(std::vector<double>* row, double position) {
  const size_t half = row->size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double angle =
        position * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
    const double low = (*row)[i];
    const double high = (*row)[i + half];
    (*row)[i] = low * std::cos(angle) - high * std::sin(angle);
    (*row)[i + half] = low * std::sin(angle) + high * std::cos(angle);
  }
}

inline std::vector<double> Problem::Expected(int32_t request, int32_t head) const {
  const auto row = [&](const std::vector<uint16_t>& values, size_t index) {
    std::vector<double> wide;
    for (int32_t i = 0; i < spec_.head_dim; ++i)
      wide.push_back(FromBits(values[index * spec_.head_dim + i], spec_.dtype));
    return wide;
  };
  size_t first_row = 0;
  for (int32_t r = 0; r < request; ++r) {
    first_row += Live(r).size();
  }
  const TokenRange live = Live(request);
  const int32_t kv_head = head / (spec_.query_heads / spec_.kv_heads);
  std::vector<double> q = row(q_values_, static_cast<size_t>(request) * spec_.query_heads + head);
  if (spec_.rope) Turn(&q, static_cast<double>(live.end - 1));
  std::vector<double> result(static_cast<size_t>(spec_.head_dim) + 1, 0.0);
  double sum = 0.0;  // Scores are small, so that no maximum is needed in float64.
  for (int64_t token = live.begin; token < live.end; ++token) {
    const size_t index =
        (first_row + static_cast<size_t>(token - live.begin)) * spec_.kv_heads + kv_head;
    std::vector<double> k = row(k_rows_, index);
    if (spec_.rope) Turn(&k, static_cast<double>(token));
    double score = 0.0;
    for (int32_t i = 0; i < spec_.head_dim; ++i) score += q[i] * k[i];
    score /= std::sqrt(static_cast<double>(spec_.head_dim));
    if (spec_.soft_cap > 0.0F) score = spec_.soft_cap * std::tanh(score / spec_.soft_cap);
    const double weight = std::exp(score);
    const std::vector<double> v = row(v_rows_, index);
    for (int32_t i = 0; i < spec_.head_dim; ++i) result[i] += weight * v[i];
    sum += weight;
  }
  for (int32_t i = 0; i < spec_.head_dim && sum > 0.0; ++i) result[i] /= sum;
  result.back() = sum > 0.0 ? std::log(sum) : -std::numeric_limits<double>::infinity();
  return result;
}

}  // namespace pgqa::testing
