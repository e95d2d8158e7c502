// Every rule on shapes, options and partition settings, in one place each.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/validate.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "fault.h"

namespace pgqa {
namespace {

bool IsPowerOfTwo(int32_t value) { return value > 0 && (value & (value - 1)) == 0; }

bool NeedsEvenHeadDim(const AttentionShape& shape) {
  return shape.pos_encoding == PosEncoding::kRopeLlama;
}

void CheckHeadDim(const AttentionShape& shape, Backend backend, std::vector<std::string>* faults) {
  const int32_t head_dim = shape.head_dim;
  if (backend == Backend::kGpu) {
    if (head_dim < 8 || head_dim > kMaxGpuHeadDim || head_dim % 8 != 0) {
      faults->push_back(
          Fault("head_dim", head_dim, absl::StrCat("a multiple of 8 from 8 to ", kMaxGpuHeadDim)));
    }
  } else if (head_dim < 1) {
    faults->push_back(Fault("head_dim", head_dim, "at least 1"));
  } else if (NeedsEvenHeadDim(shape) && head_dim % 2 != 0) {
    faults->push_back(
        Fault("head_dim", head_dim, "an even number with pos_encoding_mode 1 (ROPE_LLAMA)"));
  }
}

void CheckHeads(const AttentionShape& shape, Backend backend, std::vector<std::string>* faults) {
  CheckAtLeast("num_query_heads", shape.num_query_heads, 1, faults);
  CheckAtLeast("num_kv_heads", shape.num_kv_heads, 1, faults);
  if (shape.num_query_heads < 1 || shape.num_kv_heads < 1) return;
  if (shape.num_query_heads % shape.num_kv_heads != 0) {
    faults->push_back(Fault("num_query_heads", shape.num_query_heads,
                            absl::StrCat("a multiple of num_kv_heads (", shape.num_kv_heads, ")")));
  } else if (backend == Backend::kGpu && shape.GroupSize() > kMaxGpuGroupSize) {
    faults->push_back(Fault("num_query_heads", shape.num_query_heads,
                            absl::StrCat("at most ", kMaxGpuGroupSize, " times num_kv_heads (",
                                         shape.num_kv_heads, ")")));
  }
}

void CheckDType(DType dtype, Backend backend, std::vector<std::string>* faults) {
  if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) return;
  if (dtype != DType::kFloat32) {
    faults->push_back(Fault("dtype", absl::StrCat("DType ", static_cast<int32_t>(dtype)),
                            "float16, bfloat16 or float32"));
  } else if (backend == Backend::kGpu) {
    faults->push_back(Fault("dtype", "float32", "float16 or bfloat16 on a GPU"));
  }
}

}  // namespace

std::vector<std::string> ShapeFaults(const AttentionShape& shape, Backend backend) {
  std::vector<std::string> faults;
  CheckAtLeast("batch", shape.batch, 0, &faults);
  CheckHeads(shape, backend, &faults);
  CheckHeadDim(shape, backend, &faults);
  CheckAtLeast("page_size", shape.page_size, 1, &faults);
  CheckDType(shape.dtype, backend, &faults);
  if (shape.pos_encoding != PosEncoding::kNone && shape.pos_encoding != PosEncoding::kRopeLlama) {
    faults.push_back(Fault("pos_encoding_mode", static_cast<int32_t>(shape.pos_encoding),
                           "0 (NONE) or 1 (ROPE_LLAMA)"));
  }
  return faults;
}

absl::Status ValidateShape(const AttentionShape& shape, Backend backend) {
  return FirstFault(ShapeFaults(shape, backend));
}

std::vector<std::string> OptionFaults(const AttentionOptions& options) {
  std::vector<std::string> faults;
  if (!std::isfinite(options.sm_scale)) {
    faults.push_back(Fault("sm_scale", options.sm_scale, "a finite number"));
  }
  if (const absl::Status status = ValidateWindowLeft(options.window_left); !status.ok()) {
    faults.emplace_back(status.message());
  }
  if (!(options.logits_soft_cap >= 0.0F) || !std::isfinite(options.logits_soft_cap)) {
    faults.push_back(
        Fault("logits_soft_cap", options.logits_soft_cap, "0 (no cap) or a finite number above 0"));
  }
  const auto check_positive = [&faults](const char* argument, double value) {
    if (!(value > 0.0) || !std::isfinite(value)) {
      faults.push_back(Fault(argument, value, "a finite number above 0"));
    }
  };
  check_positive("rope_scale", options.rope_scale);
  check_positive("rope_theta", options.rope_theta);
  return faults;
}

absl::Status ValidateOptions(const AttentionOptions& options) {
  return FirstFault(OptionFaults(options));
}

absl::Status ValidateWindowLeft(int32_t window_left) {
  if (window_left >= -1) return absl::OkStatus();
  return FaultStatus("window_left", window_left, "-1 (no window) or more");
}

absl::Status ValidateNumWorkers(const char* argument, int32_t num_workers) {
  if (num_workers >= 1 && num_workers <= kMaxWorkers) return absl::OkStatus();
  return FaultStatus(argument, num_workers, absl::StrCat("1 to ", kMaxWorkers));
}

absl::Status ValidatePartitionConfig(const PartitionConfig& config) {
  if (absl::Status status = ValidateNumWorkers("num_workers", config.num_workers); !status.ok()) {
    return status;
  }
  if (!IsPowerOfTwo(config.warps_per_worker)) {
    return FaultStatus("warps_per_worker", config.warps_per_worker, "a power of two");
  }
  std::vector<std::string> faults;
  CheckAtLeast("stage_tokens", config.stage_tokens, 1, &faults);
  CheckAtLeast("num_heads", config.num_heads, 1, &faults);
  CheckAtLeast("min_tiles_per_worker", config.min_tiles_per_worker, 1, &faults);
  CheckAtLeast("double_heads_from", config.double_heads_from, 1, &faults);
  CheckAtLeast("max_heads_by_work", config.max_heads_by_work, 1, &faults);
  if (!faults.empty()) return FirstFault(faults);
  if (config.min_fill_eighths < 0 || config.min_fill_eighths > 8) {
    return FaultStatus("min_fill_eighths", config.min_fill_eighths, "0 to 8");
  }
  const int32_t heads = config.max_heads_per_worker;
  if (!IsPowerOfTwo(heads) || heads > config.warps_per_worker || heads > 1 << kMaxLog2Heads ||
      config.num_heads % heads != 0) {
    return FaultStatus("max_heads_per_worker", heads,
                       absl::StrCat("a power of two that divides num_heads (", config.num_heads,
                                    ") and is at most warps_per_worker (", config.warps_per_worker,
                                    ") and ", 1 << kMaxLog2Heads));
  }
  return absl::OkStatus();
}

absl::Status ValidateSegmentTokens(const PartitionConfig& config, int32_t segment_tokens) {
  const int32_t tile_tokens = TileTokens(config, config.max_heads_per_worker);
  if (segment_tokens == 0 || (IsPowerOfTwo(segment_tokens) && segment_tokens >= tile_tokens)) {
    return absl::OkStatus();
  }
  return FaultStatus("segment_tokens", segment_tokens,
                     absl::StrCat("0 (pieces are cut anywhere) or a power of two of at least ",
                                  tile_tokens, ", the tokens of a tile"));
}

}  // namespace pgqa
