// Products of many rows with weights in groups.

#pragma once

#include "grouped.h"

namespace {

// Whether a row's sums stay in registers over a stretch, beside those of a group.
template <int ROWS>
constexpr bool SUMS_STAY = !SPLITS && ROWS > 4;

// A prefetch stream into L1 for a single group of rows: the lines of the next block of a panel. Each half of the outputs fetches
// half of them. Of integers of eight bits, two blocks would be too large for L1.
struct Near {
  const uint32_t* next = nullptr;
  int64_t lines;  // a group of inputs; 0: several groups of rows read the panel

  template <Stored STORED, int PARTS>
  explicit Near(const Grouped<STORED, PARTS>& x)
      : lines(x.rows > MOST_ROWS || STORED == BYTES ? 0 : x.step() / (2 * CACHE_LINE * x.layout.groups) + 1) {}
  void fetch() {
    for (int64_t line = 0; line < lines; line++, next += CACHE_LINE) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
  }
};

constexpr int64_t BLOCK_GROUPS = 4;  // groups of inputs that a single group of rows multiplies with half the outputs at a time

// Multiplies ROWS rows, two vectors of outputs after the other two.
template <class Kind, int ROWS>
struct ManyRows;

template <Stored STORED, int PARTS, int ROWS>
struct ManyRows<Grouped<STORED, PARTS>, ROWS> {
  using Kind = Grouped<STORED, PARTS>;
  static constexpr int VECTORS = 2;
  static constexpr int64_t PAIRS = GROUP / 8 / PARTS;

  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    if constexpr (Kind::LIFTABLE) {
      if (x.layout.zeros) return run<true>(x, stretch, sums, ahead);
    }
    run<false>(x, stretch, sums, ahead);
  }

 private:
  template <bool LIFTS>
  APART static void run(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    const Layout layout = x.layout;
    const int64_t length = x.step();
    Near near(x);
    const int64_t block = near.lines ? (BLOCK_GROUPS + layout.groups - 1) / layout.groups : stretch.steps;
    for (int64_t begin = 0; begin < stretch.steps; begin += block) {
      const int64_t end = begin + block < stretch.steps ? begin + block : stretch.steps;
      near.next = stretch.words + end * length;
      for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
        Vec own[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++)
            own[i][j] = begin == 0 && stretch.header != nullptr ? set(0.0f) : load(sums + i * PANEL + first + j * WIDTH);
        const typename Kind::GroupInputs* inputs = x.inputs + begin * layout.groups * x.rows;
        const uint32_t* step = stretch.words + begin * length;
        for (int64_t at = begin; at < end; at++, step += length)
          for (int64_t group = 0; group < layout.groups; group++, inputs += x.rows) {
            if (first == 0) ahead.fetch();
            near.fetch();
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) add_part<LIFTS>(x, step, group, part, first, inputs, own);
          }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + first + j * WIDTH, own[i][j]);
      }
    }
  }

  template <bool LIFTS>
  INLINE static void add_part(const Kind& x, const uint32_t* step, int64_t group, int64_t part, int64_t column,
                              const typename Kind::GroupInputs* inputs, Vec (&own)[ROWS][VECTORS]) {
    const uint32_t* lines = x.lines(step, group);
    Ints sum[ROWS][VECTORS];
    Ints lift[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) lift[j] = LIFTS ? x.lift(step, group, part, column + j * WIDTH) : no_ints();
    start<LIFTS>(x, step, group, part, column, inputs, sum);
#pragma GCC unroll 4
    for (int64_t pair = PAIRS * part; pair < PAIRS * (part + 1); pair += Kind::TURN / 2) {
      add_quad<0, LIFTS>(x, lines, pair, column, inputs, lift, sum);
      settle(sum);
      add_quad<1, LIFTS>(x, lines, pair, column, inputs, lift, sum);
      if constexpr (Kind::TURN == 4) {
        settle(sum);
        add_quad<2, LIFTS>(x, lines, pair, column, inputs, lift, sum);
        settle(sum);
        add_quad<3, LIFTS>(x, lines, pair, column, inputs, lift, sum);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
      const Vec scale = x.load_scales(step, group, part, column + j * WIDTH);
      const Vec minimum = x.layout.minima ? x.load_minima(step, group, part, column + j * WIDTH) : set(0.0f);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        if (x.layout.minima) own[i][j] = fma(minimum, set(inputs[i].scaled_totals[part]), own[i][j]);
        own[i][j] = fma(floats(sum[i][j]), scale * set(inputs[i].scale), own[i][j]);
      }
    }
  }
};

