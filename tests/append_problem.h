// A batch of new rows and caches in any layout, in host memory, for tests of appending.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "pgqa/append.h"
#include "pgqa/page_table.h"
#include "pgqa/types.h"

namespace pgqa::testing {

struct AppendSpec {
  AttentionShape shape{0, 4, 2, 16, 4, DType::kFloat16};
  std::vector<int32_t> kv_lens{9, 0, 1, 4, 5};  // the new token counted; 0: an empty request
  int64_t gap = 0;  // elements between rows, tokens and pages; odd ones break 16-byte alignment
  bool heads_first = false;  // a head's page is contiguous, instead of a token's heads
  bool queries = false;      // turned, from q to q_out
  bool in_place = false;     // q_out is q
};

// Every buffer as raw elements of the dtype. Pages are numbered backwards; page 0 belongs to
// nobody, and entries of the table that no row has are absurd.
class AppendProblem {
 public:
  explicit AppendProblem(const AppendSpec& spec)
      : spec(spec), element_bytes_(spec.shape.dtype == DType::kFloat32 ? 4 : 2) {
    MakeTable();
    MakeStrides();
    const int64_t batch = static_cast<int64_t>(spec.kv_lens.size());
    for (std::vector<uint8_t>* rows : {&k, &v}) rows->resize(Bytes(batch * k_strides.batch));
    for (std::vector<uint8_t>* rows : {&q, &q_out}) rows->resize(Bytes(batch * q_strides.batch));
    for (std::vector<uint8_t>* cache : {&k_cache, &v_cache})
      cache->resize(Bytes(num_pages * cache_strides.page));
    FillAll();
  }

  // The call on buffers at these addresses, in the order of AppendArgs.
  AppendArgs Args(const void* k_address, const void* v_address, void* k_cache_address,
                  void* v_cache_address, const PageTableView& table, const void* q_address,
                  void* q_out_address) const {
    AppendArgs args;
    args.k = k_address;
    args.v = v_address;
    args.k_strides = args.v_strides = k_strides;
    args.k_cache = k_cache_address;
    args.v_cache = v_cache_address;
    args.k_cache_strides = args.v_cache_strides = cache_strides;
    args.table = table;
    if (spec.queries) {
      args.q = q_address;
      args.q_out = spec.in_place ? const_cast<void*>(q_address) : q_out_address;
      args.q_strides = args.q_out_strides = q_strides;
    }
    return args;
  }

  AppendArgs HostArgs() {
    return Args(k.data(), v.data(), k_cache.data(), v_cache.data(), Table(), q.data(),
                q_out.data());
  }

  PageTableView Table() const { return Table(indptr.data(), indices.data(), last_page_len.data()); }

  PageTableView Table(const int32_t* indptr_address, const int32_t* indices_address,
                      const int32_t* last_address) const {
    return {indptr_address,      indices_address,
            last_address,        static_cast<int64_t>(indices.size()),
            num_pages,           static_cast<int32_t>(spec.kv_lens.size()),
            spec.shape.page_size};
  }

  // Element of the cache at which the new row of `request` and `head` begins, or -1 where there is
  // none.
  int64_t SlotOf(size_t request, int64_t head) const {
    const int64_t position = spec.kv_lens[request] - 1;
    if (position < 0) return -1;
    const int64_t page = indices[static_cast<size_t>(indptr[request]) +
                                 static_cast<size_t>(position / spec.shape.page_size)];
    return page * cache_strides.page + position % spec.shape.page_size * cache_strides.token +
           head * cache_strides.head;
  }

  AppendSpec spec;
  int64_t num_pages = 0;
  std::vector<int32_t> indptr, indices, last_page_len;
  std::vector<uint8_t> k, v, q, q_out, k_cache, v_cache;
  RowStrides k_strides, q_strides;
  CacheStrides cache_strides;

 private:
  size_t Bytes(int64_t elements) const {
    return static_cast<size_t>(elements) * static_cast<size_t>(element_bytes_);
  }

  void MakeTable() {
    const int32_t page_size = spec.shape.page_size;
    indptr = {2};  // rows need not begin at 0
    for (const int32_t length : spec.kv_lens) {
      const int32_t pages = (length + page_size - 1) / page_size;
      indptr.push_back(indptr.back() + pages);
      last_page_len.push_back(length - (pages - 1) * page_size);
      num_pages += pages;
    }
    num_pages += 2;
    indices.assign(static_cast<size_t>(indptr.back()) + 3, 2147480000);
    for (int32_t entry = 2; entry < indptr.back(); ++entry)
      indices[static_cast<size_t>(entry)] = static_cast<int32_t>(num_pages) + 1 - entry;
  }

  void MakeStrides() {
    const AttentionShape& s = spec.shape;
    const int64_t row = s.head_dim + spec.gap;
    k_strides = {s.num_kv_heads * row + spec.gap, row};
    q_strides = {s.num_query_heads * row + spec.gap, row};
    const int64_t token = spec.heads_first ? row : s.num_kv_heads * row;
    const int64_t head = spec.heads_first ? s.page_size * row : row;
    cache_strides = {int64_t{s.page_size} * s.num_kv_heads * row + spec.gap, token, head};
  }

  // Small numbers of either sign, finite in every dtype.
  void FillAll() {
    std::mt19937 random(5);
    for (std::vector<uint8_t>* buffer : {&k, &v, &q, &q_out, &k_cache, &v_cache}) {
      for (size_t i = 0; i + 1 < buffer->size(); i += static_cast<size_t>(element_bytes_)) {
        const uint32_t bits = 0x3c000000U + (random() & 0x83ffffffU);
        for (int32_t byte = 0; byte < element_bytes_; ++byte)
          (*buffer)[i + static_cast<size_t>(byte)] =
              static_cast<uint8_t>(bits >> (8 * (4 - element_bytes_ + byte)));
      }
    }
  }

  int32_t element_bytes_;
};

}  // namespace pgqa::testing
