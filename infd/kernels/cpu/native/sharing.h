// Decide whether to wake other threads. Waking takes microseconds, tens of them if the threads sleep, and milliseconds if other
// processes use the cores; work of less than about 70 microseconds runs on one thread.

#pragma once

#include <stdint.h>

namespace {

// For a product with a weight matrix.
inline bool worth_sharing(int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t weights = outputs * inputs;
  return weights > 1 << 20 || rows * weights > 1 << 23;
}

// For attention, given its multiplications: the threshold is lower if a product has just woken the threads.
inline bool worth_sharing(int64_t products, bool awake) { return products > (awake ? 1 << 17 : 1 << 20); }

}  // namespace
