// The tensors of a decode graph: allocated, checked, and turned into what the graph is made of.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pgqa/graph_spec.h"

namespace pgqa::binding {

// One tensor a layer.
using LayerTensors = std::vector<at::Tensor>;

struct GraphTensors {
  at::Tensor page_indptr, page_indices, last_page_len;  // undefined with a block table
  at::Tensor block_table, seq_lens;                     // undefined with a CSR table
  LayerTensors q, k_cache, v_cache, out;
  LayerTensors lse;   // empty without return_lse
  LayerTensors k, v;  // empty without append

  // Calls one(name, tensor) for each array of the table, then layers(name, tensors) for each of the
  // others.
  template <class Self, class One, class Layers>
  static void Visit(Self& self, One one, Layers layers) {
    one("page_indptr", self.page_indptr);
    one("page_indices", self.page_indices);
    one("last_page_len", self.last_page_len);
    one("block_table", self.block_table);
    one("seq_lens", self.seq_lens);
    layers("q", self.q);
    layers("k_cache", self.k_cache);
    layers("v_cache", self.v_cache);
    layers("out", self.out);
    layers("lse", self.lse);
    layers("k", self.k);
    layers("v", self.v);
  }

  // Calls fn(name, tensor) for all that are defined.
  template <class Fn>
  void ForEach(Fn fn) const {
    const auto one = [&](const char* name, const at::Tensor& tensor) {
      if (tensor.defined()) fn(name, tensor);
    };
    Visit(*this, one, [&](const char* name, const LayerTensors& tensors) {
      for (const at::Tensor& tensor : tensors) one(name, tensor);
    });
  }
};

// What a graph is asked for, apart from tensors.
struct GraphRequest {
  int64_t num_query_heads = 0;
  int64_t max_batch = 0;
  int64_t max_pages = 0;
  int64_t max_columns = GraphSpec::kCsr;  // of a block table, in place of max_pages
  int64_t new_tokens = 0;
  std::optional<double> sm_scale;
  std::vector<int64_t> window_left;  // of each layer
  double logits_soft_cap = 0.0;
  int64_t pos_encoding_mode = 0;
  double rope_scale = 1.0;
  double rope_theta = 10000.0;
  bool return_lse = false;
  bool append = false;
  bool rotate_appended = false;
  bool live_batch = true;
  bool dependent_launch = true;
  bool batch_invariant = false;

  bool IsCsr() const { return max_columns == GraphSpec::kCsr; }
};

// Puts the tensors and lists of tensors of a dict into their places, by name; None leaves one as it
// is.
void SetTensors(const pybind11::dict& named, GraphTensors* tensors);

// Allocates what is undefined or empty in `tensors` on the device of its caches, on the current
// stream: the table zeroed but for seq_lens, -1, the rest not initialised. Raises ValueError where the caches or the
// request do not allow it. Returns what it has allocated.
std::vector<at::Tensor> AllocateMissing(const GraphRequest& request, GraphTensors* tensors);

// Checks complete tensors and returns the spec over them. Raises ValueError with the first fault,
// which names its layer where there are several.
GraphSpec SpecOf(const GraphRequest& request, const GraphTensors& tensors);

// Raises ValueError unless every tensor of `got` has the dtype and shape of that of `expected`; the
// number of pages, of entries of page_indices and of columns of block_table may differ.
void CheckAsCaptured(const GraphTensors& got, const GraphTensors& expected);

}  // namespace pgqa::binding
