// The products of attention for tasks with few rows, which read the cache itself.

#pragma once

#include "key_block.h"

namespace {

// scores [R, WIDTH / R] = a [R, size in units] times the first WIDTH / R of `keys`.
template <class Number, class Form, int R>
void score_group(Units a, const Number* const* keys, int64_t size, float* scores, int64_t pitch) {
  constexpr int KEYS = WIDTH / R;
  constexpr int64_t SPAN = WIDTH * Form::PER_UNIT;  // elements in a vector
  Vec products[R * KEYS];
  for (Vec& product : products) product = set(0);
  const auto add = [&](int64_t unit, auto key) {
    Vec right[KEYS];
    for (int i = 0; i < KEYS; i++) right[i] = key(keys[i]);
    for (int r = 0; r < R; r++) {
      const Vec left = load_units(a.row(r) + unit);
      for (int i = 0; i < KEYS; i++) products[r * KEYS + i] = Form::multiply_add(left, right[i], products[r * KEYS + i]);
    }
  };
  int64_t d = 0;
  for (; d + SPAN <= size; d += SPAN) add(d / Form::PER_UNIT, [&](const Number* key) { return Form::along(key + d); });
  if (d < size) add(d / Form::PER_UNIT, [&](const Number* key) { return Form::along_first(key + d, size - d); });
  float sums[WIDTH];
  store(sums, sums_of(products));
  for (int r = 0; r < R; r++) memcpy(scores + r * pitch, sums + r * KEYS, KEYS * sizeof(float));
}

template <class Number, class Form, int R>
void score_rows(Units a, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t size, Matrix<float> scores) {
  for (int64_t first = 0; first < block.padded(); first += WIDTH / R) {
    ahead.fetch(first, WIDTH / R, size);
    score_group<Number, Form, R>(a, block.k + first, size, scores.at + first, scores.pitch);
  }
}

// sums [R, V vectors] from element d on += weights [R, block in units] times the values.
template <class Number, class Form, int R, int V>
void weigh_columns(Units weights, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t d, int64_t size,
                   Matrix<float> sums) {
  Vec kept[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) kept[r][v] = load(sums.row(r) + d + v * WIDTH);
  const bool whole = d + V * WIDTH <= size;
  for (int64_t i = 0; i < block.count; i += Form::PER_UNIT) {
    if (d == 0) ahead.fetch(i, Form::PER_UNIT, size);
    Vec values[V];
    for (int v = 0; v < V; v++) {
      const int64_t at = d + v * WIDTH;
      values[v] = whole ? Form::across(block.v + i, at) : Form::across_first(block.v + i, at, size - at);
    }
    for (int r = 0; r < R; r++) {
      const Vec weight = repeat_unit(weights.row(r) + i / Form::PER_UNIT);
      for (int v = 0; v < V; v++) kept[r][v] = Form::multiply_add(weight, values[v], kept[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums.row(r) + d + v * WIDTH, kept[r][v]);
}

template <class Number, class Form, int R>
void weigh_rows(Units weights, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t size, Matrix<float> sums) {
  // Only the first pass over the values prefetches, so with few passes prefetches are spread more evenly.
  constexpr int MOST = WIDTH == 16 ? (R <= 2 ? 8 : 4) : 2;
  int64_t d = 0;
  const auto weigh = [&](auto vectors) {
    constexpr int V = decltype(vectors)::value;
    for (; d + V * WIDTH <= size; d += V * WIDTH) weigh_columns<Number, Form, R, V>(weights, block, ahead, d, size, sums);
  };
  weigh(Constant<MOST>());
  // A sum waits for the one before: a single vector of each row would take several times as long.
  if (MOST > 4) weigh(Constant<4>());
  if (MOST > 2) weigh(Constant<2>());
  for (; d < size; d += WIDTH) weigh_columns<Number, Form, R, 1>(weights, block, ahead, d, size, sums);
}

// Call `act` for groups of 4, 2 and 1 rows, with the group's size as a Constant, and the group's first row.
template <class Act>
void by_groups(int64_t rows, Act act) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) act(Constant<4>(), row);
  if (row + 2 <= rows) act(Constant<2>(), row), row += 2;
  if (row < rows) act(Constant<1>(), row);
}

}  // namespace
