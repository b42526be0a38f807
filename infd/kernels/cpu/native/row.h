// How a head of a token lies in the cache.
//
// As it is, or as int8: its scale, a float, then its numbers, in whole words.

#pragma once

#include "quantized.h"

namespace {

// How far two rows stand apart, in numbers.
template <class Cached>
constexpr int64_t row_size(int64_t size) {
  return size;
}
template <>
constexpr int64_t row_size<int8_t>(int64_t size) {
  return sizeof(float) + 4 * quads_of(size);
}

// Where in a row its numbers begin.
template <class Cached>
constexpr int64_t FIRST = 0;
template <>
constexpr int64_t FIRST<int8_t> = sizeof(float);

// By what the numbers of a row are multiplied, `row` being the first of them.
inline float scale_of_row(const int8_t* row) {
  float scale;
  memcpy(&scale, row - sizeof scale, sizeof scale);
  return scale;
}

template <class Number>
void put_row(const Number* x, int64_t size, Number* row) {
  memcpy(row, x, size * sizeof(Number));
}
template <class Number>
void put_row(const Number* x, int64_t size, int8_t* row) {
  const float scale = scale_of(x, size);
  memcpy(row, &scale, sizeof scale);
  quantize(x, size, scale, reinterpret_cast<uint8_t*>(row + sizeof scale), 0);
}

}  // namespace
