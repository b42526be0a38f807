// Products with weights of which several groups of 32 inputs share a scale, with VNNI.
//
// The groups of a step are summed with the scales of their inputs; the sum is multiplied by the scale of the weights. So a group
// takes one multiplication of floats, not two, on the ports that multiply integers.

#pragma once

#include "grouped_many.h"

namespace {

template <class Kind, int ROWS, int VECTORS>
struct SharedScales {
  static constexpr int64_t PAIRS = GROUP / 8;
  static constexpr bool STAYS = 2 * ROWS * VECTORS <= 24;  // whether a step's sums stay in registers, beside those of a group
  using Inputs = typename Kind::GroupInputs;

  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    // For one row or two, lifting weights takes more instructions than it saves. Integer sums are the same.
    if constexpr (Kind::LIFTABLE && ROWS > 2) {
      if (x.layout.zeros) return run<true>(x, stretch, sums, ahead);
    }
    run<false>(x, stretch, sums, ahead);
  }

 private:
  template <bool LIFTS>
  APART static void run(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    const Layout layout = x.layout;
    const int64_t length = x.step();
    alignas(64) float kept[STAYS ? 1 : ROWS * VECTORS][WIDTH];
    if (stretch.header != nullptr) memset(sums, 0, ROWS * PANEL * sizeof *sums);
    const Inputs* inputs = x.inputs;
    const uint32_t* step = stretch.words;
    Near near(x);
    for (int64_t at = 0; at < stretch.steps; at++, step += length, inputs += layout.groups * x.rows) {
      near.next = step + length;
      for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
        Ints lift[VECTORS];
        Vec own[STAYS ? ROWS : 1][VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
          lift[j] = LIFTS ? x.lift(step, 0, 0, first + j * WIDTH) : no_ints();
          if constexpr (STAYS)
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) own[i][j] = set(0.0f);
        }
        const Inputs* of_group = inputs;
        for (int64_t group = 0; group < layout.groups; group++, of_group += x.rows) {
          if (first == 0) ahead.fetch();
          if constexpr (VECTORS == 2) near.fetch();
          Ints sum[ROWS][VECTORS];
          add_group<LIFTS>(x, step, group, first, of_group, lift, sum);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) {
              const Vec scale = set(of_group[i].scale);
              if constexpr (STAYS) {
                own[i][j] = fma(floats(sum[i][j]), scale, own[i][j]);
              } else {
                float* to = kept[i * VECTORS + j];
                store(to, fma(floats(sum[i][j]), scale, group ? load(to) : set(0.0f)));
              }
            }
        }
        if (layout.minima) add_minima(x, step, first, inputs, sums);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
          const Vec scale = x.load_scales(step, 0, 0, first + j * WIDTH);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++) {
            float* to = sums + i * PANEL + first + j * WIDTH;
            if constexpr (STAYS)
              store(to, fma(own[i][j], scale, load(to)));
            else
              store(to, fma(load(kept[i * VECTORS + j]), scale, load(to)));
          }
        }
      }
    }
  }

  // Add the minima of a step times the sums of its inputs.
  static void add_minima(const Kind& x, const uint32_t* step, int64_t first, const Inputs* inputs, float* sums) {
    for (int i = 0; i < ROWS; i++) {
      float total = 0;
      for (int64_t group = 0; group < x.layout.groups; group++) total += inputs[group * x.rows + i].scaled_totals[0];
      for (int64_t column = first; column < first + VECTORS * WIDTH; column += WIDTH) {
        float* to = sums + i * PANEL + column;
        store(to, fma(x.load_minima(step, 0, 0, column), set(total), load(to)));
      }
    }
  }

  template <bool LIFTS>
  INLINE static void add_group(const Kind& x, const uint32_t* step, int64_t group, int64_t column, const Inputs* inputs,
                               const Ints (&lift)[VECTORS], Ints (&sum)[ROWS][VECTORS]) {
    const uint32_t* lines = x.lines(step, group);
    start<LIFTS>(x, step, group, 0, column, inputs, sum);
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < PAIRS; pair += Kind::TURN / 2) {
      settle(sum);
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
    settle(sum);
  }
};

}  // namespace
