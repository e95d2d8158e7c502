// Conversions between fp32 and packed pairs of 16-bit elements.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pgqa {

__device__ __forceinline__ uint4 Load16(const void* address) {
  return *static_cast<const uint4*>(address);
}

__device__ __forceinline__ void Store16(void* address, const uint4& value) {
  *static_cast<uint4*>(address) = value;
}

// Two floats rounded to nearest even; the first in the low half.
template <class Element>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

template <class Element>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000U));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// A float pair as the sum of two packed pairs: `high` its leading bits, `low` the rest rounded.
struct SplitPair {
  uint32_t high;
  uint32_t low;
};

template <class Element>
__device__ __forceinline__ SplitPair Split(float a, float b) {
  SplitPair pair;
  float2 rounded;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    // Truncated instead: one byte permutation, and the low part takes up the difference as well.
    pair.high = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x7632);
    rounded = make_float2(__uint_as_float(__float_as_uint(a) & 0xffff0000U),
                          __uint_as_float(__float_as_uint(b) & 0xffff0000U));
  } else {
    pair.high = Pack<Element>(a, b);
    rounded = Unpack<Element>(pair.high);
  }
  pair.low = Pack<Element>(a - rounded.x, b - rounded.y);
  return pair;
}

}  // namespace pgqa
