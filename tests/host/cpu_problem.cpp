// Problems for tests of the CPU executor: poisoned tensors, and a plain fp64 reference.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>

#include "cpu_run.h"

namespace pgqa::testing {
namespace {

constexpr int32_t kAbsurdPage = 2147480000;

template <class T>
T Get(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

float Decode(const uint8_t* from, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return static_cast<float>(Get<_Float16>(from));
    case DType::kBFloat16: {
      const uint32_t bits = uint32_t{Get<uint16_t>(from)} << 16;
      return Get<float>(reinterpret_cast<const uint8_t*>(&bits));
    }
    case DType::kFloat32:
      return Get<float>(from);
  }
  return 0.0F;
}

void Encode(float value, DType dtype, uint8_t* to) {
  if (dtype == DType::kFloat16) {
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(to, &half, 2);
  } else if (dtype == DType::kBFloat16) {
    const uint32_t bits = Get<uint32_t>(reinterpret_cast<const uint8_t*>(&value));
    const uint16_t rounded =
        std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    std::memcpy(to, &rounded, 2);
  } else {
    std::memcpy(to, &value, 4);
  }
}

void FillWith(float value, DType dtype, std::vector<uint8_t>* buffer) {
  for (size_t i = 0; i < buffer->size(); i += BytesOf(dtype)) Encode(value, dtype, &(*buffer)[i]);
}

int64_t At(const CacheStrides& s, int64_t page, int64_t slot, int32_t head, int32_t d) {
  return page * s.page + slot * s.token + head * s.head + d;
}

// Elements that a cache of these strides spans.
int64_t Extent(const CacheStrides& s, const AttentionShape& shape, int64_t num_pages) {
  return At(s, num_pages - 1, shape.page_size - 1, shape.num_kv_heads - 1, shape.head_dim);
}

}  // namespace

std::string ProblemSpec::Name() const {
  std::ostringstream name;
  name << "dtype " << static_cast<int>(shape.dtype) << ", heads " << shape.num_query_heads << "/"
       << shape.num_kv_heads << ", head_dim " << shape.head_dim << ", page " << shape.page_size
       << ", scale " << options.sm_scale << ", window " << options.window_left << ", cap "
       << options.logits_soft_cap << ", rope " << static_cast<int>(shape.pos_encoding)
       << ", layout " << static_cast<int>(layout) << ", seed " << seed << ", kv_lens";
  for (const int64_t len : kv_lens) name << " " << len;
  return name.str();
}

Problem::Problem(const ProblemSpec& spec) : spec_(spec) {
  spec_.shape.batch = static_cast<int32_t>(spec_.kv_lens.size());
  BuildTable(spec_.seed);
  BuildStrides();
  FillTensors(spec_.seed);
}

void Problem::BuildTable(uint32_t seed) {
  // The first row does not start at entry 0, and entries follow the last one: slices of bigger
  // arrays.
  indptr_.push_back(2);
  for (const int64_t len : spec_.kv_lens) {
    const int64_t pages = (len + shape().page_size - 1) / shape().page_size;
    indptr_.push_back(static_cast<int32_t>(indptr_.back() + pages));
    // Of an empty request, any value.
    last_page_len_.push_back(
        len == 0 ? 5 : static_cast<int32_t>(len - (pages - 1) * shape().page_size));
  }
  const int32_t used = indptr_.back() - indptr_.front();
  num_pages_ = (spec_.shared_pages > 0 ? spec_.shared_pages : used) + 3;
  std::vector<int32_t> ids(num_pages_);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(seed));
  indices_.assign(used + 5, kAbsurdPage);
  for (int32_t i = 0; i < used; ++i) {
    indices_[indptr_.front() + i] = ids[spec_.shared_pages > 0 ? i % spec_.shared_pages : i];
  }
}

void Problem::BuildStrides() {
  const int64_t heads = shape().num_kv_heads;
  const int64_t dim = shape().head_dim;
  const int64_t size = shape().page_size;
  k_strides_ = v_strides_ = {size * heads * dim, heads * dim, dim};
  if (spec_.layout == Layout::kHnd) {
    k_strides_ = v_strides_ = {size * heads * dim, dim, size * dim};
  } else if (spec_.layout == Layout::kInterleaved) {
    k_strides_ = v_strides_ = {size * heads * dim * 2, heads * dim * 2, dim * 2};
    v_offset_ = dim;
  } else if (spec_.layout == Layout::kPadded) {
    k_strides_ = {(size + 1) * (heads * (dim + 3) + 5) + 7, heads * (dim + 3) + 5, dim + 3};
    v_strides_ = {size * (heads * (dim + 1) + 2), heads * (dim + 1) + 2, dim + 1};
  }
  const int64_t gap = spec_.padded_queries ? 3 : 0;
  q_strides_ = {shape().num_query_heads * (dim + gap) + gap, dim + gap};
}

