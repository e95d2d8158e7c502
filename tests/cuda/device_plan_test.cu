// Planning on the device gives the same partition, shares, starts and pieces as on the host, bit for bit.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "cuda/device_planner.cuh"
#include "cuda/segment_planner.cuh"
#include "pgqa/schedule.h"
#include "tests/block_table_of.h"
#include "tests/cuda/device_memory.cuh"
#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

using testing::Check;
using testing::DeviceArray;

constexpr int32_t kThreads = 256;

// What one worker's CTA found, widened.
struct WorkerRecord {
  Partition partition;
  Share share;
  WorkerStart start;
  int32_t axis = 0;
  int32_t num_pieces = 0;
  int32_t threads_that_differ = 0;
};

template <class Index>
__device__ WorkerRecord Widened(const WorkerPlan<Index>& plan) {
  const BasicPartition<Index>& p = plan.partition;
  WorkerRecord record;
  record.partition.heads_per_worker = p.heads_per_worker;
  record.partition.tile_tokens = p.tile_tokens;
  record.partition.groups_per_axis = p.groups_per_axis;
  record.partition.workers_per_axis = p.workers_per_axis;
  record.partition.active_workers = p.active_workers;
  record.partition.segment_tokens = p.segment_tokens;
  record.partition.tiles = p.tiles;
  record.partition.share = p.share;
  record.partition.extra = p.extra;
  record.share = {plan.share.begin, plan.share.end};
  record.start = {plan.start.request, plan.start.request_unit};
  record.axis = plan.axis;
  return record;
}

__device__ bool SamePlan(const WorkerRecord& a, const WorkerRecord& b) {
  const Partition& p = a.partition;
  const Partition& q = b.partition;
  return p.heads_per_worker == q.heads_per_worker && p.tile_tokens == q.tile_tokens &&
         p.segment_tokens == q.segment_tokens && p.tiles == q.tiles &&
         p.groups_per_axis == q.groups_per_axis && p.workers_per_axis == q.workers_per_axis &&
         p.active_workers == q.active_workers && p.share == q.share && p.extra == q.extra &&
         a.axis == b.axis && a.share.begin == b.share.begin && a.share.end == b.share.end &&
         a.start.request == b.start.request && a.start.request_unit == b.start.request_unit;
}

// Segments of segment_tokens where that is not 0. One CTA a worker, numbered as the host numbers them. Pieces of worker w go to
// pieces[w * max_pieces] on; more than max_pieces are only counted.
template <class Index, bool kSegments>
__global__ void PlanKernel(PartitionConfig config, AxisCuts cuts, int32_t segment_tokens,
                           PageTableView table, int32_t window_left, WorkerRecord* records,
                           Piece* pieces, int32_t max_pieces) {
  extern __shared__ int64_t scratch[];  // PlanScratchBytes()
  __shared__ WorkerRecord first;
  RowWindow<Index> rows;
  rows.Load(table, 0);
  WorkerPlan<Index> plan;
  if constexpr (kSegments) {
    plan = PlanSegments(config, cuts, segment_tokens, table, window_left, scratch, &rows);
  } else {
    plan = PlanWorker(config, cuts, table, window_left, scratch, &rows);
  }
  WorkerRecord* record = records + plan.worker;
  if (threadIdx.x == 0) {
    first = Widened(plan);
    *record = first;
  }
  __syncthreads();
  if (!SamePlan(first, Widened(plan))) atomicAdd(&record->threads_that_differ, 1);
  if (threadIdx.x >= kWarpSize) return;
  using Cursor = std::conditional_t<kSegments, BasicSegmentCursor<Index>, BasicPieceCursor<Index>>;
  Cursor cursor(plan.partition, plan.axis, plan.share, plan.start);
  BasicPiece<Index> piece;
  int32_t count = 0;
  const auto live_of = [&](int32_t request) {
    return rows.LiveTokens(table, window_left, request);
  };
  while (cursor.Next(table.batch, live_of, &piece)) {
    if (threadIdx.x == 0 && count < max_pieces) {
      pieces[static_cast<int64_t>(plan.worker) * max_pieces + count] = {
          piece.request,
          piece.head_group,
          piece.first_tile,
          piece.num_tiles,
          piece.request_tiles,
          piece.request_unit,
          {piece.live.begin, piece.live.end}};
    }
    ++count;
  }
  if (threadIdx.x == 0) record->num_pieces = count;
}

std::vector<Piece> PiecesOnHost(const BatchPlan& plan, const PageTableView& table,
                                int32_t window_left, int32_t worker) {
  std::vector<Piece> pieces;
  SegmentCursor cursor = plan.CursorOf(worker);
  Piece piece;
  while (cursor.Next(table, window_left, &piece)) pieces.push_back(piece);
  return pieces;
}

// Plans of all workers of one table on the host.
struct HostPlan {
  BatchPlan batch;
  std::vector<std::vector<Piece>> pieces;
  size_t max_pieces = 1;  // of a worker

