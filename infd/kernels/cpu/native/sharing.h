// Decide whether to wake other threads. Waking them takes microseconds, tens of microseconds if they sleep,
// milliseconds if other processes use the cores. So work of less than about 70 microseconds runs on one thread.

#pragma once

#include <stdint.h>

// The work of threads before and after a product.
struct Neighbors {
  int64_t awake;                          // the other threads have just run, and still wait without sleeping
  const void* next_weights;               // panels of the matrix that the same threads multiply next; null: none, or unknown
  int64_t next_panels, next_panel_bytes;  // bytes: from one panel to the next
};

namespace {

// The weights that a row multiplies in about 70 microseconds.
#if defined(__AVX512F__)
constexpr int64_t ENOUGH_WEIGHTS = 1 << 20;
#else
constexpr int64_t ENOUGH_WEIGHTS = 1 << 18;
#endif

// Return whether to divide a product with a weight matrix among threads. awake: other threads have just run, and still
// wait without sleeping.
inline bool worth_sharing(int64_t rows, int64_t outputs, int64_t inputs, bool awake) {
  const int64_t weights = outputs * inputs;
  if (awake) return rows * weights > ENOUGH_WEIGHTS / 4;
  return weights > ENOUGH_WEIGHTS || rows * weights > 8 * ENOUGH_WEIGHTS;
}

// neighbors: of the product; null: the other threads may sleep
inline bool worth_sharing(int64_t rows, int64_t outputs, int64_t inputs, const Neighbors* neighbors) {
  return worth_sharing(rows, outputs, inputs, neighbors != nullptr && neighbors->awake);
}

// Return whether to divide attention among threads, given its number of multiplications.
inline bool worth_sharing(int64_t products, bool awake) { return products > (awake ? 1 << 17 : 1 << 20); }

// The number of elements above which threads share norms, rotations and activations.
inline int64_t enough_elements(bool awake) { return awake ? 1 << 13 : 1 << 14; }

}  // namespace
