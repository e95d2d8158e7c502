// The vector kernels of the CPU executor: one table of functions for each instruction set.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "pgqa/softmax_state.h"
#include "pgqa/types.h"

namespace pgqa {

// Tokens of one request that a worker takes in one step, a multiple of every vector width.
constexpr int32_t kChunkTokens = 64;

// Tokens of one head that are widened or rotated at a time, where rows are not used in place.
constexpr int32_t kStagedTokens = 8;

// Floats of a padded row are a multiple of the widest vector, so that kernels have no tail.
constexpr int32_t kRowAlignment = 16;

constexpr int32_t PaddedRow(int32_t head_dim) {
  return (head_dim + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

constexpr int32_t BytesOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// From dot products to base-2 scores: dot * scale, or cap * tanh(dot * scale) where cap > 0.
struct ScoreTransform {
  float scale = 1.0F;
  float cap = 0.0F;
};

// Turns of rows by their half-split pairs, [rows, head_dim / 2]; null: rows are not turned.
struct RowRotations {
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

// The rows of K or V of one chunk and head group.
struct ChunkRows {
  const char* const* first_head = nullptr;  // [num_tokens]; null where a row counts as zeros
  int32_t num_tokens = 0;                   // at most kChunkTokens
  int64_t head_stride = 0;                  // bytes to the row of the next head
};

// One step of the online softmax: the query heads of a head group against one chunk. A row of query
// heads is row_dim = PaddedRow(head_dim) floats, its padding zero. Scratch needs no initial value.
struct AttendArgs {
  ChunkRows keys;
  ChunkRows values;         // of as many tokens, at least one
  ChunkRows upcoming_keys;  // of the next chunk, fetched into the cache meanwhile; may be empty
  DType dtype = DType::kFloat32;
  int32_t head_dim = 0;
  int32_t num_heads = 0;            // of the head group
  int32_t group_size = 0;           // query heads a head
  RowRotations key_rotations;       // one for each token
  const float* queries = nullptr;   // [num_heads, group_size, row_dim]
  float* accumulators = nullptr;    // [num_heads, group_size, row_dim]
  SoftmaxState* states = nullptr;   // [num_heads, group_size]
  float* scores = nullptr;          // scratch [num_heads, group_size, kChunkTokens]
  float* staging = nullptr;         // scratch [kStagedTokens, row_dim], its padding zero
  const float* zero_row = nullptr;  // [row_dim] zeros
  ScoreTransform transform;
};

struct CpuKernels {
  const char* name;

  void (*attend)(const AttendArgs& args);

  // Widens head_dim elements of `dtype` to fp32, turned where `rotation` is given (head_dim even).
  // The rest of a padded row is left alone.
  void (*load_row)(const void* row, DType dtype, int32_t head_dim, RowRotations rotation,
                   float* out);

  // Writes row * scale, rounded to nearest even, as head_dim elements of `dtype`.
  void (*store_row)(const float* row, float scale, DType dtype, int32_t head_dim, void* out);
};

const CpuKernels& BaseCpuKernels();
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PGQA_X86_CPU_KERNELS 1
const CpuKernels& Avx2CpuKernels();    // needs AVX2, FMA and F16C
const CpuKernels& Avx512CpuKernels();  // needs AVX-512 F, BW, DQ and VL besides
#endif

// Whether this machine can run `kernels`.
bool IsRunnable(const CpuKernels& kernels);

// The widest runnable kernels.
const CpuKernels& BestCpuKernels();

}  // namespace pgqa
