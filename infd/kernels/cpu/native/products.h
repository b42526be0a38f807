// Products with a matrix in panels, whatever its numbers are: how the work is cut and in which order it is done.
//
// Rows are computed in groups, a panel of outputs at a time: a group's sums stay in registers while its panel passes
// by. A panel is read from memory once and from the cache after that; where there are several groups, each pass fetches
// a part of the next panel, so that memory and arithmetic keep each other company. A single group is one plain stream,
// which the CPU foresees better than we do; so is the first of two where few rows are left for the second.
//
// Each number is one chain of sums along the inputs, in their order. Neither the number of rows nor that of threads,
// nor what stands in other rows, changes a bit of it.
//
// A Kind says what the words of a step are and how they are multiplied:
//
//   STEP                     words of a step along the inputs: a line of a panel, or more
//   Weights, Input           a vector of words; a word for every lane
//   weights, input, add      load the one, spread the other, add their products to the sums of 32 bits
//   HEADER                   words of a panel before its first step
//   start(header)            what sums begin with
//   x.word(row, at)          the word that multiplies step `at`, and x.from(row, at) the rows and steps from there on
//   x.HALVES, x.half_word    whether the last word may be half a one, read by itself because it is the last of its row
//   x.value(sums, row, header)   the numbers that sums stand for
//
// That is for steps of one line. A kind whose steps are more says itself how a Group of rows is multiplied.

#pragma once

#include "panels.h"
#include "sharing.h"
#include "vector.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;
template <int ROWS>
constexpr int ABREAST = 4;  // vectors of outputs: 24 sums leave room for 4 vectors of weights
#else
constexpr int MOST_ROWS = 2;
template <int ROWS>
constexpr int ABREAST = ROWS == 1 ? 8 : 4;
#endif

constexpr int64_t LOOK = 1 << 9;         // words between two looks at what to fetch
constexpr int64_t CACHE_LINE = 16;       // words
constexpr int64_t MOST_WORDS = 1 << 16;  // of a panel in one go: 256 KiB, which stay in the second cache beside the rows
constexpr int64_t TWO_WORDS = 1 << 14;   // for two groups: the second follows while what the first has read is still near
constexpr int64_t MOST_TOGETHER = 240;   // rows whose sums are kept from one stretch of inputs to the next

// Rows of a second group that take little time beside what the first reads. int4 is held up by arithmetic instead.
template <class Kind>
constexpr int64_t FEW_MORE = Kind::STEP == PANEL ? MOST_ROWS / 3 : 0;

template <class Kind>
constexpr int64_t STEPS_OF_A_LOOK = LOOK > Kind::STEP ? LOOK / Kind::STEP : 1;

// What is to be fetched meanwhile: `lines` cache lines at every look.
struct Ahead {
  const char* next;
  int64_t lines;

  void fetch() {
    for (int64_t line = 0; line < lines; line++) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    next += lines * 64;
  }
};

// Some steps of a panel, the last of them with half an input word if `half`.
struct Stretch {
  const uint32_t* words;
  int64_t steps;
  bool half;
  const uint32_t* header;  // of the panel, where sums are to begin; null where they go on
};

// Rows that are multiplied together. sums [ROWS, PANEL] (+)= rows times a stretch of a panel.
template <class Kind, int ROWS>
struct Group {
  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Ahead ahead);
};

template <class Kind, int ROWS>
void Group<Kind, ROWS>::multiply(const Kind& x, const Stretch& stretch, float* sums, Ahead ahead) {
  static_assert(Kind::STEP == PANEL);
  constexpr int VECTORS = ABREAST<ROWS>;
  for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
    const uint32_t* words = stretch.words + first;
    Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++)
        sum[i][j] = stretch.header ? Kind::start(stretch.header + first + j * WIDTH)
                                   : load(sums + i * PANEL + first + j * WIDTH);

    for (int64_t at = 0; at < stretch.steps;) {
      if (first == 0) ahead.fetch();
      const int64_t next = at + STEPS_OF_A_LOOK<Kind>, end = next < stretch.steps ? next : stretch.steps;
      for (; at < end; at++) {
        typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) w[j] = Kind::weights(words + at * PANEL + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const typename Kind::Input input = Kind::input(x.word(i, at));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = Kind::add(sum[i][j], w[j], input);
        }
      }
    }
    if constexpr (Kind::HALVES) {
      if (stretch.half) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const typename Kind::Input input = Kind::input(x.half_word(i, stretch.steps));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++)
            sum[i][j] = Kind::add(sum[i][j], Kind::weights(words + stretch.steps * PANEL + j * WIDTH), input);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + first + j * WIDTH, sum[i][j]);
  }
}

template <class Kind>
using Multiply = void (*)(const Kind&, const Stretch&, float*, Ahead);

template <class Kind>
Multiply<Kind> multiply_rows(int64_t rows) {
#if defined(__AVX512F__)
  static constexpr Multiply<Kind> of[] = {Group<Kind, 1>::multiply, Group<Kind, 2>::multiply, Group<Kind, 3>::multiply,
                                          Group<Kind, 4>::multiply, Group<Kind, 5>::multiply, Group<Kind, 6>::multiply};
#else
  static constexpr Multiply<Kind> of[] = {Group<Kind, 1>::multiply, Group<Kind, 2>::multiply};
#endif
  return of[rows - 1];
}

// What is added to every row [outputs], if anything.
struct Bias {
  const bf16* narrow = nullptr;
  const float* wide = nullptr;

  Bias(const bf16* bias) : narrow(bias) {}
  Bias(const float* bias) : wide(bias) {}
};

