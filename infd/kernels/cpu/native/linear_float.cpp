// Products with a matrix of floats in panels, and packing; algorithm in products.h.

#include "packing.h"
#include "products.h"

namespace {

// A word is one input.
struct Floats {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = true, TILES = true, OPENS = false, HALVES = false;
  using Weights = Vec;
  using Input = Vec;

  const float* numbers;
  int64_t stride;

  static constexpr int64_t step() { return PANEL; }
  float word(int64_t row, int64_t at) const { return numbers[row * stride + at]; }
  Floats from(int64_t row, int64_t at) const { return {numbers + row * stride + at, stride}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }
  static Vec start(const uint32_t*) { return set(0.0f); }
  static Vec weights(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec input(float x) { return set(x); }
  static Vec add(Vec sums, const Vec& w, const Vec& x) { return fma(w, x, sums); }
};

}  // namespace

// out [rows, outputs] = x [rows, inputs] times the packed weights, transposed, plus bias.
INFD_KERNEL(multiply_float_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide, int64_t, const Neighbors* neighbors) {
  const Product<Floats> product = {{x, x_stride}, rows, weights, outputs, inputs, false, bias, out, out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Floats> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  division.compute_share();
}

// Store rows [count, inputs] as the outputs from `first` on.
INFD_KERNEL(pack_float_float)(uint32_t* weights, int64_t, int64_t inputs, const uint32_t* rows, int64_t first, int64_t count) {
#pragma omp parallel for schedule(dynamic, 8)
  for (int64_t i = 0; i < count; i++) {
    uint32_t* words = weights + (first + i) / PANEL * inputs * PANEL + (first + i) % PANEL;
    for (int64_t at = 0; at < inputs; at++) words[at * PANEL] = rows[i * inputs + at];
  }
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_float_float)
(uint32_t* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t) {
  each_row(out, inputs, outputs, rows, count, [&](int64_t output, uint32_t* row) {
    const uint32_t* words = weights + output / PANEL * inputs * PANEL + output % PANEL;
    for (int64_t at = 0; at < inputs; at++) row[at] = words[at * PANEL];
  });
}
