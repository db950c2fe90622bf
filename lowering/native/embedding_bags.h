// Sums and means of bags of rows of tables: how recommendation models read their tables.
#pragma once

#include "elements.h"
#include "parallel.h"

namespace kd::bags {

// A table and the bags that are read from it. The bags' numbers lie one after the other; a bag ends
// where the next begins.
struct Table {
  const void* rows;
  int64_t count, width;
  const int64_t* numbers;
  int64_t numbers_count;
  const int64_t* begins;
  int64_t begins_count;
  const void* factors;  // of each number; or nothing
  int64_t padding;      // the row that is left out; -1: none
  void* out;            // the first bag's
};

// Rows are read in the order of the numbers, which no CPU foresees: they are asked for this many
// numbers ahead, a line with each that is read. All lines of a row at once took a third longer.
constexpr int64_t kAhead = 16;
constexpr int64_t kLine = 64;
constexpr int kStrip = kLanes == 4 ? 4 : 8;  // vectors of a row whose sums stay in registers

constexpr int64_t kNoFault = -1;

template <class Element, bool has_factors>
class Bags {
 public:
  Bags(const Table& table, bool mean, int64_t row_out)
      : t_(table), mean_(mean), row_out_(row_out), rows_(static_cast<const Element*>(table.rows)) {}

  // Where a number stands that is none of the table's; kNoFault if all are.
  int64_t compute(Range bags) const {
    const int64_t wide = kStrip * kLanes;
    for (int64_t bag = bags.begin; bag < bags.end; bag++) {
      const Range numbers = numbers_of(bag);
      const int64_t fault = check(numbers);
      if (fault != kNoFault) return fault;
      Element* const out = static_cast<Element*>(t_.out) + bag * row_out_;
      const vec scale = splat(mean_ ? 1.0f / static_cast<float>(counted(numbers)) : 1.0f);
      int64_t at = 0;
      for (; at + wide <= t_.width; at += wide) strip<kStrip>(numbers, at, scale, out);
      for (; at + kLanes <= t_.width; at += kLanes) strip<1>(numbers, at, scale, out);
      if (at < t_.width) last(numbers, at, scale, out);
    }
    return kNoFault;
  }

 private:
  static constexpr int64_t kVector = kLanes * static_cast<int64_t>(sizeof(Element));  // bytes

  Range numbers_of(int64_t bag) const {
    return {t_.begins[bag], bag + 1 < t_.begins_count ? t_.begins[bag + 1] : t_.numbers_count};
  }

  int64_t check(Range numbers) const {
    for (int64_t i = numbers.begin; i < numbers.end; i++)
      if (static_cast<uint64_t>(t_.numbers[i]) >= static_cast<uint64_t>(t_.count)) return i;
    return kNoFault;
  }

  // What is asked for while this number's row is added up; at the end, the row itself. A number that
  // nobody has checked yet is no place in memory, only an address.
  const char* ahead_of(int64_t number, int64_t at) const {
    const int64_t ahead = number + kAhead < t_.numbers_count ? number + kAhead : number;
    const auto row = static_cast<uint64_t>(t_.numbers[ahead]);
    const uint64_t place = row * static_cast<uint64_t>(t_.width) + static_cast<uint64_t>(at);
    const auto first = reinterpret_cast<uint64_t>(rows_);
    return reinterpret_cast<const char*>(first + place * sizeof(Element));
  }

  // Of which the mean is; of none it is zero, whatever it is divided by.
  int64_t counted(Range numbers) const {
    int64_t count = numbers.size();
    if (t_.padding >= 0)
      for (int64_t i = numbers.begin; i < numbers.end; i++) count -= t_.numbers[i] == t_.padding;
    return count > 0 ? count : 1;
  }

  template <class Body>
  void over_rows(Range numbers, const Body& body) const {
    for (int64_t i = numbers.begin; i < numbers.end; i++)
      if (t_.numbers[i] != t_.padding) body(rows_ + t_.numbers[i] * t_.width, i);
  }

  vec factor(int64_t number) const {
    const Element* const factors = static_cast<const Element*>(t_.factors);
    return splat(load_floats_first(factors + number, 1)[0]);
  }

  vec added(vec sum, vec value, int64_t number) const {
    if constexpr (has_factors) return fma(factor(number), value, sum);
    return sum + value;
  }

  template <int vectors>
  void strip(Range numbers, int64_t at, vec scale, Element* out) const {
    vec sums[vectors] = {};
    over_rows(numbers, [&](const Element* row, int64_t i) {
      const char* const ahead = ahead_of(i, at);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) {
        if (v * kVector % kLine == 0) __builtin_prefetch(ahead + v * kVector);
        sums[v] = added(sums[v], load_floats(row + at + v * kLanes), i);
      }
    });
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) store_floats(out + at + v * kLanes, sums[v] * scale);
  }

  // The numbers of a row that fill no vector.
  void last(Range numbers, int64_t at, vec scale, Element* out) const {
    const int count = static_cast<int>(t_.width - at);
    vec sum{};
    over_rows(numbers, [&](const Element* row, int64_t i) {
      __builtin_prefetch(ahead_of(i, at));
      sum = added(sum, load_floats_first(row + at, count), i);
    });
    store_floats_first(out + at, sum * scale, count);
  }

  const Table& t_;
  const bool mean_;
  const int64_t row_out_;
  const Element* const rows_;
};

}  // namespace kd::bags
