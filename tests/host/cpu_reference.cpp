// Dense attention of one query head in fp64, as the formula has it, and the accuracy asked for.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu_problem.h"

namespace pgqa::testing {
namespace {

// Turns the half-split pairs of `row` as at `position`.
void Rotate(int64_t position, const AttentionOptions& options, std::vector<double>* row) {
  const size_t half = row->size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(row->size());
    const double frequency = std::pow(options.rope_theta, exponent) / options.rope_scale;
    const double angle = static_cast<double>(position) * frequency;
    const double a = (*row)[i];
    const double b = (*row)[i + half];
    (*row)[i] = a * std::cos(angle) - b * std::sin(angle);
    (*row)[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
}

}  // namespace

std::vector<double> Problem::LogitsOf(int32_t request, int32_t head) const {
  const AttentionOptions& options = spec_.options;
  const bool rope = shape().pos_encoding == PosEncoding::kRopeLlama;
  const int64_t kv_len = spec_.kv_lens[request];
  std::vector<double> query(shape().head_dim);
  for (int32_t d = 0; d < shape().head_dim; ++d) query[d] = QueryAt(request, head, d);
  if (rope) Rotate(kv_len - 1, options, &query);
  std::vector<double> logits;
  for (int64_t t = LiveBegin(request); t < kv_len; ++t) {
    const int32_t page = indices_[indptr_[request] + t / shape().page_size];
    std::vector<double> key(shape().head_dim);
    for (int32_t d = 0; d < shape().head_dim; ++d) {
      key[d] = KeyAt(page, t % shape().page_size, head / shape().GroupSize(), d);
    }
    if (rope) Rotate(t, options, &key);
    double logit = 0.0;
    for (int32_t d = 0; d < shape().head_dim; ++d) logit += query[d] * key[d];
    logit *= options.sm_scale;
    const double cap = options.logits_soft_cap;
    logits.push_back(cap > 0.0 ? cap * std::tanh(logit / cap) : logit);
  }
  return logits;
}

Problem::Reference Problem::ReferenceOf(int32_t request, int32_t head) const {
  Reference reference{std::vector<double>(shape().head_dim), -INFINITY};
  const std::vector<double> logits = LogitsOf(request, head);
  if (logits.empty()) return reference;
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const int64_t t = LiveBegin(request) + static_cast<int64_t>(i);
    const int32_t page = indices_[indptr_[request] + t / shape().page_size];
    const double weight = std::exp(logits[i] - max);
    sum += weight;
    for (int32_t d = 0; d < shape().head_dim; ++d) {
      reference.output[d] +=
          weight * ValueAt(page, t % shape().page_size, head / shape().GroupSize(), d);
    }
  }
  for (double& x : reference.output) x /= sum;
  reference.lse = max + std::log(sum);
  return reference;
}

double WorstError(const Problem& problem, double logit_size) {
  const AttentionShape& shape = problem.shape();
  const double half_ulp = shape.dtype == DType::kFloat32   ? 0.0
                          : shape.dtype == DType::kFloat16 ? std::ldexp(1.0, -11)
                                                           : std::ldexp(1.0, -8);
  const double fp32_error = 1e-6 * std::max(1.0, logit_size);
  double worst = 0.0;
  for (int32_t request = 0; request < shape.batch; ++request) {
    for (int32_t head = 0; head < shape.num_query_heads; ++head) {
      const Problem::Reference reference = problem.ReferenceOf(request, head);
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        const double expected = reference.output[d];
        const double error = std::abs(problem.OutputAt(request, head, d) - expected);
        const double allowed = fp32_error + (fp32_error + half_ulp) * std::abs(expected);
        // NaN must count as the worst.
        worst = error <= allowed * worst ? worst : std::isnan(error) ? INFINITY : error / allowed;
      }
      const double lse = problem.lse()[int64_t{request} * shape.num_query_heads + head];
      if (lse == reference.lse) continue;  // also where both are -inf
      const double lse_error = std::abs(lse - reference.lse) / (fp32_error * 3);
      worst = lse_error <= worst ? worst : std::isnan(lse_error) ? INFINITY : lse_error;
    }
  }
  return worst;
}

ProblemSpec SpecOf(int32_t group, int32_t kv_heads, int32_t head_dim, int32_t page_size,
                   DType dtype) {
  ProblemSpec spec;
  spec.shape.num_query_heads = group * kv_heads;
  spec.shape.num_kv_heads = kv_heads;
  spec.shape.head_dim = head_dim;
  spec.shape.page_size = page_size;
  spec.shape.dtype = dtype;
  spec.options.sm_scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
  return spec;
}

void ExpectRight(const ProblemSpec& spec, int32_t num_threads) {
  SCOPED_TRACE(spec.Name());
  Problem problem(spec);
  const absl::Status status = problem.Run(num_threads);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_LE(WorstError(problem), 1.0);
  EXPECT_TRUE(problem.GapsUntouched());
}

}  // namespace pgqa::testing
