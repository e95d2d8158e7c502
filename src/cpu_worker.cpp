// One worker of a CPU call: computes its pieces of the schedule, chunk by chunk.
// SPDX-License-Identifier: Apache-2.0
#include "cpu_worker.h"

#include <algorithm>
#include <utility>

namespace pgqa {
void CpuCall::StoreOutput(int32_t request, int32_t query_head, const float* accumulator,
                          const SoftmaxState& state) const {
  const int64_t element = request * args.out_strides.batch + query_head * args.out_strides.head;
  kernels.store_row(accumulator, OutputScale(state), shape().dtype, shape().head_dim,
                    static_cast<char*>(args.out) + element * BytesOf(shape().dtype));
  if (args.lse != nullptr) {
    args.lse[int64_t{request} * shape().num_query_heads + query_head] = LogSumExp(state);
  }
}

CpuWorker::CpuWorker(const CpuCall& call)
    : call_(call),
      num_rows_(call.RowsPerGroup()),
      queries_(int64_t{num_rows_} * call.row_dim),
      accumulators_(queries_.size()),
      states_(num_rows_),
      scores_(int64_t{num_rows_} * kChunkTokens),
      staging_(int64_t{kStagedTokens} * call.row_dim),
      zero_row_(call.row_dim) {
  if (call.rope == nullptr) return;
  rotated_queries_.resize(queries_.size());
  frame_.emplace_back(*call.rope);
}

void CpuWorker::Run(int32_t worker) {
  ChunkCursor cursor(call_.args, call_.shape().dtype, call_.batch.partition,
                     call_.batch.CursorOf(worker));
  Chunk chunk;
  Chunk upcoming;
  cursor.Next(&chunk);
  for (; chunk.num_tokens > 0; std::swap(chunk, upcoming)) {
    cursor.Next(&upcoming);
    if (chunk.begins_piece) {
      BeginPiece(chunk);
    } else if (!frame_.empty()) {
      frame_[0].Advance();
    }
    Attend(chunk, upcoming);
    if (chunk.ends_piece) EndPiece(chunk.piece, worker);
  }
}

void CpuWorker::BeginPiece(const Chunk& chunk) {
  const Piece& piece = chunk.piece;
  // The query stands at the request's last token.
  if (!frame_.empty()) frame_[0].Start(piece.live.end - 1 - chunk.first_token);
  const AttentionShape& shape = call_.shape();
  const RowStrides& strides = call_.args.q_strides;
  for (int32_t row = 0; row < call_.RowsPerGroup(); ++row) {
    const int64_t query_head = int64_t{piece.head_group} * call_.RowsPerGroup() + row;
    const int64_t element = piece.request * strides.batch + query_head * strides.head;
    call_.kernels.load_row(static_cast<const char*>(call_.args.q) + element * BytesOf(shape.dtype),
                           shape.dtype, shape.head_dim, {},
                           queries_.data() + int64_t{row} * call_.row_dim);
  }
  std::fill(accumulators_.begin(), accumulators_.end(), 0.0F);
  std::fill(states_.begin(), states_.end(), SoftmaxState{});
}

void CpuWorker::Attend(const Chunk& chunk, const Chunk& upcoming) {
  const AttentionShape& shape = call_.shape();
  const int64_t bytes = BytesOf(shape.dtype);
  const int64_t key_stride = call_.args.k_strides.head * bytes;
  AttendArgs args;
  args.keys = {chunk.keys, chunk.num_tokens, key_stride};
  args.values = {chunk.values, chunk.num_tokens, call_.args.v_strides.head * bytes};
  args.upcoming_keys = {upcoming.keys, upcoming.num_tokens, key_stride};
  args.dtype = shape.dtype;
  args.head_dim = shape.head_dim;
  args.num_heads = call_.batch.partition.heads_per_worker;
  args.group_size = shape.GroupSize();
  args.queries = queries_.data();
  if (call_.rope != nullptr) {
    args.key_rotations = call_.rope->KeyRotations();
    args.queries = RotatedQueries();
  }
  args.accumulators = accumulators_.data();
  args.states = states_.data();
  args.scores = scores_.data();
  args.staging = staging_.data();
  args.zero_row = zero_row_.data();
  args.transform = call_.transform;
  call_.kernels.attend(args);
}

const float* CpuWorker::RotatedQueries() {
  for (int64_t row = 0; row < num_rows_; ++row) {
    call_.kernels.load_row(queries_.data() + row * call_.row_dim, DType::kFloat32,
                           call_.shape().head_dim, frame_[0].rotation(),
                           rotated_queries_.data() + row * call_.row_dim);
  }
  return rotated_queries_.data();
}

void CpuWorker::EndPiece(const Piece& piece, int32_t worker) {
  if (!piece.IsWhole()) {
    const int64_t slot = call_.batch.SlotOf(worker, piece);
    std::copy(accumulators_.begin(), accumulators_.end(), call_.partials->Accumulators(slot));
    std::copy(states_.begin(), states_.end(), call_.partials->States(slot));
    return;
  }
  for (int32_t row = 0; row < call_.RowsPerGroup(); ++row) {
    call_.StoreOutput(piece.request, piece.head_group * call_.RowsPerGroup() + row,
                      accumulators_.data() + int64_t{row} * call_.row_dim, states_[row]);
  }
}

}  // namespace pgqa