// One product. Everything is checked by the caller.
template <class Kind>
struct Product {
  Kind x;
  int64_t rows;
  const uint32_t* weights;
  int64_t outputs;
  int64_t steps;  // of a panel, a last half one included
  bool half;
  Bias bias;
  void* out;  // [rows, outputs] of float or bfloat16, rows `stride` numbers apart
  int64_t stride;
  bool wide;  // out is float

  const uint32_t* panel(int64_t number) const { return weights + number * (Kind::HEADER + steps * Kind::STEP); }

  // Round sums [count, PANEL], of rows from `row` on and the panel from output `first` on, into place.
  void finish(const float* sums, int64_t row, int64_t count, int64_t first, const uint32_t* header) const {
    const int64_t columns = outputs - first < PANEL ? outputs - first : PANEL;
    float added[PANEL] = {};
    if (bias.narrow) convert(bias.narrow + first, added, columns);
    if (bias.wide) convert(bias.wide + first, added, columns);
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = (row + i) * stride + first;
      if (wide)
        put(sums + i * PANEL, row + i, header, added, static_cast<float*>(out) + at, columns);
      else
        put(sums + i * PANEL, row + i, header, added, static_cast<bf16*>(out) + at, columns);
    }
  }

  template <class Number>
  void put(const float* sums, int64_t row, const uint32_t* header, const float* added, Number* to, int64_t columns) const {
    Number rounded[PANEL];
    Number* whole = columns == PANEL ? to : rounded;
    for (int64_t j = 0; j < PANEL; j += WIDTH) store(whole + j, x.value(load(sums + j), row, header + j) + load(added + j));
    if (columns < PANEL) memcpy(to, rounded, columns * sizeof(Number));
  }
};

// Compute rows [row, row + count) of one panel, fetching the panel that follows if there is one to come.
template <class Kind>
void compute(const Product<Kind>& p, int64_t panel, int64_t row, int64_t count, bool more) {
  const int64_t groups = (count + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t most = (groups == 2 ? TWO_WORDS : MOST_WORDS) / Kind::STEP;
  const int64_t stretches = (p.steps + most - 1) / most;
  const int64_t look = STEPS_OF_A_LOOK<Kind> * Kind::STEP / CACHE_LINE;
  const bool plain = count <= MOST_ROWS + FEW_MORE<Kind>;
  const int64_t lines = plain ? 0 : (look + groups - 1) / groups;
  const auto bound = [&](int64_t group) {
    if (!plain) return count * group / groups;
    return group < groups ? group * MOST_ROWS : count;
  };
  const uint32_t *header = p.panel(panel), *words = header + Kind::HEADER;
  alignas(64) float sums[MOST_TOGETHER * PANEL];

  for (int64_t stretch = 0; stretch < stretches; stretch++) {
    const int64_t first = p.steps * stretch / stretches, last = p.steps * (stretch + 1) / stretches;
    const bool ends = stretch + 1 == stretches, half = ends && p.half;
    const Stretch part = {words + first * Kind::STEP, last - first - half, half, stretch ? nullptr : header};
    const char* next = reinterpret_cast<const char*>(words + last * Kind::STEP);  // the next stretch, or the next panel
    for (int64_t group = 0; group < groups; group++) {
      const int64_t from = bound(group), rows = bound(group + 1) - from;
      float* own = sums + (stretches > 1 ? from * PANEL : 0);
      const int64_t share = (last - first) * Kind::STEP * sizeof(uint32_t) / groups / 64 * 64;
      const Ahead ahead = {next + group * share, more || !ends ? lines : 0};
      multiply_rows<Kind>(rows)(p.x.from(row + from, first), part, own, ahead);
      if (ends) p.finish(own, row + from, rows, panel * PANEL, header);
    }
  }
}

// A product's tasks, in a run for each thread, so that each reads one stream. Who has come to the end of its own goes on
// with those of others, which something else may keep from computing.
template <class Kind>
struct Division {
  static constexpr int64_t MOST_RUNS = 128;
  struct alignas(64) Run {
    int64_t next, end;
  };

  const Product<Kind>& product;
  int64_t parts, runs;
  Run run[MOST_RUNS];

  Division(const Product<Kind>& product, bool shared) : product(product) {
    const int64_t threads = shared ? omp_get_max_threads() : 1;
    const int64_t panels = panels_of(product.outputs), rows = product.rows;
    // Where panels are too few for the threads, rows are divided as well.
    parts = (rows + MOST_TOGETHER - 1) / MOST_TOGETHER;
    while (panels * parts < 4 * threads && rows / (parts + 1) >= 4 * MOST_ROWS) parts++;
    runs = threads < MOST_RUNS ? threads : MOST_RUNS;
    for (int64_t i = 0; i < runs; i++) run[i] = {panels * parts * i / runs, panels * parts * (i + 1) / runs};
  }

  // Every thread of the team calls this.
  void compute_share() {
    const int64_t own = omp_get_thread_num();
    for (int64_t i = own; i < own + runs; i++) {
      Run& from = run[i % runs];
      int64_t task;
      while ((task = __atomic_fetch_add(&from.next, 1, __ATOMIC_RELAXED)) < from.end) compute_task(task, task + 1 < from.end);
    }
  }

  void compute_task(int64_t task, bool more) const {
    const int64_t panel = task / parts, part = task % parts;
    const int64_t from = product.rows * part / parts;
    compute(product, panel, from, product.rows * (part + 1) / parts - from, more && part + 1 == parts);
  }
};

}  // namespace
