// Page tables of given lengths, and random ones, for the host tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "pgqa/page_table.h"
#include "pgqa/partition.h"

namespace pgqa {

// A table in host memory. `indices` stays empty unless a test fills it: planning never reads it.
struct HostTable {
  std::vector<int32_t> indptr{0};
  std::vector<int32_t> last_page_len;
  std::vector<int32_t> indices;
  int64_t num_indices = 0;
  int64_t num_pages = 0;
  int32_t page_size = 1;

  PageTableView View() const {
    PageTableView view;
    view.indptr = indptr.data();
    view.indices = indices.empty() ? nullptr : indices.data();
    view.last_page_len = last_page_len.data();
    view.num_indices = num_indices;
    view.num_pages = num_pages;
    view.batch = static_cast<int32_t>(last_page_len.size());
    view.page_size = page_size;
    return view;
  }
};

// Requests of `lengths` tokens, one after another from entry `first_entry` on. An empty request gets a
// last_page_len that would matter if anyone read it.
inline HostTable TableOfLengths(const std::vector<int64_t>& lengths, int32_t page_size,
                                int32_t first_entry = 0) {
  HostTable table;
  table.page_size = page_size;
  table.indptr = {first_entry};
  for (const int64_t length : lengths) {
    const int64_t pages = (length + page_size - 1) / page_size;
    table.indptr.push_back(static_cast<int32_t>(table.indptr.back() + pages));
    table.last_page_len.push_back(
        length == 0 ? page_size : static_cast<int32_t>(length - (pages - 1) * page_size));
  }
  table.num_indices = table.indptr.back();
  table.num_pages = table.num_indices;
  return table;
}

class RandomSource {
 public:
  explicit RandomSource(uint32_t seed) : engine_(seed) {}

  // Uniform in [low, high].
  int64_t In(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }

  template <typename T>
  T Of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(In(0, static_cast<int64_t>(choices.size()) - 1))];
  }

  // Lengths of a batch: empty, tiny, near multiples of powers of two, and now and then a giant.
  std::vector<int64_t> Lengths(int64_t max_batch) {
    std::vector<int64_t> lengths(static_cast<size_t>(In(0, max_batch)));
    for (int64_t& length : lengths) {
      switch (In(0, 7)) {
        case 0:
        case 1:
          length = 0;
          break;
        case 2:
        case 3:
          length = In(1, 20);
          break;
        case 4:
        case 5:
          length = (int64_t{16} << In(0, 5)) + In(-1, 1);
          break;
        case 6:
          length = In(1, 3000);
          break;
        default:
          length = In(0, 3) == 0 ? In(10000, 40000) : In(1, 200);
      }
    }
    return lengths;
  }

  // A valid partition config, heads doubling often.
  PartitionConfig Config() {
    PartitionConfig config;
    config.num_workers =
        static_cast<int32_t>(Of<int64_t>({1, 2, In(1, 12), In(1, 140), 108, 132, 148}));
    config.warps_per_worker = 1 << In(0, 3);
    config.stage_tokens = Of<int32_t>({1, 4, 16, 16, 64});
    config.num_heads = static_cast<int32_t>(Of<int64_t>({1, 2, 4, 8, 32, In(1, 100)}));
    config.max_heads_per_worker = 1;
    while (config.max_heads_per_worker < config.warps_per_worker &&
           config.num_heads % (2 * config.max_heads_per_worker) == 0 && In(0, 4) > 0) {
      config.max_heads_per_worker *= 2;
    }
    config.min_tiles_per_worker = Of<int32_t>({1, 1, 1, 2, 7});
    config.double_heads_from = Of<int32_t>({1, 10, 100, 1000, 4000});
    config.max_heads_by_work = Of<int32_t>({1, 2, 4, 8});
    config.min_fill_eighths = Of<int32_t>({0, 0, 4, 6, 8});
    return config;
  }

  int32_t Window() {
    return static_cast<int32_t>(Of<int64_t>({-1, -1, 0, In(1, 16), In(1, 2000)}));
  }

 private:
  std::mt19937 engine_;
};

// A GPU of 132 workers with 8 heads.
inline PartitionConfig GpuConfig() {
  PartitionConfig config;
  config.num_workers = 132;
  config.warps_per_worker = 8;
  config.num_heads = 8;
  config.max_heads_per_worker = 8;
  config.double_heads_from = 4000;
  return config;
}

}  // namespace pgqa
