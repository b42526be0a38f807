// The products of attention for tasks with many rows, over a block's placed keys and values.

#pragma once

#include "operands.h"

namespace {

// c [R, V vectors] = a [R, steps units] times b [steps units, V vectors], added to c if ADD.
template <class Form, bool ADD, int R, int V>
void multiply_panel(Units a, Units b, Matrix<float> c, int64_t steps) {
  Vec sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = ADD ? load(c.row(r) + v * WIDTH) : set(0);
  for (int64_t step = 0; step < steps; step++) {
    Vec right[V];
    for (int v = 0; v < V; v++) right[v] = load_units(b.row(step) + v * WIDTH);
    for (int r = 0; r < R; r++) {
      const Vec left = repeat_unit(a.row(r) + step);
      for (int v = 0; v < V; v++) sums[r][v] = Form::multiply_add(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c.row(r) + v * WIDTH, sums[r][v]);
}

// Like multiply_panel, for any number of rows.
template <class Form, bool ADD, int V>
void multiply_columns(Units a, Units b, Matrix<float> c, int64_t rows, int64_t steps) {
  constexpr int MOST = 6;
  int64_t r = 0;
  for (; r + MOST <= rows; r += MOST)
    multiply_panel<Form, ADD, MOST, V>(a.from(r), b, c.from(r), steps);
  a = a.from(r), c = c.from(r);
  switch (rows - r) {
    case 1: return multiply_panel<Form, ADD, 1, V>(a, b, c, steps);
    case 2: return multiply_panel<Form, ADD, 2, V>(a, b, c, steps);
    case 3: return multiply_panel<Form, ADD, 3, V>(a, b, c, steps);
    case 4: return multiply_panel<Form, ADD, 4, V>(a, b, c, steps);
    case 5: return multiply_panel<Form, ADD, 5, V>(a, b, c, steps);
  }
}

// c [rows, columns] = a [rows, steps units] times b [steps units, columns], added to c if ADD; columns is a multiple of
// WIDTH.
template <class Form, bool ADD>
void multiply(Units a, Units b, Matrix<float> c, int64_t rows, int64_t columns, int64_t steps) {
  constexpr int MOST = WIDTH == 16 ? 4 : 2;  // with six rows, sums and operands fit the vector registers
  int64_t column = 0;
  for (; column + MOST * WIDTH <= columns; column += MOST * WIDTH)
    multiply_columns<Form, ADD, MOST>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
  // One vector of columns at a time is bound by loads of `a`.
  if (MOST > 2 && column + 2 * WIDTH <= columns) {
    multiply_columns<Form, ADD, 2>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
    column += 2 * WIDTH;
  }
  for (; column < columns; column += WIDTH)
    multiply_columns<Form, ADD, 1>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
}

}  // namespace
