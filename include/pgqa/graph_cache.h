// A bounded cache of captured graphs, the least recently used out first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/hash/hash.h"
#include "absl/status/statusor.h"

namespace pgqa {

// Key compares and hashes; Value says how much device memory it holds: int64_t device_bytes()
// const. Values are shared, so that one that falls out lives on for who still holds it. Not
// thread-safe.
template <class Key, class Value>
class GraphCache {
 public:
  // At least one value is kept whatever max_count says; one larger than max_bytes is handed out,
  // not kept.
  struct Limits {
    int32_t max_count = 32;
    int64_t max_bytes = std::numeric_limits<int64_t>::max();
  };

  struct Usage {
    int32_t count = 0;
    int64_t bytes = 0;      // device_bytes() of what is kept
    int64_t hits = 0;       // since the cache was made
    int64_t misses = 0;     // `make` was called
    int64_t evictions = 0;  // for one of the limits
  };

  explicit GraphCache(const Limits& limits) : limits_(limits) {}

  // The value of `key`, made where there is none. A failure of `make` is returned and changes
  // nothing.
  absl::StatusOr<std::shared_ptr<Value>> GetOrMake(
      const Key& key, absl::FunctionRef<absl::StatusOr<Value>()> make) {
    if (std::shared_ptr<Value> found = Find(key)) {
      ++usage_.hits;
      return found;
    }
    ++usage_.misses;
    absl::StatusOr<Value> made = make();
    if (!made.ok()) return made.status();
    auto value = std::make_shared<Value>(*std::move(made));
    if (value->device_bytes() <= limits_.max_bytes) Keep(key, value);
    return value;
  }

  // The value of `key`, which counts as used, or null.
  std::shared_ptr<Value> Find(const Key& key) {
    const auto it = entries_.find(key);
    if (it == entries_.end()) return nullptr;
    order_.splice(order_.begin(), order_, it->second.place);
    return it->second.value;
  }

  void Clear() {
    order_.clear();
    entries_.clear();
    usage_.count = 0;
    usage_.bytes = 0;
  }

  Usage GetUsage() const { return usage_; }

 private:
  using Order =
      std::list<const Key*>;  // most recently used first; the keys are those of `entries_`
  struct Entry {
    std::shared_ptr<Value> value;
    int64_t bytes = 0;
    typename Order::iterator place;
  };

  void Keep(const Key& key, const std::shared_ptr<Value>& value) {
    const auto it = entries_.emplace(key, Entry{value, value->device_bytes(), {}}).first;
    order_.push_front(&it->first);
    it->second.place = order_.begin();
    ++usage_.count;
    usage_.bytes += it->second.bytes;
    while (usage_.count > 1 &&
           (usage_.count > limits_.max_count || usage_.bytes > limits_.max_bytes)) {
      DropOldest();
    }
  }

  void DropOldest() {
    const auto it = entries_.find(*order_.back());
    --usage_.count;
    usage_.bytes -= it->second.bytes;
    ++usage_.evictions;
    order_.pop_back();
    entries_.erase(it);
  }

  Limits limits_;
  Usage usage_;
  Order order_;
  std::unordered_map<Key, Entry, absl::Hash<Key>> entries_;
};

}  // namespace pgqa
