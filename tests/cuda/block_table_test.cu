// Padded block tables on the device: the same bits as with the CSR table that says the same; for sanitizers too.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "graphs/live_rows.h"
#include "tests/append_problem.h"
#include "tests/block_table_of.h"
#include "tests/cuda/bound_graph.cuh"
#include "tests/cuda/decode_run.cuh"

namespace pgqa::testing {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();

// A block table on the device, in arrays of exact size.
struct OnDevice {
  explicit OnDevice(const BlockTableArrays& host)
      : entries(host.entries),
        seq_lens(host.seq_lens),
        view(ViewOf(host.On(entries.data(), seq_lens.data()))) {}

  DeviceArray<int32_t> entries, seq_lens;
  PageTableView view;
};

BlockTableArrays BlockTableOf(const Problem& problem, const BlockTableForm& form) {
  const std::vector<int32_t> indptr = problem.indptr.Read();
  const std::vector<int32_t> indices = problem.indices.Read();
  const std::vector<int32_t> last_page_len = problem.last_page_len.Read();
  PageTableView csr = problem.Args(nullptr, nullptr).table;
  csr.indptr = indptr.data();
  csr.indices = indices.data();
  csr.last_page_len = last_page_len.data();
  return BlockTableOf(csr, form);
}

absl::Status DecodeWith(const PageTableView& table, const Problem& problem, const Runner& runner) {
  DecodeArgs args = problem.Args(runner.out().data(), runner.lse().data());
  args.table = table;
  return Decode(runner.plan(), args, runner.View(), nullptr);
}

void ExpectTheSameBits(const ProblemSpec& spec) {
  const Problem problem(spec);
  const Runner runner(problem);
  ASSERT_TRUE(runner.Launch().ok());
  runner.CheckResult();
  const std::vector<uint16_t> out = runner.out().Read();
  const std::vector<float> lse = runner.lse().Read();
  for (const BlockTableForm& form : kForms) {
    const OnDevice blocks(BlockTableOf(problem, form));
    runner.Forget();
    ASSERT_TRUE(DecodeWith(blocks.view, problem, runner).ok());
    runner.CheckResult();
    EXPECT_EQ(runner.out().Read(), out);
    EXPECT_EQ(runner.lse().Read(), lse);
  }
}

TEST(BlockTable, DecodesToTheSameBits) {
  ExpectTheSameBits({{0, 1, 17, 40}, 4, 1, 64, 16});
  ExpectTheSameBits({{33, 0, 200}, 2, 2, 8, 1, DType::kFloat16});
  ExpectTheSameBits({{129, 3}, 9, 1, 128, 5, DType::kBFloat16, true, 63});
  ExpectTheSameBits({{2500}, 4, 1, 64, 16});
  ExpectTheSameBits({{0, 0}, 4, 1, 64, 16});
}

TEST(BlockTable, EveryPlanningPath) {
  for (const size_t batch : {33U, 64U, 65U, 300U}) {
    std::vector<int32_t> lengths(batch, 3);
    for (size_t i = 0; i < batch; i += 7) lengths[i] = 0;
    lengths[batch / 2] = 100;
    ExpectTheSameBits({lengths, 2, 1, 64, 16});
  }
}

// Columns enough for the rows to be prefetched in parts.
TEST(BlockTable, LongRows) {
  const Problem problem(ProblemSpec{{40, 0, 700}, 4, 1, 64, 1});
  const Runner runner(problem);
  const OnDevice blocks(BlockTableOf(problem, {.spare_columns = 8192 - 700, .gap = 0}));
  ASSERT_TRUE(DecodeWith(blocks.view, problem, runner).ok());
  runner.CheckResult();
}

TEST(BlockTable, MalformedLengthsLeaveOtherRequestsRight) {
  for (const bool rope : {false, true}) {
    const Problem problem({{40, 33, 100}, 8, 2, 64, 16, DType::kBFloat16, rope});
    const Runner runner(problem);
    for (const int32_t new_tokens : {0, 1}) {
      for (const int32_t value : {kMin, -2, -1, 0, 1000, kMax - 1, kMax}) {
        SCOPED_TRACE(::testing::Message() << "length " << value << ", new " << new_tokens);
        BlockTableArrays host = BlockTableOf(problem, {.new_tokens = new_tokens});
        host.seq_lens[1] = value;
        const OnDevice blocks(host);
        runner.Forget();
        ASSERT_TRUE(DecodeWith(blocks.view, problem, runner).ok());
        runner.CheckResult({1});
      }
    }
  }
}

// The second row lies more than 2^31 entries behind the first.
TEST(BlockTable, RowsFarApart) {
  const Problem problem(ProblemSpec{{40, 33}, 4, 1, 64, 16});
  const Runner runner(problem);
  const BlockTableArrays host = BlockTableOf(problem, {});
  constexpr int64_t kStride = (int64_t{1} << 31) + 5;
  size_t free = 0, total = 0;
  Check(cudaMemGetInfo(&free, &total));
  if (free < size_t{12} << 30) GTEST_SKIP() << "needs 12 GB";
  const DeviceArray<int32_t> entries(static_cast<size_t>(kStride + host.table.columns));
  const DeviceArray<int32_t> seq_lens(host.seq_lens);
  const auto columns = static_cast<size_t>(host.table.columns);
  entries.WriteAt(0, host.entries.data(), columns);
  entries.WriteAt(kStride, host.entries.data() + host.table.row_stride, columns);
  BlockTable table = host.On(entries.data(), seq_lens.data());
  table.row_stride = kStride;
  ASSERT_TRUE(DecodeWith(ViewOf(table), problem, runner).ok());
  runner.CheckResult();
}

TEST(BlockTable, AppendsTheSameBytes) {
  for (const BlockTableForm& form : kForms) {
    AppendProblem problem({});
    const DeviceArray<uint8_t> k(problem.k), v(problem.v);
    const DeviceArray<uint8_t> k_cache(problem.k_cache), v_cache(problem.v_cache);
    BlockTableArrays host = BlockTableOf(problem.Table(), form);
    const OnDevice blocks(host);
    const AppendArgs args = problem.Args(k.data(), v.data(), k_cache.data(), v_cache.data(),
                                         blocks.view, nullptr, nullptr);
    ASSERT_TRUE(Append(problem.spec.shape, args, nullptr).ok());
    Check(cudaDeviceSynchronize());
    ASSERT_TRUE(AppendOnCpu(problem.spec.shape, problem.HostArgs()).ok());
    EXPECT_EQ(k_cache.Read(), problem.k_cache);
    EXPECT_EQ(v_cache.Read(), problem.v_cache);
  }
}

TEST(BlockTable, LiveRowsAreEmptyPastTheLiveBatch) {
  const std::vector<int32_t> lengths = {5, -1, 7, 300, 9};
  BlockTableArrays host;
  host.seq_lens = lengths;
  host.table = {.batch = 5, .columns = 20, .page_size = 16};
  const OnDevice blocks(host);
  for (const int32_t live_batch : {0, 1, 4, 5}) {
    const DeviceArray<int32_t> live(lengths.size());
    const LiveRowsArgs args{blocks.view, live.data(), live_batch};
    ASSERT_TRUE(LaunchLiveRows(args, nullptr).ok());
    Check(cudaDeviceSynchronize());
    std::vector<int32_t> expected(lengths.begin(), lengths.begin() + live_batch);
    expected.resize(lengths.size(), -1);
    EXPECT_EQ(live.Read(), expected);
    EXPECT_EQ(LiveTable(args).indptr, live.data());
    EXPECT_EQ(LiveTable(args).last_page_len, live.data());
  }
}

// A step of `problem` over a block table of its own, for seq_lens without the new tokens.
GraphSpec BlockTableSpec(const Problem& problem, const Runner& runner, int32_t max_columns) {
  GraphSpec spec = SpecOf(problem, runner);
  spec.page_indptr = spec.page_indices = spec.last_page_len = nullptr;
  spec.max_pages = 0;
  spec.max_columns = max_columns;
  spec.new_tokens = 1;
  return spec;
}

void ExpectZeroFrom(const Runner& runner, const Problem& problem, int32_t request) {
  const std::vector<uint16_t> out = runner.out().Read();
  const size_t row_elements = out.size() / static_cast<size_t>(problem.batch());
  for (size_t i = static_cast<size_t>(request) * row_elements; i < out.size(); ++i)
    ASSERT_EQ(out[i], 0U);
}

TEST(BlockTableGraph, ReplaysATableOfItsOwn) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  const BlockTableArrays host = BlockTableOf(problem, {.new_tokens = 1, .gap = 0});
  const CudaStream stream = CudaStream::Create().value();
  DecodeGraph graph =
      DecodeGraph::Create(BlockTableSpec(problem, runner, host.table.columns)).value();
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  ASSERT_TRUE(graph.Replay(stream.get()).ok());
  Check(cudaStreamSynchronize(stream.get()));
  ExpectZeroFrom(runner, problem, 0);  // nothing told: every request is empty
  const auto copy = [](const int32_t* to, const std::vector<int32_t>& from) {
    Check(
        cudaMemcpy(const_cast<int32_t*>(to), from.data(), from.size() * 4, cudaMemcpyHostToDevice));
  };
  copy(graph.spec().block_table, host.entries);
  copy(graph.spec().seq_lens, host.seq_lens);
  for (const int32_t live : {4, 2, 0}) {
    runner.Forget();
    ASSERT_TRUE(graph.Replay(live, stream.get()).ok());
    std::set<int32_t> past;
    for (int32_t request = live; request < 4; ++request) past.insert(request);
    runner.CheckResult(past);
    ExpectZeroFrom(runner, problem, live);
  }
  EXPECT_EQ(graph.CheckStep(4, host.table.columns + 1).code(), absl::StatusCode::kInvalidArgument);
}

TEST(BlockTableGraph, RebindsToAWiderTable) {
  const Problem problem(kFourRequests);
  const Runner runner(problem);
  const CudaStream stream = CudaStream::Create().value();
  GraphSpec spec = BlockTableSpec(problem, runner, 3);
  DecodeGraph graph = DecodeGraph::Create(spec).value();
  ASSERT_TRUE(graph.Capture(stream.get()).ok());
  const OnDevice wide(BlockTableOf(problem, {.new_tokens = 1}));
  spec.max_columns = wide.view.columns;
  EXPECT_EQ(graph.Rebind(spec).code(), absl::StatusCode::kInvalidArgument) << "its own is narrower";
  spec.block_table = wide.entries.data();
  spec.block_table_stride = wide.view.row_stride;
  spec.seq_lens = wide.seq_lens.data();
  ASSERT_TRUE(graph.Rebind(spec).ok());
  ASSERT_TRUE(graph.Replay(stream.get()).ok());
  runner.CheckResult();
  EXPECT_EQ(graph.Rebind(SpecOf(problem, runner)).code(), absl::StatusCode::kInvalidArgument)
      << "another kind of table";
}

}  // namespace
}  // namespace pgqa::testing
