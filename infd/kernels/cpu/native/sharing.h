// When other threads are to be woken. That takes some microseconds, tens of them where they have gone to sleep, and
// milliseconds where others want the cores; one thread computes alone what takes it less than about 70.

#pragma once

#include <stdint.h>

namespace {

// For a product with a matrix of weights.
inline bool worth_sharing(int64_t rows, int64_t outputs, int64_t inputs) {
  const int64_t weights = outputs * inputs;
  return weights > 1 << 20 || rows * weights > 1 << 23;
}

// For attention, which reads a key for so many products: less is enough where a product has just woken them.
inline bool worth_sharing(int64_t products, bool awake) { return products > (awake ? 1 << 17 : 1 << 20); }

}  // namespace