  HostPlan(const PartitionConfig& config, int32_t segment_tokens, const PageTableView& table,
           int32_t window_left)
      : batch(PlanBatch(config, table, window_left, segment_tokens)) {
    for (int32_t worker = 0; worker < config.num_workers; ++worker) {
      pieces.push_back(PiecesOnHost(batch, table, window_left, worker));
      max_pieces = std::max(max_pieces, pieces.back().size());
    }
  }
};

void ExpectSameWorker(const HostPlan& expected, int32_t worker, const WorkerRecord& record,
                      const Piece* pieces) {
  SCOPED_TRACE(::testing::Message() << "worker " << worker);
  const std::vector<Piece>& wanted = expected.pieces[static_cast<size_t>(worker)];
  ASSERT_EQ(record.threads_that_differ, 0);
  ASSERT_TRUE(record.partition == expected.batch.partition);
  ASSERT_EQ(record.axis, expected.batch.AxisOf(worker));
  ASSERT_EQ(record.share.begin, expected.batch.ShareOf(worker).begin);
  ASSERT_EQ(record.share.end, expected.batch.ShareOf(worker).end);
  ASSERT_TRUE(record.start == expected.batch.starts[static_cast<size_t>(worker)]);
  ASSERT_EQ(record.num_pieces, static_cast<int32_t>(wanted.size()));
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_TRUE(pieces[i] == wanted[i]) << "piece " << i;
}

