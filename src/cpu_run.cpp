// Runs a checked CPU call: workers on threads, then the merge of partials.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_run.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_rope.h"
#include "cpu_worker.h"
#include "pgqa/schedule.h"

namespace pgqa {
namespace {

// Bytes of K and V that are worth starting one more thread for.
constexpr int64_t kMinBytesPerThread = 1 << 20;

// The soft cap is taken in base 2 as cap' * tanh(dot * scale) with cap' = cap * log2 e.
ScoreTransform TransformOf(const AttentionOptions& options) {
  const double cap = options.logits_soft_cap;
  if (cap == 0.0) return {static_cast<float>(double{options.sm_scale} * kLog2e), 0.0F};
  const double scale = std::clamp<double>(options.sm_scale / cap, -FLT_MAX, FLT_MAX);
  return {static_cast<float>(scale), static_cast<float>(std::min<double>(cap * kLog2e, FLT_MAX))};
}

std::vector<int32_t> BusyWorkers(const BatchPlan& batch) {
  std::vector<int32_t> workers;
  for (int32_t worker = 0; worker < static_cast<int32_t>(batch.starts.size()); ++worker) {
    const Share share = batch.ShareOf(worker);
    if (share.begin < share.end) workers.push_back(worker);
  }
  return workers;
}

int64_t NumThreads(const CpuCall& call, int64_t num_busy_workers) {
  const AttentionShape& shape = call.shape();
  const double bytes = static_cast<double>(call.batch.live_tokens) * shape.num_kv_heads *
                       shape.head_dim * 2.0 * BytesOf(shape.dtype);
  const double threads = bytes / static_cast<double>(kMinBytesPerThread);
  if (threads >= static_cast<double>(num_busy_workers)) return num_busy_workers;
  return std::max<int64_t>(1, static_cast<int64_t>(threads));
}

// Runs the workers, each once, on as many threads as there are scratches. Which thread runs a
// worker has no influence on the result. A thread that cannot be started leaves its share to the
// others.
void RunWorkers(const std::vector<int32_t>& workers, std::vector<CpuWorker>* scratches) {
  std::atomic<size_t> next{0};
  const auto run = [&workers, &next](CpuWorker* scratch) {
    for (size_t i = next++; i < workers.size(); i = next++) scratch->Run(workers[i]);
  };
  std::vector<std::jthread> threads;
  threads.reserve(scratches->size());
  for (size_t i = 1; i < scratches->size(); ++i) {
    try {
      threads.emplace_back(run, &(*scratches)[i]);
    } catch (const std::system_error&) {
      break;
    }
  }
  run(scratches->data());
}

// Adds up the partials of one request and head group in index order, and writes its output.
void MergePiece(const CpuCall& call, const Piece& piece, const PieceSlots& slots) {
  std::vector<float> total(call.row_dim);
  for (int32_t row = 0; row < call.RowsPerGroup(); ++row) {
    std::fill(total.begin(), total.end(), 0.0F);
    SoftmaxState state;
    for (int64_t slot = slots.first_slot; slot < slots.first_slot + slots.num_pieces; ++slot) {
      const SoftmaxState& partial = call.partials->States(slot)[row];
      const float* accumulator = call.partials->Accumulators(slot) + int64_t{row} * call.row_dim;
      const SoftmaxState merged = Merge(state, partial);
      const float old_factor = Rescale(state.max, merged.max);
      const float new_factor = Rescale(partial.max, merged.max);
      for (int32_t d = 0; d < call.row_dim; ++d) {
        total[d] = total[d] * old_factor + accumulator[d] * new_factor;
      }
      state = merged;
    }
    call.StoreOutput(piece.request, piece.head_group * call.RowsPerGroup() + row, total.data(),
                     state);
  }
}

// Merges every request that was cut, found at the worker that holds its first piece.
void MergePartials(const CpuCall& call, const std::vector<int32_t>& workers) {
  for (const int32_t worker : workers) {
    SegmentCursor cursor = call.batch.CursorOf(worker);
    Piece piece;
    while (cursor.Next(call.args.table, call.args.options.window_left, &piece)) {
      if (piece.IsWhole() || piece.first_tile != 0) continue;
      MergePiece(call, piece, call.batch.SlotsOf(worker, piece));
    }
  }
}

void StoreEmptyRequests(const CpuCall& call) {
  const std::vector<float> zeros(call.row_dim);
  for (int32_t request = 0; request < call.shape().batch; ++request) {
    if (call.args.table.KvLength(request) > 0) continue;
    for (int32_t head = 0; head < call.shape().num_query_heads; ++head) {
      call.StoreOutput(request, head, zeros.data(), SoftmaxState{});
    }
  }
}

}  // namespace

void RunOnCpu(const LaunchPlan& plan, const CpuDecodeArgs& args, const CpuKernels& kernels) {
  const BatchPlan batch =
      PlanBatch(plan.partition, args.table, args.options.window_left, plan.segment_tokens);
  const std::vector<int32_t> workers = BusyWorkers(batch);
  std::unique_ptr<RopeTables> rope;
  if (plan.shape.pos_encoding == PosEncoding::kRopeLlama) {
    rope = std::make_unique<RopeTables>(plan.shape.head_dim, args.options.rope_scale,
                                        args.options.rope_theta);
  }
  const int32_t row_dim = PaddedRow(plan.shape.head_dim);
  const int32_t rows = batch.partition.heads_per_worker * plan.shape.GroupSize();
  const int64_t num_slots = batch.NumSlots(workers.empty() ? 0 : int64_t{workers.back()} + 1);
  PartialStore partials(num_slots, rows, row_dim);
  const CpuCall call{plan,   args, batch, kernels, rope.get(), &partials, TransformOf(args.options),
                     row_dim};
  if (!workers.empty()) {
    const int64_t num_threads = NumThreads(call, static_cast<int64_t>(workers.size()));
    std::vector<CpuWorker> scratches;
    scratches.reserve(num_threads);
    for (int64_t i = 0; i < num_threads; ++i) scratches.emplace_back(call);
    RunWorkers(workers, &scratches);
  }
  MergePartials(call, workers);
  StoreEmptyRequests(call);
}

}  // namespace pgqa
