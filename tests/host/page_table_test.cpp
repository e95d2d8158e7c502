// Lengths, windows and page ids of a page table, right and malformed, and its validation.
// SPDX-License-Identifier: Apache-2.0
#include "pgqa/page_table.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "pgqa/validate.h"
#include "tests/host/expect_refused.h"
#include "tests/host/table_builder.h"

namespace pgqa {
namespace {

constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
constexpr int32_t kMin = std::numeric_limits<int32_t>::min();

PageTableView Sizes(int32_t page_size, int64_t num_indices) {
  PageTableView view;
  view.page_size = page_size;
  view.num_indices = num_indices;
  view.num_pages = num_indices;
  return view;
}

TEST(KvLengthTest, CountsFullPagesAndTheLastOne) {
  const PageTableView view = Sizes(16, 100);
  EXPECT_EQ(view.KvLength({0, 1, 1}), 1);
  EXPECT_EQ(view.KvLength({0, 1, 16}), 16);
  EXPECT_EQ(view.KvLength({7, 10, 3}), 35);
  EXPECT_EQ(view.KvLength({90, 100, 16}), 160);
}

TEST(KvLengthTest, IsZeroWithoutPagesWhateverTheLastPageLen) {
  for (const int32_t last_len : {kMin, -1, 0, 1, 16, kMax}) {
    EXPECT_EQ(Sizes(16, 100).KvLength({5, 5, last_len}), 0);
    EXPECT_EQ(Sizes(16, 100).KvLength({5, 4, last_len}), 0);
    EXPECT_EQ(Sizes(16, 100).KvLength({kMax, kMin, last_len}), 0);
    EXPECT_EQ(Sizes(16, 0).KvLength({0, 3, last_len}), 0);
  }
}

TEST(KvLengthTest, ClampsToTheRow) {
  const PageTableView view = Sizes(16, 100);
  EXPECT_EQ(view.KvLength({0, 2, 17}), 32);
  EXPECT_EQ(view.KvLength({0, 2, kMax}), 32);
  EXPECT_EQ(view.KvLength({0, 2, 0}), 16);
  EXPECT_EQ(view.KvLength({0, 2, -16}), 0);
  EXPECT_EQ(view.KvLength({0, 2, kMin}), 0);
  EXPECT_EQ(view.KvLength({-5, 2, 4}), 20);  // starts at entry 0
  EXPECT_EQ(view.KvLength({kMin, 2, 4}), 20);
  EXPECT_EQ(view.KvLength({98, 300, 4}), 20);  // ends at entry 100
  EXPECT_EQ(view.KvLength({100, 300, 4}), 0);
  EXPECT_EQ(view.KvLength({0, kMax, 16}), 1600);
}

TEST(KvLengthTest, Is64Bit) {
  const PageTableView view = Sizes(512, int64_t{1} << 40);
  EXPECT_EQ(view.KvLength({0, kMax, 512}), int64_t{kMax} * 512);
  EXPECT_EQ(view.KvLength({0, kMax, 1}), (int64_t{kMax} - 1) * 512 + 1);
}

TEST(KvLengthTest, ReadsTheRequestsOwnEntries) {
  const std::vector<int32_t> indptr = {3, 5, 5, 6};
  const std::vector<int32_t> last_page_len = {2, 99, 4};
  PageTableView view = Sizes(4, 6);
  view.indptr = indptr.data();
  view.last_page_len = last_page_len.data();
  view.batch = 3;
  EXPECT_EQ(view.KvLength(0), 6);
  EXPECT_EQ(view.KvLength(1), 0);
  EXPECT_EQ(view.KvLength(2), 4);
  EXPECT_EQ(view.LiveTokens(0, 1).begin, 4);
  EXPECT_EQ(view.LiveTokens(0, 1).end, 6);
  EXPECT_EQ(view.RowBegin(2), 5);
}

TEST(ClipToWindowTest, KeepsTheLastWindowLeftPlusOneTokens) {
  for (const int32_t window_left : {0, 1, 15, 16, 127}) {
    for (int64_t kv_len = 0; kv_len < 300; ++kv_len) {
      const TokenRange live = PageTableView::ClipToWindow(kv_len, window_left);
      EXPECT_EQ(live.end, kv_len);
      EXPECT_EQ(live.size(), kv_len <= window_left ? kv_len : window_left + 1);
    }
  }
}

TEST(ClipToWindowTest, EdgeValues) {
  EXPECT_EQ(PageTableView::ClipToWindow(1000, -1).begin, 0);
  EXPECT_EQ(PageTableView::ClipToWindow(0, 0).size(), 0);
  EXPECT_EQ(PageTableView::ClipToWindow(kMax, kMax).begin, 0);
  EXPECT_EQ(PageTableView::ClipToWindow(int64_t{kMax} + 1, kMax).begin, 0);
  EXPECT_EQ(PageTableView::ClipToWindow(int64_t{kMax} + 2, kMax).begin, 1);
  EXPECT_EQ(PageTableView::ClipToWindow(int64_t{1} << 40, kMax).size(), int64_t{kMax} + 1);
}

TEST(PageIdTest, IsMinusOneForWhatLiesOutside) {
  const std::vector<int32_t> indices = {4, 0, -1, 5, kMax, kMin, 2};
  PageTableView view = Sizes(4, 6);  // the seventh entry may not be read
  view.indices = indices.data();
  view.num_pages = 5;
  const std::vector<int32_t> expected = {4, 0, -1, -1, -1, -1, -1, -1};
  for (int64_t entry = 0; entry < 8; ++entry) {
    EXPECT_EQ(view.PageId(0, entry), expected[static_cast<size_t>(entry)]) << "entry " << entry;
  }
  EXPECT_EQ(view.PageId(1, 0), 0);
  EXPECT_EQ(view.PageId(kMax, int64_t{kMax} * 4), -1);
}

TEST(RowBeginTest, IsNeverNegative) {
  const std::vector<int32_t> indptr = {-7, 3, kMin};
  PageTableView view = Sizes(4, 6);
  view.indptr = indptr.data();
  EXPECT_EQ(view.RowBegin(0), 0);
  EXPECT_EQ(view.RowBegin(1), 3);
  EXPECT_EQ(view.RowBegin(2), 0);
}

// Four requests of 3, 0, 2 and 1 pages from entry 2 on; pages 0 to 9; the ends of `indices` are poison.
HostTable ValidTable() {
  HostTable table;
  table.page_size = 16;
  table.indptr = {2, 5, 5, 7, 8};
  table.last_page_len = {16, kMin, 1, 7};
  table.indices = {-1, kMax, 9, 0, 3, 3, 4, 5, kMin, 10};
  table.num_indices = 10;
  table.num_pages = 10;
  return table;
}

absl::Status ValidateRowsOf(const HostTable& table) { return ValidateRows(table.View()); }
absl::Status ValidateAllOf(const HostTable& table) { return ValidatePageTable(table.View()); }

std::vector<Fault<HostTable>> RowCases() {
  return {
      {[](auto* t) { t->page_size = 0; }, "page_size: got 0, expected at least 1"},
      {[](auto* t) { t->num_pages = -1; }, "num_pages: got -1, expected at least 0"},
      {[](auto* t) { t->indptr[0] = -1; },
       "page_indptr of request 0: got -1, expected a row that begins at 0 or later"},
      {[](auto* t) { t->indptr[1] = 1; },
       "page_indptr of request 0: got 2 to 1, expected a row that does not decrease"},
      {[](auto* t) { t->indptr[2] = 4; },
       "page_indptr of request 1: got 5 to 4, expected a row that does not decrease"},
      {[](auto* t) { t->indptr[3] = kMin; },
       "page_indptr of request 2: got 5 to -2147483648, expected a row that does not decrease"},
      {[](auto* t) { t->indptr[4] = 6; },
       "page_indptr of request 3: got 7 to 6, expected a row that does not decrease"},
      {[](auto* t) { t->num_indices = 7; },
       "page_indices of request 3: got 7 entries, expected at least 8"},
      {[](auto* t) { t->num_indices = 6; },
       "page_indices of request 2: got 6 entries, expected at least 7"},
      {[](auto* t) { t->num_indices = 0; },
       "page_indices of request 0: got 0 entries, expected at least 5"},
      {[](auto* t) { t->num_indices = -1; }, "num_indices: got -1, expected at least 0"},
      {[](auto* t) { t->last_page_len[0] = 0; },
       "last_page_len of request 0: got 0, expected 1 to page_size (16)"},
      {[](auto* t) { t->last_page_len[2] = 17; },
       "last_page_len of request 2: got 17, expected 1 to page_size (16)"},
      {[](auto* t) { t->last_page_len[3] = -1; },
       "last_page_len of request 3: got -1, expected 1 to page_size (16)"},
  };
}

TEST(ValidatePageTableTest, NamesTheRequestOfEveryRowFault) {
  ExpectRefused(ValidTable(), RowCases(), ValidateRowsOf);
  ExpectRefused(ValidTable(), RowCases(), ValidateAllOf);
}

TEST(ValidatePageTableTest, NamesTheRequestOfEveryPageId) {
  const std::vector<Fault<HostTable>> cases = {
      {[](auto* t) { t->indices[2] = -1; },
       "page_indices of request 0: got page -1 at entry 2, expected 0 to num_pages - 1 (9)"},
      {[](auto* t) { t->indices[4] = kMin; },
       "page_indices of request 0: got page -2147483648 at entry 4, expected 0 to num_pages - 1 "
       "(9)"},
      {[](auto* t) { t->indices[5] = 10; },
       "page_indices of request 2: got page 10 at entry 5, expected 0 to num_pages - 1 (9)"},
      {[](auto* t) { t->indices[7] = kMax; },
       "page_indices of request 3: got page 2147483647 at entry 7, expected 0 to num_pages - 1 "
       "(9)"},
      {[](auto* t) { t->num_pages = 9; },
       "page_indices of request 0: got page 9 at entry 2, expected 0 to num_pages - 1 (8)"},
      {[](auto* t) { t->indices.clear(); }, "page_indices: got null, expected 10 entries"},
  };
  ExpectRefused(ValidTable(), cases, ValidateAllOf);
  for (const Fault<HostTable>& c : cases) {
    HostTable table = ValidTable();
    c.change(&table);
    EXPECT_TRUE(ValidateRowsOf(table).ok()) << c.message;
  }
}

TEST(ValidatePageTableTest, RefusesMissingArraysAndNegativeBatches) {
  PageTableView view;
  view.page_size = 16;
  EXPECT_TRUE(ValidatePageTable(view).ok());  // no requests: nothing is read
  view.batch = -1;
  EXPECT_EQ(std::string(ValidatePageTable(view).message()), "batch: got -1, expected at least 0");
  view.batch = 3;
  EXPECT_EQ(std::string(ValidatePageTable(view).message()),
            "page_indptr: got null, expected 4 entries");
  const std::vector<int32_t> indptr = {0, 0, 0, 0};
  view.indptr = indptr.data();
  EXPECT_EQ(std::string(ValidatePageTable(view).message()),
            "last_page_len: got null, expected 3 entries");
  view.last_page_len = indptr.data();
  EXPECT_TRUE(ValidatePageTable(view).ok());  // empty requests name no page
}

TEST(ValidatePageTableTest, FindsTheOneFaultOfManyRequests) {
  RandomSource random(3);
  for (int32_t trial = 0; trial < 300; ++trial) {
    HostTable table = TableOfLengths(random.Lengths(60), 16, static_cast<int32_t>(random.In(0, 9)));
    table.indices.assign(static_cast<size_t>(table.num_indices), 0);
    ASSERT_TRUE(ValidateAllOf(table).ok());
    std::vector<int32_t> filled;
    for (int32_t request = 0; request < table.View().batch; ++request) {
      if (table.View().KvLength(request) > 0) filled.push_back(request);
    }
    if (filled.empty()) continue;
    const int32_t request = random.Of(filled);
    const auto row = static_cast<size_t>(request);
    if (trial % 2 == 0) {
      table.last_page_len[row] = random.Of<int32_t>({0, 17, kMin, kMax});
    } else {
      table.indices[static_cast<size_t>(random.In(table.indptr[row], table.indptr[row + 1] - 1))] =
          random.Of<int32_t>({-1, static_cast<int32_t>(table.num_pages)});
    }
    const std::string message(ValidateAllOf(table).message());
    EXPECT_NE(message.find(" of request " + std::to_string(request) + ": got "), std::string::npos)
        << message;
  }
}

}  // namespace
}  // namespace pgqa
