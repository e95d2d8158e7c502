// Checks an append call and launches its kernel.
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

#include "cuda/append_kernel.cuh"
#include "cuda/cuda_status.h"
#include "cuda/kernel_launch.h"
#include "pgqa/append.h"

namespace pgqa {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr int32_t kWideUnit = 8;  // elements: 16 bytes

RowStrides InBytes(const RowStrides& s) {
  return {s.batch * kElementBytes, s.head * kElementBytes};
}

CacheStrides InBytes(const CacheStrides& s) {
  return {s.page * kElementBytes, s.token * kElementBytes, s.head * kElementBytes};
}

AppendParams MakeParams(const AttentionShape& shape, const AppendArgs& args) {
  AppendParams p;
  p.table = args.table;
  p.k = {static_cast<const char*>(args.k), InBytes(args.k_strides)};
  p.v = {static_cast<const char*>(args.v), InBytes(args.v_strides)};
  p.q = {static_cast<const char*>(args.q), InBytes(args.q_strides)};
  p.k_cache = {static_cast<char*>(args.k_cache), InBytes(args.k_cache_strides)};
  p.v_cache = {static_cast<char*>(args.v_cache), InBytes(args.v_cache_strides)};
  p.q_out = static_cast<char*>(args.q_out);
  p.q_out_strides = InBytes(args.q_out_strides);
  p.num_kv_heads = shape.num_kv_heads;
  p.num_query_heads = shape.num_query_heads;
  p.head_dim = shape.head_dim;
  p.log2_theta = std::log2(args.rope_theta);
  p.turns_scale = 1.0 / (2.0 * M_PI * args.rope_scale);
  return p;
}

// Whether every row, and its second half where rows are turned, begins on a boundary of 16 bytes.
bool IsWide(const AppendParams& p, bool turned) {
  int64_t offsets = 0;
  for (const void* address :
       {static_cast<const void*>(p.k.address), static_cast<const void*>(p.v.address),
        static_cast<const void*>(p.q.address), static_cast<const void*>(p.q_out),
        static_cast<const void*>(p.k_cache.address), static_cast<const void*>(p.v_cache.address)}) {
    offsets |= reinterpret_cast<int64_t>(address);
  }
  for (const RowStrides& s : {p.k.strides, p.v.strides, p.q.strides, p.q_out_strides})
    offsets |= s.batch | s.head;
  for (const CacheStrides& s : {p.k_cache.strides, p.v_cache.strides})
    offsets |= s.page | s.token | s.head;
  return offsets % (kWideUnit * kElementBytes) == 0 &&
         p.head_dim % (turned ? 2 * kWideUnit : kWideUnit) == 0;
}

template <class Element>
const void* KernelFor(bool wide, bool turned) {
  if (wide) {
    return turned ? reinterpret_cast<const void*>(&AppendKernel<Element, kWideUnit, true>)
                  : reinterpret_cast<const void*>(&AppendKernel<Element, kWideUnit, false>);
  }
  return turned ? reinterpret_cast<const void*>(&AppendKernel<Element, 1, true>)
                : reinterpret_cast<const void*>(&AppendKernel<Element, 1, false>);
}

}  // namespace

absl::Status Append(const AttentionShape& shape, const AppendArgs& args, cudaStream_t stream) {
  if (absl::Status s = ValidateShape(shape, Backend::kGpu); !s.ok()) return s;
  if (absl::Status s = ValidateAppend(shape, args); !s.ok()) return s;
  if (args.table.batch == 0) return absl::OkStatus();
  const AppendParams params = MakeParams(shape, args);
  const bool turned = shape.pos_encoding == PosEncoding::kRopeLlama;
  const bool wide = IsWide(params, turned);
  const void* kernel = shape.dtype == DType::kBFloat16 ? KernelFor<__nv_bfloat16>(wide, turned)
                                                       : KernelFor<__half>(wide, turned);
  return CudaStatus(
      Launch(kernel, dim3(static_cast<unsigned>(args.table.batch)), dim3(kAppendThreads), 0,
             args.dependence != Dependence::kStream, params, stream),
      "append kernel launch");
}

}  // namespace pgqa
