// Decodes a batch of two requests on the CPU with the installed library.
// SPDX-License-Identifier: Apache-2.0
#include <iostream>
#include <vector>

#include "pgqa/cpu_executor.h"

int main() {
  // 2 requests, 4 query heads on 2 KV heads, head_dim 64, pages of 16 tokens; no lengths.
  const pgqa::AttentionShape shape{2, 4, 2, 64, 16, pgqa::DType::kFloat32};
  const auto plan = pgqa::MakeCpuLaunchPlan(shape, /*num_threads=*/2);
  // Request 0 has 16 + 16 + 5 tokens in pages 2, 0 and 1; request 1 has none.
  const std::vector<int32_t> indptr{0, 3, 3}, indices{2, 0, 1}, last_page_len{5, 0};
  const std::vector<float> q(2 * 4 * 64, 1.0F), cache(3 * 16 * 2 * 64, 0.5F);
  std::vector<float> out(q.size(), -1.0F);
  pgqa::CpuDecodeArgs args;
  args.q = q.data();
  args.k_cache = args.v_cache = cache.data();
  args.out = out.data();
  args.q_strides = args.out_strides = {.batch = 4 * 64, .head = 64};
  args.k_strides = args.v_strides = {.page = 16 * 2 * 64, .token = 2 * 64, .head = 64};
  args.table = {indptr.data(), indices.data(), last_page_len.data(), 3, 3, 2, 16};
  args.options.sm_scale = 0.125F;
  const absl::Status status = plan.ok() ? pgqa::DecodeOnCpu(*plan, args) : plan.status();
  std::cout << status << ": " << out[0] << " " << out[4 * 64] << "\n";  // OK: 0.5 0
  return status.ok() ? 0 : 1;
}