template <class Index, bool kSegments = false>
void ExpectDevicePlans(const HostPlan& expected, const PartitionConfig& config,
                       const PageTableView& device_table, int32_t window_left,
                       int32_t segment_tokens = 0) {
  SCOPED_TRACE(::testing::Message() << 8 * sizeof(Index) << "-bit");
  const auto num_workers = static_cast<size_t>(config.num_workers);
  const DeviceArray<WorkerRecord> records(num_workers);
  const DeviceArray<Piece> pieces(num_workers * expected.max_pieces);
  const auto kernel = PlanKernel<Index, kSegments>;
  kernel<<<config.num_workers, kThreads, PlanScratchBytes(device_table.batch)>>>(
      config, CutAxes(config), segment_tokens, device_table, window_left, records.data(),
      pieces.data(), static_cast<int32_t>(expected.max_pieces));
  Check(cudaGetLastError());
  Check(cudaDeviceSynchronize());
  const std::vector<WorkerRecord> found = records.Read();
  const std::vector<Piece> found_pieces = pieces.Read();
  for (size_t worker = 0; worker < num_workers; ++worker) {
    ExpectSameWorker(expected, static_cast<int32_t>(worker), found[worker],
                     found_pieces.data() + worker * expected.max_pieces);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// `segment_tokens` 0: tiles.
void ExpectBothIndices(const HostPlan& expected, const PartitionConfig& config,
                       const PageTableView& device_table, int32_t window_left,
                       int32_t segment_tokens) {
  if (segment_tokens != 0) {
    ExpectDevicePlans<int64_t, true>(expected, config, device_table, window_left, segment_tokens);
    return;
  }
  ExpectDevicePlans<int64_t>(expected, config, device_table, window_left);
  if (FitsInt32(config, device_table))
    ExpectDevicePlans<int32_t>(expected, config, device_table, window_left);
}

void ExpectSameAsHost(const PartitionConfig& config, const HostTable& table, int32_t window_left,
                      int32_t segment_tokens = 0) {
  const HostPlan expected(config, segment_tokens, table.View(), window_left);
  const DeviceArray<int32_t> indptr(table.indptr);
  const DeviceArray<int32_t> last_page_len(table.last_page_len);
  PageTableView device = table.View();
  device.indptr = indptr.data();
  device.indices = nullptr;
  device.last_page_len = last_page_len.data();
  ExpectBothIndices(expected, config, device, window_left, segment_tokens);
}

void ExpectSameAsHost(const PartitionConfig& config, BlockTable table, int32_t window_left,
                      int32_t segment_tokens = 0) {
  const HostPlan expected(config, segment_tokens, ViewOf(table), window_left);
  const DeviceArray<int32_t> seq_lens(std::vector(table.seq_lens, table.seq_lens + table.batch));
  table.seq_lens = seq_lens.data();
  ExpectBothIndices(expected, config, ViewOf(table), window_left, segment_tokens);
}

// A batch of exactly `batch` requests, from those that RandomSource draws.
std::vector<int64_t> LengthsOfBatch(RandomSource& random, size_t batch) {
  std::vector<int64_t> lengths;
  while (lengths.size() < batch) {
    const std::vector<int64_t> more = random.Lengths(static_cast<int64_t>(batch));
    lengths.insert(lengths.end(), more.begin(), more.end());
  }
  lengths.resize(batch);
  return lengths;
}

PartitionConfig GpuConfig(int32_t num_heads, int32_t max_heads) {
  PartitionConfig config;
  config.num_workers = 132;
  config.warps_per_worker = 8;
  config.num_heads = num_heads;
  config.max_heads_per_worker = max_heads;
  config.double_heads_from = 4000;
  return config;
}

class DevicePlanTest : public ::testing::TestWithParam<int> {};

// Each warp plans alone up to 64 requests; the CTA plans together beyond.
TEST_P(DevicePlanTest, RandomTablesOfOneBatchSize) {
  const auto batch = static_cast<size_t>(GetParam());
  RandomSource random(static_cast<uint32_t>(batch) + 1);
  const int rounds = batch > 1000 ? 6 : 25;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(::testing::Message() << "batch " << batch << ", round " << round);
    const HostTable table =
        TableOfLengths(LengthsOfBatch(random, batch), random.Of<int32_t>({1, 3, 16, 64}),
                       static_cast<int32_t>(random.In(0, 5)));
    const PartitionConfig config = round % 2 == 0 ? random.Config() : GpuConfig(8, 8);
    const int32_t window_left = random.Window();
    ExpectSameAsHost(config, table, window_left);
    const testing::BlockTableArrays blocks =
        testing::BlockTableOf(table.View(), {.new_tokens = round % 2});
    ExpectSameAsHost(config, blocks.table, window_left);
    const int32_t segment_tokens = 128 << random.In(0, 4);
    ExpectSameAsHost(GpuConfig(8, 1), table, window_left, segment_tokens);
    ExpectSameAsHost(GpuConfig(8, 1), blocks.table, window_left, segment_tokens);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Batches, DevicePlanTest,
                         ::testing::Values(1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 1023,
                                           1024, 1025, 4095, 4096, 4097));

TEST(DevicePlan, EmptyRequestsEverywhere) {
  for (const size_t batch : {1U, 32U, 33U, 256U, 257U, 4096U}) {
    for (const size_t live : {size_t{0}, batch / 2, batch - 1}) {
      SCOPED_TRACE(::testing::Message() << "batch " << batch << ", live " << live);
      std::vector<int64_t> lengths(batch, 0);
      ExpectSameAsHost(GpuConfig(8, 8), TableOfLengths(lengths, 16), -1);
      lengths[live] = 70000;
      ExpectSameAsHost(GpuConfig(8, 8), TableOfLengths(lengths, 16), -1);
      ExpectSameAsHost(GpuConfig(3, 1), TableOfLengths(lengths, 1), 127);
      ExpectSameAsHost(GpuConfig(8, 1), TableOfLengths(lengths, 16), -1, 1024);
    }
  }
}

// Sums beyond 32 bits: every row names 2^31 - 1 tokens or nearly so.
TEST(DevicePlan, LongestPossibleRequests) {
  for (const size_t batch : {2U, 32U, 200U, 300U, 4096U}) {
    SCOPED_TRACE(::testing::Message() << "batch " << batch);
    HostTable table;
    table.page_size = 512;
    table.num_indices = std::numeric_limits<int32_t>::max();
    table.num_pages = 10;
    table.last_page_len.assign(batch, 17);
    for (size_t i = 1; i <= batch; ++i) {  // Each row begins at 0 again: rows may overlap.
      table.indptr.push_back(i % 2 == 1 ? std::numeric_limits<int32_t>::max() : 0);
    }
    ExpectSameAsHost(GpuConfig(8, 8), table, -1);
    ExpectSameAsHost(GpuConfig(1, 1), table, std::numeric_limits<int32_t>::max());
    ExpectSameAsHost(GpuConfig(8, 8), table, 1000);
  }
}

TEST(DevicePlan, MalformedTables) {
  RandomSource random(99);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round);
    HostTable table;
    table.page_size = random.Of<int32_t>({1, 16, 512});
    table.num_indices = random.In(0, 5000);
    table.num_pages = 100;
    const int64_t batch = random.Of<int64_t>({1, 31, 32, 33, 256, 257, 700});
    const int64_t limit = std::numeric_limits<int32_t>::max();
    table.indptr.clear();
    for (int64_t i = 0; i <= batch; ++i) {
      table.indptr.push_back(static_cast<int32_t>(
          random.Of<int64_t>({random.In(-limit - 1, limit), random.In(-9, 5009)})));
    }
    for (int64_t i = 0; i < batch; ++i) {
      table.last_page_len.push_back(
          static_cast<int32_t>(random.Of<int64_t>({random.In(-limit - 1, limit), 1, 0, -1})));
    }
    ExpectSameAsHost(random.Config(), table, random.Window());
    const BlockTable blocks{.seq_lens = table.last_page_len.data(),
                            .batch = static_cast<int32_t>(batch),
                            .columns = static_cast<int32_t>(random.In(0, 5000)),
                            .page_size = table.page_size,
                            .new_tokens = round % 2};
    ExpectSameAsHost(random.Config(), blocks, random.Window());
    ExpectSameAsHost(GpuConfig(8, 1), table, random.Window(), 1024);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace pgqa