template <Stored STORED, int PARTS>
constexpr int64_t ROWS_OF_A_GROUP<Grouped<STORED, PARTS>> = HOLDS_WEIGHTS ? BLOCK_ROWS : MOST_ROWS;

template <Stored STORED, int PARTS>
struct RowByRow<Grouped<STORED, PARTS>> {
  using Kind = Grouped<STORED, PARTS>;
  using Input = typename Kind::GroupInputs;
  static constexpr int QUADS = GROUP / 4 / PARTS;
  static constexpr int HELD = Kind::WIDE && QUADS > 4 ? 4 : QUADS;  // quads of weights in registers
  static constexpr int BEFORE = QUADS - HELD;

  static void multiply(const Kind& x, const Stretch& stretch, int64_t rows, float* sums, Prefetch ahead) {
    if (stretch.header != nullptr) memset(sums, 0, rows * PANEL * sizeof *sums);
    const bool zeros = x.layout.zeros || x.layout.least();
    const auto chosen = x.layout.minima ? zeros ? add<true, true> : add<false, true> : zeros ? add<true, false> : add<false, false>;
    for (int64_t at = 0; at < stretch.steps; at++)
      for (int64_t group = 0; group < x.layout.groups; group++) {
        ahead.fetch();
        chosen(x, stretch, stretch.words + at * x.step(), group, x.inputs + (at * x.layout.groups + group) * x.rows, rows, sums);
      }
  }

 private:
  // Add the products of a group.
  template <bool ZEROS, bool MINIMA>
  static void add(const Kind& x, const Stretch& stretch, const uint32_t* step, int64_t group, const Input* inputs, int64_t rows, float* sums) {
    const Layout& layout = x.layout;
    const uint32_t* lines = x.lines(step, group);
    alignas(32) uint32_t partial[BEFORE ? ROWS_OF_A_GROUP<Kind> : 1][WIDTH];
    for (int64_t first = stretch.begin; first < stretch.end; first += WIDTH) {
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        typename Kind::Weights held[HELD];
        const int from = QUADS * part;
        if constexpr (BEFORE > 0) {
          hold(x, lines, from, first, held);
          for (int64_t i = 0; i < rows; i++) put_words(partial[i], products(held, inputs[i], from));
        }
        hold(x, lines, from + BEFORE, first, held);
        const int64_t set = layout.set_of(group, part);
        const Vec scale = layout.load_scales(step, set, first);
        const Vec minimum = MINIMA ? layout.load_minima(step, set, first) : ::set(0.0f);
        const Ints zero = layout.zeros ? x.zeros(step, group, part, first) : ints(-layout.least());
        float* own = sums + first;
        for (const Input* input = inputs; input < inputs + rows; input++, own += PANEL) {
          Ints sum = products(held, *input, from + BEFORE);
          if constexpr (BEFORE > 0) sum = plus(sum, words_at(partial[input - inputs]));
          if constexpr (ZEROS) sum = plus(sum, small_products(zero, ints(-input->totals[part])));
          Vec before = load(own);
          if constexpr (MINIMA) before = fma(minimum, ::set(input->scaled_totals[part]), before);
          store(own, fma(floats(sum), scale * ::set(input->scale), before));
        }
      }
    }
  }

  static void hold(const Kind& x, const uint32_t* lines, int64_t from, int64_t column, typename Kind::Weights (&held)[HELD]) {
#pragma GCC unroll 8
    for (int quad = 0; quad < HELD; quad += Kind::TURN) {
      held[quad] = x.template weights<0>(lines, (from + quad) / 2, column);
      held[quad + 1] = x.template weights<1>(lines, (from + quad) / 2, column);
      if constexpr (Kind::TURN == 4) {
        held[quad + 2] = x.template weights<2>(lines, (from + quad) / 2, column);
        held[quad + 3] = x.template weights<3>(lines, (from + quad) / 2, column);
      }
    }
  }

  // The products of the held quads with those of a row from `from` on.
  static Ints products(const typename Kind::Weights (&held)[HELD], const Input& input, int64_t from) {
    constexpr int TOGETHER = !is_narrow(STORED) || HELD < quads_together(STORED) ? HELD : quads_together(STORED);
    Ints sum = no_ints();
#pragma GCC unroll 8
    for (int begin = 0; begin < HELD; begin += TOGETHER) {
      Ints some = no_ints();
#pragma GCC unroll 8
      for (int quad = begin; quad < begin + TOGETHER; quad++) some = add_products(some, held[quad], input.quad(from + quad));
      if constexpr (is_narrow(STORED)) some = pairs_of_words(some, ones());
      sum = begin ? plus(sum, some) : some;
    }
    return sum;
  }
};

}  // namespace
