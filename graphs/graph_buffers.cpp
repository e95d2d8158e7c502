// Lays out a graph's own buffers and checks the caller's, by one walk over the addresses of a spec.
// SPDX-License-Identifier: Apache-2.0
#include "graphs/graph_buffers.h"

#include <cuda_runtime_api.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "cuda/cuda_status.h"
#include "pgqa/launch_plan.h"

namespace pgqa {
namespace {

// Calls visit(name, layer, address, bytes) for every address that may be null, in a fixed order;
// layer -1: none.
template <class Spec, class Visit>
void WalkAddresses(Spec* spec, Visit visit) {
  const AttentionShape& shape = spec->shape;
  const int64_t batch = shape.batch;
  if (spec->IsCsr()) {
    visit("page_indptr", -1, spec->page_indptr, (batch + 1) * 4);
    visit("page_indices", -1, spec->page_indices, spec->max_pages * 4);
    visit("last_page_len", -1, spec->last_page_len, batch * 4);
  } else {
    visit("block_table", -1, spec->block_table, batch * spec->max_columns * 4);
    visit("seq_lens", -1, spec->seq_lens, batch * 4);
  }
  const int64_t query_bytes = batch * shape.num_query_heads * shape.head_dim * 2;
  const int64_t kv_bytes = batch * shape.num_kv_heads * shape.head_dim * 2;
  int layer_idx = 0;
  for (auto& layer : spec->layers) {
    visit("q", layer_idx, layer.q, query_bytes);
    visit("out", layer_idx, layer.out, query_bytes);
    if (spec->return_lse) visit("lse", layer_idx, layer.lse, batch * shape.num_query_heads * 4);
    if (spec->append) {
      visit("k", layer_idx, layer.k, kv_bytes);
      visit("v", layer_idx, layer.v, kv_bytes);
    }
    ++layer_idx;
  }
}

std::string NameOf(const char* name, int layer) {
  return layer < 0 ? name : absl::StrCat(name, " of layer ", layer);
}

// Strides of the rows that the graph lays out itself.
void SetOwnStrides(const GraphSpec& asked, GraphSpec* spec) {
  const int64_t head_dim = spec->shape.head_dim;
  const RowStrides query_rows{spec->shape.num_query_heads * head_dim, head_dim};
  const RowStrides kv_rows{spec->shape.num_kv_heads * head_dim, head_dim};
  if (asked.block_table == nullptr) spec->block_table_stride = spec->max_columns;
  for (size_t i = 0; i < spec->layers.size(); ++i) {
    if (asked.layers[i].q == nullptr) spec->layers[i].q_strides = query_rows;
    if (asked.layers[i].k == nullptr) spec->layers[i].k_strides = kv_rows;
    if (asked.layers[i].v == nullptr) spec->layers[i].v_strides = kv_rows;
  }
}

absl::Status CheckAddress(const std::string& name, const void* address, int device) {
  cudaPointerAttributes attributes{};
  PGQA_RETURN_IF_CUDA_ERROR(cudaPointerGetAttributes(&attributes, address));
  const auto fault = [&](const absl::AlphaNum& got) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": got ", got, ", expected memory of CUDA device ", device));
  };
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
      if (attributes.device == device) return absl::OkStatus();
      return fault(absl::StrCat("memory of CUDA device ", attributes.device));
    case cudaMemoryTypeManaged:
      return absl::OkStatus();
    case cudaMemoryTypeHost:
      return fault("host memory");
    default:
      return fault("memory that CUDA does not know, of the host or freed");
  }
}

}  // namespace

absl::StatusOr<GraphBuffers> GraphBuffers::Create(const GraphSpec& spec) {
  GraphBuffers buffers;
  WalkAddresses(&spec, [&](const char*, int, const void* address, int64_t bytes) {
    buffers.offsets_.push_back(address == nullptr ? buffers.bytes_ : -1);
    if (address == nullptr) buffers.bytes_ += AlignedBytes(bytes);
  });
  if (buffers.bytes_ == 0) return buffers;
  const auto bytes = static_cast<size_t>(buffers.bytes_);
  const absl::StatusOr<void*> memory = AllocateZeroed(bytes);
  if (!memory.ok()) return memory.status();
  buffers.memory_.reset(*memory);
  if (spec.IsCsr() || spec.seq_lens != nullptr) return buffers;
  const absl::StatusOr<GraphSpec> filled = buffers.Fill(spec);
  if (!filled.ok()) return filled.status();
  auto* seq_lens = const_cast<int32_t*>(filled->seq_lens);  // of the memory above
  if (absl::Status s = SetBytes(seq_lens, 0xFF, static_cast<size_t>(spec.shape.batch) * 4); !s.ok())
    return s;
  return buffers;
}

absl::StatusOr<GraphSpec> GraphBuffers::Fill(GraphSpec spec) const {
  const GraphSpec asked = spec;
  absl::Status status;
  size_t i = 0;
  WalkAddresses(&spec, [&](const char* name, int layer, auto& address, int64_t) {
    const int64_t offset = offsets_[i++];
    if (address != nullptr) return;
    if (offset < 0) {
      status.Update(absl::InvalidArgumentError(absl::StrCat(
          NameOf(name, layer), ": got null, expected an address: the graph has no such memory")));
      return;
    }
    address = reinterpret_cast<std::remove_reference_t<decltype(address)>>(
        static_cast<char*>(memory_.get()) + offset);
  });
  if (!status.ok()) return status;
  SetOwnStrides(asked, &spec);
  return spec;
}

absl::Status CheckAddresses(const GraphSpec& spec, int device) {
  absl::Status status;
  const auto check = [&](const char* name, int layer, const void* address, int64_t bytes) {
    if (bytes > 0) status.Update(CheckAddress(NameOf(name, layer), address, device));
  };
  WalkAddresses(&spec, check);
  int layer_idx = 0;
  for (const GraphLayer& layer : spec.layers) {
    check("k_cache", layer_idx, layer.k_cache, spec.num_pages);
    check("v_cache", layer_idx, layer.v_cache, spec.num_pages);
    ++layer_idx;
  }
  return status;
}

}  // namespace pgqa
