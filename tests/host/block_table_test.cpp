// Padded block tables: lengths, plans, decoding and appending as with the CSR table that says the same; validation.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cuda/attention_params.h"
#include "pgqa/append.h"
#include "pgqa/schedule.h"
#include "pgqa/validate.h"
#include "tests/append_problem.h"
#include "tests/block_table_of.h"
#include "tests/host/cpu_problem.h"
#include "tests/host/expect_refused.h"
#include "tests/host/table_builder.h"

namespace pgqa::testing {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();

TEST(BlockTableTest, LengthsAreClampedToTheColumns) {
  const struct {
    int32_t seq_len, new_tokens;
    int64_t kv_len, newest;
  } cases[] = {{0, 0, 0, -1},     {1, 0, 1, 0},     {64, 0, 64, 63},  {65, 0, 64, -1},
               {kMax, 0, 64, -1}, {-1, 0, 0, -1},   {kMin, 0, 0, -1}, {0, 1, 1, 0},
               {63, 1, 64, 63},   {64, 1, 64, -1},  {-1, 1, 0, -1},   {-2, 1, 0, -1},
               {kMin, 1, 0, -1},  {kMax, 1, 64, -1}};
  for (const auto& c : cases) {
    const std::vector<int32_t> seq_lens = {7, c.seq_len};
    const PageTableView view = ViewOf({.seq_lens = seq_lens.data(),
                                       .row_stride = 9,
                                       .num_pages = 5,
                                       .batch = 2,
                                       .columns = 4,
                                       .page_size = 16,
                                       .new_tokens = c.new_tokens});
    EXPECT_EQ(view.KvLength(1), c.kv_len) << c.seq_len << " and " << c.new_tokens;
    EXPECT_EQ(view.KvLength<int32_t>(1), c.kv_len) << c.seq_len << " and " << c.new_tokens;
    EXPECT_EQ(view.NewestPosition(1), c.newest) << c.seq_len << " and " << c.new_tokens;
    EXPECT_EQ(view.RowBegin(1), 9);
  }
}

TEST(BlockTableTest, LengthsAndRowsBeyond32Bits) {
  const std::vector<int32_t> seq_lens(1000, kMax);
  const PageTableView view = ViewOf({.seq_lens = seq_lens.data(),
                                     .row_stride = kMax,
                                     .batch = 1000,
                                     .columns = kMax,
                                     .page_size = 512,
                                     .new_tokens = 1});
  EXPECT_EQ(view.KvLength(999), int64_t{kMax} + 1);
  EXPECT_EQ(view.RowBegin(999), int64_t{kMax} * 999);
  EXPECT_FALSE(FitsInt32(GpuConfig(), view));
}

TEST(BlockTableTest, WithoutColumnsAllRequestsAreEmpty) {
  const std::vector<int32_t> seq_lens = {0, 5, kMax, -1};
  for (const int32_t new_tokens : {0, 1}) {
    const PageTableView view = ViewOf({.seq_lens = seq_lens.data(),
                                       .batch = 4,
                                       .columns = 0,
                                       .page_size = 16,
                                       .new_tokens = new_tokens});
    for (int32_t r = 0; r < 4; ++r) EXPECT_EQ(view.KvLength(r), 0);
    EXPECT_EQ(view.NewestPosition(0), -1);
  }
}

TEST(BlockTableTest, PlansAsTheCsrTable) {
  RandomSource random(11);
  for (int round = 0; round < 200; ++round) {
    const HostTable csr = TableOfLengths(random.Lengths(80), random.Of<int32_t>({1, 3, 16}));
    const PartitionConfig config = random.Config();
    const int32_t window = random.Window();
    const BlockTableArrays blocks = BlockTableOf(csr.View(), kForms[round % 4]);
    const auto expected = Schedule::Make(config, csr.View(), window);
    const auto found = Schedule::Make(config, ViewOf(blocks.table), window);
    ASSERT_TRUE(expected.ok() && found.ok());
    ASSERT_TRUE(*expected == *found);
  }
}

TEST(BlockTableTest, DecodesToTheSameBits) {
  for (const BlockTableForm& form : kForms) {
    for (const int32_t page_size : {1, 5, 16}) {
      for (const int32_t window_left : {-1, 20}) {
        ProblemSpec spec = SpecOf(2, 2, 32, page_size);
        spec.kv_lens = {40, 0, 1, 100, 16, 0, 17, 300};
        spec.options.window_left = window_left;
        Problem problem(spec);
        ASSERT_TRUE(problem.Run(3).ok());
        const std::vector<uint8_t> out = problem.OutputBytes();
        const std::vector<float> lse = problem.lse();
        CpuDecodeArgs args = problem.args();
        const BlockTableArrays blocks = BlockTableOf(args.table, form);
        args.table = ViewOf(blocks.table);
        std::fill_n(static_cast<uint8_t*>(args.out), out.size(), uint8_t{0xFF});
        ASSERT_TRUE(DecodeOnCpu(*MakeCpuLaunchPlan(problem.shape(), 3), args).ok());
        EXPECT_EQ(problem.OutputBytes(), out);
        EXPECT_EQ(problem.lse(), lse);
      }
    }
  }
}

TEST(BlockTableTest, MalformedLengthsLeaveOtherRequestsRight) {
  ProblemSpec spec = SpecOf(2, 1, 16, 16);
  spec.kv_lens = {40, 33, 100};
  for (const int32_t value : {kMin, -1, 0, 1000, kMax}) {
    for (const int32_t new_tokens : {0, 1}) {
      Problem problem(spec);
      CpuDecodeArgs args = problem.args();
      BlockTableArrays blocks = BlockTableOf(args.table, {.new_tokens = new_tokens});
      blocks.seq_lens[1] = value;
      args.table = ViewOf(blocks.table);
      ASSERT_TRUE(DecodeOnCpu(*MakeCpuLaunchPlan(problem.shape(), 2), args).ok());
      for (const int32_t request : {0, 2}) {
        const Problem::Reference expected = problem.ReferenceOf(request, 1);
        for (int32_t d = 0; d < 16; ++d)
          EXPECT_NEAR(problem.OutputAt(request, 1, d), expected.output[static_cast<size_t>(d)],
                      1e-5);
      }
    }
  }
}

TEST(BlockTableTest, PrefetchesShortRowsWholeAndLongRowsFromTheirFirstColumns) {
  const auto pitch = [](int64_t row_stride, int32_t batch) {
    return PrefetchPitch(ViewOf({.row_stride = row_stride, .batch = batch, .columns = 9}));
  };
  EXPECT_EQ(PrefetchPitch(PageTableView()), kPrefetchedIds);
  EXPECT_EQ(pitch(1024, 4096), 1024U);
  EXPECT_EQ(pitch(8192, 1), 1024U);
  EXPECT_EQ(pitch(8192, 64), 2048U);
  EXPECT_EQ(pitch(8192, 129), 8192U);
  EXPECT_EQ(pitch(8191, 1), 8191U);  // of a half, rows would not begin where a warp does
  EXPECT_EQ(pitch((int64_t{1} << 40) + 1, 1), std::numeric_limits<uint32_t>::max());
  EXPECT_EQ(NumPrefetched(ViewOf({.row_stride = 12, .batch = 3, .columns = 9})), 33);
  EXPECT_EQ(NumPrefetched(ViewOf({.row_stride = 12, .batch = 3, .columns = 0})), 0);
}

TEST(BlockTableTest, AppendsTheSameBytes) {
  for (const BlockTableForm& form : kForms) {
    AppendProblem expected({});
    AppendProblem problem({});
    ASSERT_TRUE(AppendOnCpu(expected.spec.shape, expected.HostArgs()).ok());
    AppendArgs args = problem.HostArgs();
    const BlockTableArrays blocks = BlockTableOf(args.table, form);
    args.table = ViewOf(blocks.table);
    ASSERT_NE(problem.k_cache, expected.k_cache);
    ASSERT_TRUE(AppendOnCpu(problem.spec.shape, args).ok());
    EXPECT_EQ(problem.k_cache, expected.k_cache);
    EXPECT_EQ(problem.v_cache, expected.v_cache);
  }
}

TEST(BlockTableTest, AppendsNothingWhereTheRowIsFull) {
  AppendProblem problem({.kv_lens = {8, 8}});
  const std::vector<uint8_t> before = problem.k_cache;
  AppendArgs args = problem.HostArgs();
  BlockTableArrays blocks = BlockTableOf(args.table, {.new_tokens = 1, .spare_columns = 0});
  blocks.seq_lens = {8, kMax};
  blocks.table.seq_lens = blocks.seq_lens.data();
  args.table = ViewOf(blocks.table);
  ASSERT_TRUE(AppendOnCpu(problem.spec.shape, args).ok());
  EXPECT_EQ(problem.k_cache, before);
}

// Three requests of 3, 0 and 2 pages in rows of four, with a gap of one; pages 0 to 9.
struct HostBlockTable {
  std::vector<int32_t> entries = {9, 0, 3, kMax, kMin, -1, -1, -1, -1, kMin, 4, 5, 10, kMax};
  std::vector<int32_t> seq_lens = {48, -1, 17};
  BlockTable table{.row_stride = 5, .num_pages = 10, .batch = 3, .columns = 4, .page_size = 16};
};

absl::Status Validate(const HostBlockTable& host) {
  BlockTable table = host.table;
  table.block_table = host.entries.empty() ? nullptr : host.entries.data();
  table.seq_lens = host.seq_lens.empty() ? nullptr : host.seq_lens.data();
  return ValidatePageTable(ViewOf(table));
}

TEST(ValidateBlockTableTest, NamesTheFaultAndItsRequest) {
  const std::vector<Fault<HostBlockTable>> cases = {
      {[](auto* t) { t->seq_lens[2] = 65; },
       "seq_lens of request 2: got 65, expected at most 64: 4 columns of page_size 16, "
       "new_tokens 0"},
      {[](auto* t) { t->seq_lens[0] = kMax; },
       "seq_lens of request 0: got 2147483647, expected at most 64: 4 columns of page_size 16, "
       "new_tokens 0"},
      {[](auto* t) { t->seq_lens[0] = 64, t->table.new_tokens = 1; },
       "seq_lens of request 0: got 64, expected at most 63: 4 columns of page_size 16, "
       "new_tokens 1"},
      {[](auto* t) { t->seq_lens[0] = 48, t->table.new_tokens = 1; },
       "block_table of request 0: got page 2147483647 at column 3, expected 0 to num_pages - 1 "
       "(9)"},
      {[](auto* t) { t->entries[11] = -1; },
       "block_table of request 2: got page -1 at column 1, expected 0 to num_pages - 1 (9)"},
      {[](auto* t) { t->table.num_pages = 9; },
       "block_table of request 0: got page 9 at column 0, expected 0 to num_pages - 1 (8)"},
      {[](auto* t) { t->table.new_tokens = 2; }, "new_tokens: got 2, expected 0 or 1"},
      {[](auto* t) { t->table.new_tokens = -1; }, "new_tokens: got -1, expected 0 or 1"},
      {[](auto* t) { t->table.columns = -1; }, "columns: got -1, expected at least 0"},
      {[](auto* t) { t->table.row_stride = -5; }, "row_stride: got -5, expected at least 0"},
      {[](auto* t) { t->table.batch = -1; }, "batch: got -1, expected at least 0"},
      {[](auto* t) { t->entries.clear(); }, "block_table: got null, expected 12 entries"},
      {[](auto* t) { t->seq_lens.clear(); }, "seq_lens: got null, expected 3 entries"},
  };
  ExpectRefused(HostBlockTable(), cases, Validate);
}

}  // namespace
}  // namespace pgqa::testing
