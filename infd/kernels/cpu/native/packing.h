// The rows of a matrix in panels: where packing stores them, and how they are looked up, in parallel.

#pragma once

#include "panels.h"

namespace {

// Call store(from, to) for the outputs of each panel among [first, first + count).
template <class Store>
void each_panel(int64_t first, int64_t count, const Store& store) {
  const int64_t end = first + count;
#pragma omp parallel for schedule(dynamic)
  for (int64_t panel = first / PANEL; panel < panels_of(end); panel++)
    store(panel * PANEL > first ? panel * PANEL : first, (panel + 1) * PANEL < end ? (panel + 1) * PANEL : end);
}

// Call look_up(output, row) for each of the outputs [count], and for the row of `out` [count, inputs] that it fills. A row is
// NaN for an index out of range.
template <class Number, class LookUp>
void each_row(Number* out, int64_t inputs, int64_t outputs, const int64_t* rows, int64_t count, const LookUp& look_up) {
#pragma omp parallel for if (count > 8)
  for (int64_t i = 0; i < count; i++) {
    Number* row = out + i * inputs;
    if (rows[i] < 0 || rows[i] >= outputs)
      memset(row, 0xff, inputs * sizeof(Number));
    else
      look_up(rows[i], row);
  }
}

}  // namespace
