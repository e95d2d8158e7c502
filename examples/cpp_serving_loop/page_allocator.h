// Requests and the pages that they own: a scheduler's state, written out as a page table.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Request {
  int32_t id = 0;
  int32_t wanted_length = 0;  // tokens it has when it is done
  int32_t length = 0;         // tokens cached
  std::vector<int32_t> pages;
};

class PageAllocator {
 public:
  PageAllocator(int32_t num_pages, int32_t page_size) : page_size_(page_size) {
    for (int32_t page = 0; page < num_pages; ++page) free_.push_back(page);
  }

  // Makes room for one more token.
  void Grow(Request* request) {
    if (request->length++ % page_size_ != 0) return;
    request->pages.push_back(free_.back());
    free_.pop_back();
  }

  // Takes its pages back, to be handed out in another order.
  void Free(const Request& request) {
    free_.insert(free_.begin(), request.pages.begin(), request.pages.end());
  }

  // Writes the table of `requests`, to arrays that are large enough.
  void WriteTable(const std::vector<Request>& requests, int32_t* indptr, int32_t* indices,
                  int32_t* last_page_len) const {
    int32_t entries = 0;
    indptr[0] = 0;
    for (const Request& request : requests) {
      std::copy(request.pages.begin(), request.pages.end(), indices + entries);
      entries += static_cast<int32_t>(request.pages.size());
      *++indptr = entries;
      *last_page_len++ = (request.length - 1) % page_size_ + 1;
    }
  }

 private:
  int32_t page_size_;
  std::vector<int32_t> free_;
};
