// The launch plan: kernel, grid and workspace of every shape, on large and small devices.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/launch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "pgqa/validate.h"
#include "tile_config.h"

namespace pgqa {
namespace {

constexpr DeviceProperties kH200{132, 232448};  // 227 KB a block
constexpr DeviceProperties kA100{108, 166912};  // 163 KB
constexpr DeviceProperties kSmall{84, 101376};  // 99 KB

AttentionShape Shape(int32_t group, int32_t kv_heads, int32_t head_dim, bool rope = false) {
  AttentionShape shape;
  shape.batch = 64;
  shape.num_query_heads = group * kv_heads;
  shape.num_kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.page_size = 16;
  shape.pos_encoding = rope ? PosEncoding::kRopeLlama : PosEncoding::kNone;
  return shape;
}

LaunchPlan Gpu(const AttentionShape& shape, const DeviceProperties& device = kH200) {
  const absl::StatusOr<LaunchPlan> plan = MakeGpuLaunchPlan(shape, device);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.value_or(LaunchPlan{});
}

TEST(GpuLaunchPlanTest, OfTheCommonShape) {
  const LaunchPlan plan = Gpu(Shape(4, 8, 128));
  EXPECT_EQ(plan.kernel.padded_head_dim, 128);
  EXPECT_EQ(plan.kernel.row_mode, RowMode::kSplit);
  EXPECT_EQ(plan.kernel.rows_per_block, 8);
  EXPECT_EQ(plan.kernel.dtype, DType::kBFloat16);
  EXPECT_FALSE(plan.kernel.rope);
  EXPECT_EQ(plan.row_blocks, 1);
  EXPECT_EQ(plan.partial_rows, 4);
  EXPECT_EQ(plan.num_slots, 264);
  EXPECT_EQ(plan.partition.num_workers, 132);
  EXPECT_EQ(plan.partition.num_heads, 8);
  EXPECT_EQ(plan.partition.stage_tokens, 16);
  EXPECT_EQ(plan.partition.min_tiles_per_worker, 1);
  EXPECT_EQ(plan.partition.max_heads_per_worker, std::min(8, plan.kernel.num_warps));
  EXPECT_EQ(plan.partition.max_heads_by_work, 2);
  EXPECT_GE(plan.counter_bytes, 132 * plan.kernel.num_warps * 8);
  EXPECT_EQ(plan.counter_bytes % 256, 0);
  EXPECT_EQ(plan.workspace_bytes - plan.counter_bytes,
            int64_t{264} * plan.partition.max_heads_per_worker * 4 * (128 + 4) * 4);
}

TEST(GpuLaunchPlanTest, IsRightForEveryGroupHeadDimAndDevice) {
  for (const DeviceProperties& device : {kH200, kA100, kSmall}) {
    for (int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
      for (int32_t group = 1; group <= 128; ++group) {
        for (const bool rope : {false, true}) {
          SCOPED_TRACE(testing::Message() << "head_dim " << head_dim << ", group " << group
                                          << ", rope " << rope << ", SMs " << device.num_sms);
          const LaunchPlan plan = Gpu(Shape(group, 6, head_dim, rope), device);
          const KernelConfig& kernel = plan.kernel;
          EXPECT_EQ(kernel.padded_head_dim, head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256);
          EXPECT_EQ(kernel.row_mode, group <= 8 ? RowMode::kSplit : RowMode::kWide);
          EXPECT_EQ(kernel.rope, rope);
          EXPECT_LE(kernel.shared_memory_bytes, device.shared_memory_per_block_optin);
          // Every query head of the group lies in exactly one row block, none of which is empty.
          EXPECT_GE(plan.row_blocks * kernel.rows_per_block, group);
          EXPECT_LT((plan.row_blocks - 1) * kernel.rows_per_block, group);
          EXPECT_EQ(plan.partition.num_heads, 6 * plan.row_blocks);
          EXPECT_EQ(plan.partial_rows, std::min(group, kernel.rows_per_block));
          EXPECT_TRUE(ValidatePartitionConfig(plan.partition).ok());
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(GpuLaunchPlanTest, GroupsAreCutIntoBlocksOfRows) {
  EXPECT_EQ(Gpu(Shape(8, 1, 128, true)).kernel.rows_per_block, 8);
  EXPECT_EQ(Gpu(Shape(9, 1, 128)).kernel.rows_per_block, 16);
  EXPECT_EQ(Gpu(Shape(32, 1, 256)).row_blocks, 2);
  EXPECT_EQ(Gpu(Shape(71, 1, 128, true)).row_blocks, 5);
}

TEST(GpuLaunchPlanTest, TakesTheMostWarpsThatFit) {
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const bool rope : {false, true}) {
      const TileConfig tile = TileConfigFor(head_dim, rope);
      for (int32_t warps = tile.max_warps; warps >= 1; warps /= 2) {
        const int32_t bytes = tile.SharedBytes(warps);
        const LaunchPlan plan = Gpu(Shape(4, 8, head_dim, rope), {132, bytes});
        EXPECT_EQ(plan.kernel.num_warps, warps);
        EXPECT_EQ(plan.partition.warps_per_worker, warps);
        EXPECT_EQ(plan.kernel.shared_memory_bytes, bytes);
        EXPECT_EQ(plan.kernel.num_stages, tile.num_stages);
        EXPECT_EQ(plan.partition.max_heads_per_worker, std::min(8, warps));
        if (warps > 1) {
          EXPECT_EQ(Gpu(Shape(4, 8, head_dim, rope), {132, bytes - 1}).kernel.num_warps, warps / 2);
        }
      }
      const DeviceProperties tiny{132, tile.SharedBytes(1) - 1};
      const std::string message(
          MakeGpuLaunchPlan(Shape(4, 8, head_dim, rope), tiny).status().message());
      EXPECT_EQ(message.find("shared_memory_per_block_optin: got "), 0U) << message;
      EXPECT_NE(message.find("expected at least " + std::to_string(tile.SharedBytes(1))),
                std::string::npos)
          << message;
    }
  }
}

TEST(GpuLaunchPlanTest, HeadsAWorkerDivideTheHeads) {
  for (int32_t kv_heads = 1; kv_heads <= 100; ++kv_heads) {
    const LaunchPlan plan = Gpu(Shape(1, kv_heads, 128));
    const int32_t heads = plan.partition.max_heads_per_worker;
    EXPECT_EQ(kv_heads % heads, 0);
    EXPECT_LE(heads, plan.kernel.num_warps);
    EXPECT_TRUE(kv_heads % (2 * heads) != 0 || 2 * heads > 8) << kv_heads;
  }
}

TEST(GpuLaunchPlanTest, HoldsNothingThatDependsOnTheBatch) {
  AttentionShape shape = Shape(4, 8, 128);
  const LaunchPlan plan = Gpu(shape);
  for (const int32_t batch : {0, 1, 4096, std::numeric_limits<int32_t>::max()}) {
    shape.batch = batch;
    const LaunchPlan other = Gpu(shape);
    EXPECT_EQ(other.workspace_bytes, plan.workspace_bytes);
    EXPECT_EQ(other.num_slots, plan.num_slots);
    EXPECT_EQ(other.counter_bytes, plan.counter_bytes);
    EXPECT_EQ(other.kernel.shared_memory_bytes, plan.kernel.shared_memory_bytes);
  }
}

TEST(GpuLaunchPlanTest, RefusesWhatValidationRefusesAndDevicesWithoutSms) {
  EXPECT_EQ(MakeGpuLaunchPlan(Shape(4, 8, 100), kH200).status(),
            ValidateShape(Shape(4, 8, 100), Backend::kGpu));
  EXPECT_EQ(MakeGpuLaunchPlan(Shape(129, 8, 128), kH200).status(),
            ValidateShape(Shape(129, 8, 128), Backend::kGpu));
  EXPECT_EQ(std::string(MakeGpuLaunchPlan(Shape(4, 8, 128), {0, 232448}).status().message()),
            "num_sms: got 0, expected 1 to 1048576");
}

TEST(CpuLaunchPlanTest, OfTheCommonShape) {
  AttentionShape shape = Shape(5, 3, 80, true);
  shape.dtype = DType::kFloat32;
  const absl::StatusOr<LaunchPlan> plan = MakeCpuLaunchPlan(shape, 7);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->partition.num_workers, 7);
  EXPECT_EQ(plan->partition.warps_per_worker, 1);
  EXPECT_EQ(plan->partition.max_heads_per_worker, 1);
  EXPECT_EQ(plan->partition.stage_tokens, 32);
  EXPECT_EQ(plan->partition.num_heads, 3);
  EXPECT_EQ(plan->row_blocks, 1);
  EXPECT_EQ(plan->partial_rows, 5);
  EXPECT_EQ(plan->num_slots, 14);
  EXPECT_EQ(plan->counter_bytes, 0);
  EXPECT_EQ(plan->workspace_bytes, 14 * 5 * (80 + 4) * 4);
  EXPECT_TRUE(ValidatePartitionConfig(plan->partition).ok());
}

TEST(CpuLaunchPlanTest, TakesShapesThatAGpuRefuses) {
  AttentionShape shape = Shape(300, 1, 1);
  EXPECT_TRUE(MakeCpuLaunchPlan(shape, 1).ok());
  shape.head_dim = 1000;
  EXPECT_TRUE(MakeCpuLaunchPlan(shape, 1).ok());
}

TEST(CpuLaunchPlanTest, RefusesBadThreadsAndShapes) {
  EXPECT_EQ(std::string(MakeCpuLaunchPlan(Shape(4, 8, 128), 0).status().message()),
            "num_threads: got 0, expected 1 to 1048576");
  EXPECT_EQ(MakeCpuLaunchPlan(Shape(4, 8, 33, true), 2).status(),
            ValidateShape(Shape(4, 8, 33, true), Backend::kCpu));
}

}  // namespace
}  // namespace pgqa
