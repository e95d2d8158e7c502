// Problems for tests of the CPU executor: poisoned tensors, and a plain fp64 reference.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cpu_kernels.h"
#include "pgqa/cpu_executor.h"
#include "pgqa/launch_plan.h"

namespace pgqa::testing {

// How the caches lie in memory.
enum class Layout {
  kNhd,          // contiguous [pages, page_size, kv_heads, head_dim]
  kHnd,          // contiguous [pages, kv_heads, page_size, head_dim]
  kInterleaved,  // K and V rows side by side in one buffer
  kPadded,       // odd gaps after rows, tokens and pages, different ones in K and V
};

struct ProblemSpec {
  AttentionShape shape{.batch = 1,
                       .num_query_heads = 4,
                       .num_kv_heads = 2,
                       .head_dim = 64,
                       .page_size = 16,
                       .dtype = DType::kFloat32};
  AttentionOptions options{.sm_scale = 0.125F};
  std::vector<int64_t> kv_lens{33};
  Layout layout = Layout::kNhd;
  bool padded_queries = false;  // gaps between the rows of q and of the output
  int32_t shared_pages = 0;     // > 0: all page entries repeat this many pages
  float key_scale = 1.0F;       // of random keys; large ones give peaked weights
  uint32_t seed = 1;

  std::string Name() const;
};

// Tensors in which every element that must not be read is NaN, and index entries that must not be
// read are absurd.
class Problem {
 public:
  explicit Problem(const ProblemSpec& spec);

  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const ProblemSpec& spec() const { return spec_; }
  const AttentionShape& shape() const { return spec_.shape; }

  // Fills the output with NaN first.
  absl::Status Run(int32_t num_threads);
  absl::Status RunWith(const LaunchPlan& plan);
  // The same with given kernels, on two threads.
  void RunWithKernels(const CpuKernels& kernels);

  // Whether the elements between the rows of the output are as they were.
  bool GapsUntouched() const;

  float OutputAt(int32_t request, int32_t head, int32_t d) const;
  const std::vector<float>& lse() const { return lse_; }
  std::vector<uint8_t> OutputBytes() const { return out_; }

  // The output [head_dim] and LSE of one query head, in fp64.
  struct Reference {
    std::vector<double> output;
    double lse = 0.0;
  };
  Reference ReferenceOf(int32_t request, int32_t head) const;

  CpuDecodeArgs args();
  std::vector<int32_t>& indptr() { return indptr_; }
  std::vector<int32_t>& indices() { return indices_; }
  std::vector<int32_t>& last_page_len() { return last_page_len_; }

  double KeyAt(int64_t page, int64_t slot, int32_t head, int32_t d) const;
  double ValueAt(int64_t page, int64_t slot, int32_t head, int32_t d) const;
  double QueryAt(int32_t request, int32_t head, int32_t d) const;
  void SetKey(int64_t page, int64_t slot, int32_t head, int32_t d, float value);
  void SetValue(int64_t page, int64_t slot, int32_t head, int32_t d, float value);
  void SetQuery(int32_t request, int32_t head, int32_t d, float value);

 private:
  void BuildTable(uint32_t seed);
  void BuildStrides();
  void FillTensors(uint32_t seed);
  void PoisonOutput();
  int64_t LiveBegin(int32_t request) const;
  std::vector<double> LogitsOf(int32_t request, int32_t head) const;

  ProblemSpec spec_;
  int64_t num_pages_ = 0;
  std::vector<int32_t> indptr_, indices_, last_page_len_;
  CacheStrides k_strides_, v_strides_;
  int64_t v_offset_ = 0;  // elements into the buffer of K where both share one
  RowStrides q_strides_;
  std::vector<uint8_t> q_, k_, v_, out_;
  std::vector<float> lse_;
};

// Largest violation of the accuracy that an fp32 computation rounded at the end has, over all
// heads; at most 1 is right. LSE included. Logits are assumed to be of the order of `logit_size`.
double WorstError(const Problem& problem, double logit_size = 10.0);

constexpr DType kAllDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

ProblemSpec SpecOf(int32_t group, int32_t kv_heads, int32_t head_dim, int32_t page_size,
                   DType dtype = DType::kFloat32);

// Runs the problem and compares all of its output with the reference.
void ExpectRight(const ProblemSpec& spec, int32_t num_threads = 2);

}  // namespace pgqa::testing
