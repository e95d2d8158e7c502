// Decode calls over a pool of pages larger than the L2 cache, in device memory, for benchmarks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "pgqa/append.h"
#include "pgqa/cuda_graph.h"
#include "pgqa/decode.h"
#include "pgqa/graph_spec.h"
#include "pgqa/launch_plan.h"
#include "pgqa/workspace.h"

namespace pgqa::bench {

[[noreturn]] inline void Fail(absl::string_view what) {
  std::cerr << what << "\n";
  std::exit(1);
}

inline void Check(cudaError_t error) {
  if (error != cudaSuccess) Fail(cudaGetErrorString(error));
}

inline void Check(const absl::Status& status) {
  if (!status.ok()) Fail(status.message());
}

template <class T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}

// Device memory, written when the constructor returns, whatever stream uses it then.
class DeviceBytes {
 public:
  DeviceBytes(int64_t bytes, int value) {
    void* data = nullptr;
    Check(cudaMalloc(&data, static_cast<size_t>(bytes)));
    data_.reset(data);
    Check(cudaMemset(data, value, static_cast<size_t>(bytes)));
    Check(cudaDeviceSynchronize());
  }
  explicit DeviceBytes(const std::vector<int32_t>& values)
      : DeviceBytes(static_cast<int64_t>(values.size() * sizeof(int32_t)), 0) {
    Check(
        cudaMemcpy(data(), values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    Check(cudaDeviceSynchronize());
  }
  void* data() const { return data_.get(); }
  const int32_t* ints() const { return static_cast<const int32_t*>(data()); }

 private:
  struct Free {
    void operator()(void* data) const { (void)cudaFree(data); }
  };
  std::unique_ptr<void, Free> data_;
};

// Calls of one shape, every request of kv_len tokens; each call reads the next pages of the pool,
// in random physical order. All values are the same small number: times do not depend on them.
class Workload {
 public:
  Workload(const AttentionShape& shape, int32_t kv_len)
      : plan_(Value(MakeGpuLaunchPlan(shape, Value(QueryDevice(0))))),
        kv_len_(kv_len),
        pages_of_request_((kv_len + shape.page_size - 1) / shape.page_size),
        pages_per_call_(int64_t{pages_of_request_} * shape.batch),
        num_pages_(std::max(pages_per_call_, kPoolBytes / PageBytes())),
        k_cache_(num_pages_ * PageBytes(), kValueByte),
        v_cache_(num_pages_ * PageBytes(), kValueByte),
        rows_(RowBytes(), kValueByte),
        out_(RowBytes(), 0),
        other_out_(RowBytes(), 0),
        indptr_(Indptr()),
        indices_(ShuffledPages()),
        last_page_len_(
            std::vector<int32_t>(shape.batch, kv_len - (pages_of_request_ - 1) * shape.page_size)),
        workspace_(Value(Workspace::Create(plan_))) {}

  const LaunchPlan& plan() const { return plan_; }
  WorkspaceView workspace() const { return workspace_.View(); }
  int64_t LiveBytesPerCall() const {
    return int64_t{kv_len_} * plan_.shape.batch * TokenElements() * 2 * kElementBytes;
  }

  // Each call has the pages behind those of the call before it; where the pool ends, its first ones.
  PageTableView Table(int32_t call) const {
    const int64_t first = call % (num_pages_ / pages_per_call_) * pages_per_call_;
    return {indptr_.ints(), indices_.ints() + first, last_page_len_.ints(), pages_per_call_,
            num_pages_,     plan_.shape.batch,       plan_.shape.page_size};
  }

  DecodeArgs Decode(int32_t call) const {
    DecodeArgs args;
    args.q = rows_.data();
    args.q_batch_stride = QueryStrides().batch;
    args.q_head_stride = QueryStrides().head;
    args.k_cache = k_cache_.data();
    args.v_cache = v_cache_.data();
    args.k_strides = args.v_strides = Strides();
    args.table = Table(call);
    args.out = out_.data();
    args.options = Options();
    return args;
  }

  AppendArgs Append(int32_t call) const {
    AppendArgs args;
    args.k = args.v = rows_.data();
    args.k_strides = args.v_strides = {TokenElements(), plan_.shape.head_dim};
    args.k_cache = k_cache_.data();
    args.v_cache = v_cache_.data();
    args.k_cache_strides = args.v_cache_strides = Strides();
    args.table = Table(call);
    return args;
  }

  // A step of one layer: call 0. Its output goes to one of two places.
  GraphSpec Step(bool other_out) const {
    const PageTableView table = Table(0);
    GraphSpec spec;
    spec.shape = plan_.shape;
    spec.max_pages = table.num_indices;
    spec.num_pages = table.num_pages;
    spec.page_indptr = table.indptr;
    spec.page_indices = table.indices;
    spec.last_page_len = table.last_page_len;
    GraphLayer layer;
    layer.q = rows_.data();
    layer.q_strides = QueryStrides();
    layer.k_cache = k_cache_.data();
    layer.v_cache = v_cache_.data();
    layer.k_cache_strides = layer.v_cache_strides = Strides();
    layer.out = other_out ? other_out_.data() : out_.data();
    layer.options = Options();
    spec.layers = {layer};
    return spec;
  }

 private:
  static constexpr int64_t kPoolBytes = int64_t{256} << 20;  // of K, and of V
  static constexpr int64_t kElementBytes = 2;
  static constexpr int kValueByte = 0x38;

  int64_t TokenElements() const { return int64_t{plan_.shape.num_kv_heads} * plan_.shape.head_dim; }
  int64_t PageBytes() const { return plan_.shape.page_size * TokenElements() * kElementBytes; }
  // Of q, which is also k and v, and of the output.
  int64_t RowBytes() const { return plan_.shape.batch * QueryStrides().batch * kElementBytes; }
  RowStrides QueryStrides() const {
    return {int64_t{plan_.shape.num_query_heads} * plan_.shape.head_dim, plan_.shape.head_dim};
  }
  CacheStrides Strides() const {
    return {plan_.shape.page_size * TokenElements(), TokenElements(), plan_.shape.head_dim};
  }
  AttentionOptions Options() const {
    AttentionOptions options;
    options.sm_scale = 1.0F / std::sqrt(static_cast<float>(plan_.shape.head_dim));
    return options;
  }
  std::vector<int32_t> Indptr() const {
    std::vector<int32_t> indptr;
    for (int32_t r = 0; r <= plan_.shape.batch; ++r) indptr.push_back(r * pages_of_request_);
    return indptr;
  }
  std::vector<int32_t> ShuffledPages() const {
    std::vector<int32_t> pages(static_cast<size_t>(num_pages_));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(1));
    return pages;
  }

  LaunchPlan plan_;
  int32_t kv_len_;
  int32_t pages_of_request_;
  int64_t pages_per_call_;
  int64_t num_pages_;
  DeviceBytes k_cache_, v_cache_, rows_, out_, other_out_, indptr_, indices_, last_page_len_;
  Workspace workspace_;
};

}  // namespace pgqa::bench
