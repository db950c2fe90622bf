// A matrix turned about: its rows become columns.
#pragma once

#include <algorithm>

#include "elements.h"
#include "transpose.h"

namespace kd {

// A matrix and the distance of its rows.
struct Matrix {
  int64_t rows, columns, ld;
};

// to[j][i] = from[i][j] in squares of kLanes.
template <class Element>
void turn_over(const Matrix& m, const Element* from, Element* to, int64_t ld_to) {
  constexpr int64_t strip = 4 * kLanes;  // so that each row is read in whole cache lines
  for (int64_t first = 0; first < m.columns; first += strip) {
    const int64_t end = std::min(first + strip, m.columns);
    for (int64_t i = 0; i < m.rows; i += kLanes) {
      const int high = static_cast<int>(std::min<int64_t>(kLanes, m.rows - i));
      for (int64_t j = first; j < end; j += kLanes) {
        const int wide = static_cast<int>(std::min<int64_t>(kLanes, end - j));
        const Element* at = from + i * m.ld + j;
        vec square[kLanes];
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; r++)
          square[r] = r >= high         ? vec{}
                      : wide == kLanes ? load_floats(at + r * m.ld)
                                       : load_floats_first(at + r * m.ld, wide);
        transpose(square);
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; r++) {
          if (r >= wide) continue;
          Element* const line = to + (j + r) * ld_to + i;
          if (high == kLanes)
            store_floats(line, square[r]);
          else
            store_floats_first(line, square[r], high);
        }
      }
    }
  }
}

}  // namespace kd
