// Decide whether to wake other threads. Waking them takes microseconds, tens of microseconds if they sleep,
// milliseconds if other processes use the cores. So work of less than about 70 microseconds runs on one thread.
//
// A thread of a team that has divided the rows of a step (encoder.cpp) shares no kernel: it calls each for its own rows.

#pragma once

#include "kernel.h"

namespace {

inline bool in_team() { return omp_in_parallel() != 0; }

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
  if (in_team()) return false;
  if (awake) return rows * weights > ENOUGH_WEIGHTS / 4;
  return weights > ENOUGH_WEIGHTS || rows * weights > 8 * ENOUGH_WEIGHTS;
}

// Return whether to divide attention among threads, given its number of multiplications.
inline bool worth_sharing(int64_t products, bool awake) { return products > (awake ? 1 << 17 : 1 << 20); }

// The number of elements above which threads share norms, rotations and activations.
inline int64_t enough_elements(bool awake) { return in_team() ? INT64_MAX : awake ? 1 << 13 : 1 << 14; }

// Call work() on this thread, or on every thread if `shared`. (A parallel region of one thread takes a microsecond.)
template <class Work>
void on_threads(bool shared, Work work) {
  if (!shared) return work();
#pragma omp parallel
  work();
}

// Call act(i) for each i below `count`, on this thread, or divided among threads if `shared`.
template <class Act>
void for_each(int64_t count, bool shared, Act act) {
  on_threads(shared, [&] {
    const int64_t threads = shared ? omp_get_num_threads() : 1, thread = shared ? omp_get_thread_num() : 0;
    for (int64_t i = count * thread / threads, end = count * (thread + 1) / threads; i < end; i++) act(i);
  });
}

}  // namespace
