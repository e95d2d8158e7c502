// A serving loop: one decode step captured once and replayed while requests come, grow and go.
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "page_allocator.h"
#include "pgqa/decode_graph.h"

namespace {

constexpr int32_t kMaxBatch = 8;
constexpr int32_t kNumPages = 512;
constexpr int32_t kSteps = 1000;
constexpr pgqa::AttentionShape kShape{kMaxBatch, 32, 8, 128, 16, pgqa::DType::kFloat16};
constexpr int32_t kValueElements = 8 * 128;
constexpr int32_t kOutElements = 32 * 128;

[[noreturn]] void Fail(const std::string& what) {
  std::cerr << what << "\n";
  std::exit(1);
}

void Check(cudaError_t error) {
  if (error != cudaSuccess) Fail(cudaGetErrorString(error));
}

void Check(const absl::Status& status) {
  if (!status.ok()) Fail(std::string(status.message()));
}

// 1 to 1024 as float16.
uint16_t HalfOf(int32_t value) {
  int32_t exponent = 0;
  while (value >> (exponent + 1) != 0) ++exponent;
  return static_cast<uint16_t>((exponent + 15) << 10 | ((value << 10 >> exponent) & 0x3ff));
}

// What the host gives to a step, in pinned memory.
struct StepInput {
  int32_t indptr[kMaxBatch + 1];
  int32_t indices[kNumPages];
  int32_t last_page_len[kMaxBatch];
  uint16_t values[kMaxBatch][kValueElements];
};

// The step of one layer, which first appends k and v. The graph owns q, k, v, out and the table.
pgqa::DecodeGraph CaptureStep(void* k_cache, void* v_cache, cudaStream_t stream) {
  pgqa::GraphSpec spec;
  spec.shape = kShape;
  spec.max_pages = spec.num_pages = kNumPages;
  spec.append = true;
  spec.layers.resize(1);
  pgqa::GraphLayer& layer = spec.layers[0];
  layer.k_cache = k_cache;
  layer.v_cache = v_cache;
  layer.k_cache_strides = layer.v_cache_strides = {16 * kValueElements, kValueElements, 128};
  layer.options.sm_scale = 0.088F;
  absl::StatusOr<pgqa::DecodeGraph> graph = pgqa::DecodeGraph::Create(spec);
  Check(graph.status());
  Check(graph->Capture(stream));
  return *std::move(graph);
}

// Each token of every live request: all values of a request are its id, so that what attention
// makes of them is its id as well, at any length.
class Loop {
 public:
  Loop(pgqa::DecodeGraph graph, cudaStream_t stream) : graph_(std::move(graph)), stream_(stream) {
    Check(cudaMallocHost(reinterpret_cast<void**>(&input_), sizeof *input_));
  }
  ~Loop() { (void)cudaFreeHost(input_); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void Step(size_t wanted_requests) {
    while (requests_.size() < wanted_requests) {
      const int32_t number = ++arrived_;
      requests_.push_back({.id = number % 1000 + 1, .wanted_length = 1 + number * 37 % 900});
    }
    for (size_t i = 0; i < requests_.size(); ++i) {
      pages_.Grow(&requests_[i]);
      longest_ = std::max(longest_, requests_[i].length);
      std::fill(std::begin(input_->values[i]), std::end(input_->values[i]),
                HalfOf(requests_[i].id));
    }
    Replay();
    CheckOutput();
    tokens_ += static_cast<int32_t>(requests_.size());
    const auto done = [](const Request& r) { return r.length == r.wanted_length; };
    for (const Request& r : requests_) {
      if (done(r)) pages_.Free(r);
    }
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), done), requests_.end());
  }

  void Print() const {
    std::cout << "OK: " << kSteps << " replays of one graph, " << arrived_ << " requests, "
              << tokens_ << " tokens, at most " << longest_ << " of one request\n";
  }

 private:
  void Upload(const void* to, const void* from, size_t bytes) {
    Check(cudaMemcpyAsync(const_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice, stream_));
  }

  void Replay() {
    const size_t live = requests_.size();
    const pgqa::GraphSpec& own = graph_.spec();
    pages_.WriteTable(requests_, input_->indptr, input_->indices, input_->last_page_len);
    Upload(own.page_indptr, input_->indptr, (live + 1) * sizeof(int32_t));
    Upload(own.page_indices, input_->indices, size_t(input_->indptr[live]) * sizeof(int32_t));
    Upload(own.last_page_len, input_->last_page_len, live * sizeof(int32_t));
    Upload(own.layers[0].v, input_->values, live * sizeof input_->values[0]);
    Check(graph_.Replay(static_cast<int32_t>(live), stream_));
    Check(cudaMemcpyAsync(out_.data(), own.layers[0].out, out_.size() * sizeof(uint16_t),
                          cudaMemcpyDeviceToHost, stream_));
    Check(cudaStreamSynchronize(stream_));  // a server would sample on the device and go on
  }

  void CheckOutput() const {
    for (size_t row = 0; row < kMaxBatch; ++row) {
      const uint16_t expected = row < requests_.size() ? HalfOf(requests_[row].id) : 0;
      const auto begin = out_.begin() + static_cast<std::ptrdiff_t>(row * kOutElements);
      if (std::any_of(begin, begin + kOutElements, [&](uint16_t got) { return got != expected; }))
        Fail("wrong output in row " + std::to_string(row));
    }
  }

  pgqa::DecodeGraph graph_;
  cudaStream_t stream_;
  StepInput* input_ = nullptr;
  PageAllocator pages_{kNumPages, kShape.page_size};
  std::vector<Request> requests_;
  std::vector<uint16_t> out_ = std::vector<uint16_t>(size_t{kMaxBatch} * kOutElements);
  int32_t arrived_ = 0, tokens_ = 0, longest_ = 0;
};

}  // namespace

int main() {
  void* caches[2] = {};
  const size_t cache_bytes = size_t{kNumPages} * 16 * kValueElements * sizeof(uint16_t);
  for (void*& cache : caches) Check(cudaMalloc(&cache, cache_bytes));
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  {
    Loop loop(CaptureStep(caches[0], caches[1], stream), stream);
    for (int32_t step = 0; step < kSteps; ++step)
      loop.Step(1 + static_cast<size_t>(step % kMaxBatch));
    loop.Print();
  }
  Check(cudaStreamDestroy(stream));
  for (void* cache : caches) Check(cudaFree(cache));
}