void Problem::FillTensors(uint32_t seed) {
  const DType dtype = shape().dtype;
  const int64_t bytes = BytesOf(dtype);
  const float poison = std::numeric_limits<float>::quiet_NaN();
  k_.resize((Extent(k_strides_, shape(), num_pages_) + v_offset_) * bytes);
  if (v_offset_ == 0) v_.resize(Extent(v_strides_, shape(), num_pages_) * bytes);
  q_.resize(std::max<int64_t>(1, shape().batch) * q_strides_.batch * bytes);
  out_.resize(q_.size());
  lse_.resize(int64_t{shape().batch} * shape().num_query_heads);
  for (auto* buffer : {&k_, &v_, &q_}) FillWith(poison, dtype, buffer);

  std::mt19937 random(seed + 1000);
  std::normal_distribution<float> normal;
  for (int32_t r = 0; r < shape().batch; ++r) {
    for (int32_t h = 0; h < shape().num_query_heads; ++h) {
      for (int32_t d = 0; d < shape().head_dim; ++d) SetQuery(r, h, d, normal(random));
    }
    for (int64_t t = LiveBegin(r); t < spec_.kv_lens[r]; ++t) {
      const int32_t page = indices_[indptr_[r] + t / shape().page_size];
      const int64_t slot = t % shape().page_size;
      for (int32_t h = 0; h < shape().num_kv_heads; ++h) {
        if (spec_.shared_pages > 0 && !std::isnan(KeyAt(page, slot, h, 0))) break;
        for (int32_t d = 0; d < shape().head_dim; ++d) {
          SetKey(page, slot, h, d, normal(random) * spec_.key_scale);
          SetValue(page, slot, h, d, normal(random));
        }
      }
    }
  }
}

int64_t Problem::LiveBegin(int32_t request) const {
  const int64_t window = spec_.options.window_left;
  return window < 0 ? 0 : std::max<int64_t>(0, spec_.kv_lens[request] - 1 - window);
}

CpuDecodeArgs Problem::args() {
  CpuDecodeArgs args;
  args.q = q_.data();
  args.k_cache = k_.data();
  args.v_cache = v_offset_ == 0 ? v_.data() : k_.data() + v_offset_ * BytesOf(shape().dtype);
  args.out = out_.data();
  args.lse = lse_.data();
  args.q_strides = args.out_strides = q_strides_;
  args.k_strides = k_strides_;
  args.v_strides = v_strides_;
  args.table = {
      indptr_.data(), indices_.data(), last_page_len_.data(), static_cast<int64_t>(indices_.size()),
      num_pages_,     shape().batch,   shape().page_size};
  args.options = spec_.options;
  return args;
}

absl::Status Problem::Run(int32_t num_threads) {
  const absl::StatusOr<LaunchPlan> plan = MakeCpuLaunchPlan(shape(), num_threads);
  return plan.ok() ? RunWith(*plan) : plan.status();
}

absl::Status Problem::RunWith(const LaunchPlan& plan) {
  PoisonOutput();
  return DecodeOnCpu(plan, args());
}

void Problem::RunWithKernels(const CpuKernels& kernels) {
  PoisonOutput();
  RunOnCpu(*MakeCpuLaunchPlan(shape(), 2), args(), kernels);
}

void Problem::PoisonOutput() {
  FillWith(std::numeric_limits<float>::quiet_NaN(), shape().dtype, &out_);
  std::fill(lse_.begin(), lse_.end(), std::numeric_limits<float>::quiet_NaN());
}

bool Problem::GapsUntouched() const {
  const int64_t bytes = BytesOf(shape().dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(out_.size()) / bytes; ++i) {
    const int64_t in_request = i % q_strides_.batch;
    const bool in_row = in_request % q_strides_.head < shape().head_dim &&
                        in_request / q_strides_.head < shape().num_query_heads;
    if (!in_row && !std::isnan(Decode(&out_[i * bytes], shape().dtype))) return false;
  }
  return true;
}

float Problem::OutputAt(int32_t request, int32_t head, int32_t d) const {
  return Decode(
      &out_[(request * q_strides_.batch + head * q_strides_.head + d) * BytesOf(shape().dtype)],
      shape().dtype);
}

double Problem::KeyAt(int64_t page, int64_t slot, int32_t head, int32_t d) const {
  return Decode(&k_[At(k_strides_, page, slot, head, d) * BytesOf(shape().dtype)], shape().dtype);
}

double Problem::ValueAt(int64_t page, int64_t slot, int32_t head, int32_t d) const {
  const auto& buffer = v_offset_ == 0 ? v_ : k_;
  return Decode(&buffer[(At(v_strides_, page, slot, head, d) + v_offset_) * BytesOf(shape().dtype)],
                shape().dtype);
}

double Problem::QueryAt(int32_t request, int32_t head, int32_t d) const {
  return Decode(
      &q_[(request * q_strides_.batch + head * q_strides_.head + d) * BytesOf(shape().dtype)],
      shape().dtype);
}

void Problem::SetKey(int64_t page, int64_t slot, int32_t head, int32_t d, float value) {
  Encode(value, shape().dtype, &k_[At(k_strides_, page, slot, head, d) * BytesOf(shape().dtype)]);
}

void Problem::SetValue(int64_t page, int64_t slot, int32_t head, int32_t d, float value) {
  auto& buffer = v_offset_ == 0 ? v_ : k_;
  Encode(value, shape().dtype,
         &buffer[(At(v_strides_, page, slot, head, d) + v_offset_) * BytesOf(shape().dtype)]);
}

void Problem::SetQuery(int32_t request, int32_t head, int32_t d, float value) {
  Encode(value, shape().dtype,
         &q_[(request * q_strides_.batch + head * q_strides_.head + d) * BytesOf(shape().dtype)]);
}

}  // namespace pgqa::testing
