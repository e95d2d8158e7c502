// Appending on tensors in host memory, and what appending refuses anywhere.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_kernels.h"
#include "cpu_rope.h"
#include "fault.h"
#include "pgqa/append.h"
#include "pgqa/validate.h"

namespace pgqa {
namespace {

absl::Status CheckPointers(const AppendArgs& args) {
  const bool has_pages = args.table.num_pages > 0;
  const struct {
    const char* name;
    const void* pointer;
    bool required;
  } pointers[] = {{"k", args.k, true},
                  {"v", args.v, true},
                  {"k_cache", args.k_cache, has_pages},
                  {"v_cache", args.v_cache, has_pages},
                  {"q_out", args.q_out, args.q != nullptr}};
  for (const auto& p : pointers) {
    if (p.pointer == nullptr && p.required) return FaultStatus(p.name, "null", "an address");
  }
  return absl::OkStatus();
}

// Copies rows, turned where there are rotations.
class RowCopier {
 public:
  RowCopier(const AttentionShape& shape, const AppendArgs& args)
      : dtype_(shape.dtype), head_dim_(shape.head_dim), element_bytes_(BytesOf(shape.dtype)) {
    if (shape.pos_encoding == PosEncoding::kNone) return;
    for (int32_t pair = 0; pair < head_dim_ / 2; ++pair) {
      frequencies_.push_back(RopeFrequency(head_dim_, pair, args.rope_scale, args.rope_theta));
    }
    cosines_.resize(frequencies_.size());
    sines_.resize(frequencies_.size());
    row_.resize(static_cast<size_t>(PaddedRow(head_dim_)));
  }

  // Turned rows are turned by this position from here on.
  void SetPosition(int64_t position) {
    for (size_t pair = 0; pair < frequencies_.size(); ++pair) {
      const double angle = static_cast<double>(position) * frequencies_[pair];
      cosines_[pair] = static_cast<float>(std::cos(angle));
      sines_[pair] = static_cast<float>(std::sin(angle));
    }
  }

  // Offsets and strides in elements.
  void Copy(const void* from, int64_t from_offset, int64_t from_stride, void* to, int64_t to_offset,
            int64_t to_stride, int32_t num_heads, bool turned) {
    for (int32_t head = 0; head < num_heads; ++head) {
      const char* source =
          static_cast<const char*>(from) + (from_offset + head * from_stride) * element_bytes_;
      char* target = static_cast<char*>(to) + (to_offset + head * to_stride) * element_bytes_;
      if (turned && !frequencies_.empty()) {
        kernels_.load_row(source, dtype_, head_dim_, {cosines_.data(), sines_.data()}, row_.data());
        kernels_.store_row(row_.data(), 1.0F, dtype_, head_dim_, target);
      } else {
        std::memcpy(target, source, static_cast<size_t>(head_dim_ * element_bytes_));
      }
    }
  }

 private:
  const CpuKernels& kernels_ = BestCpuKernels();
  DType dtype_;
  int32_t head_dim_;
  int64_t element_bytes_;
  std::vector<double> frequencies_;
  std::vector<float> cosines_, sines_, row_;
};

void AppendRequest(const AttentionShape& shape, const AppendArgs& args, int32_t request,
                   RowCopier* copier) {
  const PageTableView& table = args.table;
  const int64_t position = table.NewestPosition(request);
  if (position < 0) return;
  const int64_t page = table.PageId(table.RowBegin(request), position / table.page_size);
  if (page < 0) return;
  const int64_t token = position % table.page_size;
  copier->SetPosition(position);
  const auto slot = [&](const CacheStrides& s) { return page * s.page + token * s.token; };
  copier->Copy(args.k, request * args.k_strides.batch, args.k_strides.head, args.k_cache,
               slot(args.k_cache_strides), args.k_cache_strides.head, shape.num_kv_heads, true);
  copier->Copy(args.v, request * args.v_strides.batch, args.v_strides.head, args.v_cache,
               slot(args.v_cache_strides), args.v_cache_strides.head, shape.num_kv_heads, false);
  if (args.q == nullptr) return;
  copier->Copy(args.q, request * args.q_strides.batch, args.q_strides.head, args.q_out,
               request * args.q_out_strides.batch, args.q_out_strides.head, shape.num_query_heads,
               true);
}

}  // namespace

absl::Status ValidateAppend(const AttentionShape& shape, const AppendArgs& args) {
  if (absl::Status s = ValidateTableLayout(args.table); !s.ok()) return s;
  if (args.table.page_size != shape.page_size) {
    return FaultStatus("page_size", args.table.page_size,
                       absl::StrCat(shape.page_size, ", that of the shape"));
  }
  AttentionOptions options;
  options.rope_scale = args.rope_scale;
  options.rope_theta = args.rope_theta;
  if (absl::Status s = ValidateOptions(options); !s.ok()) return s;
  if (args.dependence > Dependence::kAny)
    return FaultStatus("dependence", static_cast<int32_t>(args.dependence), "kStream or kAny");
  if (args.q != nullptr && shape.pos_encoding == PosEncoding::kNone) {
    return FaultStatus("q", "queries to turn with pos_encoding_mode 0 (NONE)",
                       "none, or ROPE_LLAMA");
  }
  return args.table.batch == 0 ? absl::OkStatus() : CheckPointers(args);
}

absl::Status AppendOnCpu(const AttentionShape& shape, const AppendArgs& args) {
  if (absl::Status s = ValidateShape(shape, Backend::kCpu); !s.ok()) return s;
  if (absl::Status s = ValidateAppend(shape, args); !s.ok()) return s;
  try {
    RowCopier copier(shape, args);
    for (int32_t request = 0; request < args.table.batch; ++request)
      AppendRequest(shape, args, request, &copier);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("scratch memory: got none, expected some for a row");
  }
  return absl::OkStatus();
}

}  // namespace pgqa
