// Rows of the key-value cache. A row stores one head of one token: its elements unchanged, or quantized to int8.
//
// An int8 row is a scale, which is a float, then the elements, padded to a multiple of 4 bytes.

#pragma once

#include "quantized.h"

namespace {

// The stride between rows, in elements of type Cached.
template <class Cached>
constexpr int64_t row_size(int64_t size) {
  return size;
}
template <>
constexpr int64_t row_size<int8_t>(int64_t size) {
  return sizeof(float) + 4 * quads_of(size);
}

// The index of a row's first element, after the scale if there is a scale.
template <class Cached>
constexpr int64_t FIRST = 0;
template <>
constexpr int64_t FIRST<int8_t> = sizeof(float);

// The scale of a row, given the address of the row's first element.
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
