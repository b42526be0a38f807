// Softmax of rows in tiles, and of rows computed as in tiles.
//
// A row's weights are relative to its base: its largest score in the first block of which it sees a key. The base is
// raised only when the sum of weights exceeds MOST_TOTAL, for a common factor changes the precision neither of bfloat16
// nor of float. So most blocks need no maximum, and sums are hardly ever rescaled. The total is that of weights as rounded
// to bfloat16, so that a weight which outweighs all others is exact. Whether a base is raised depends on its row alone:
// neither the tile nor the other queries of the piece change a bit of a row's result.

#pragma once

#include "softmax.h"

namespace {

// Where tiles do not exist.
template <class Number, class Cached, class Form>
struct RowOfTile {
  static constexpr bool EXISTS = false;

  static void weigh(float*, int64_t, int64_t, float, SoftmaxState&, uint32_t*, float*, int64_t) {}
};

#if defined(__AVX512BF16__)

constexpr int VECTORS = BLOCK / WIDTH;
constexpr int UNITS = BLOCK / Pairs::PER_UNIT;
constexpr float MOST_TOTAL = 1 << 20;  // of weights, in a lane
constexpr float LEAST_RAISE = 16;      // of a base: a total above MOST_TOTAL stays far above 0

// 2^x, with a relative error below 8e-5, a twentieth of bfloat16's; 0 below -150; NaN for NaN. The polynomial is the best
// approximation of 2^f for 0 <= f <= 1. Vectors are computed side by side: after one another, each would wait for its own results.
template <int N>
[[gnu::always_inline]] inline void rough_powers_of_two(Vec* x) {
  Vec f[N], p[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) f[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) p[i] = fma(set(7.8024551e-2f), f[i], set(2.2606719e-1f));
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) p[i] = fma(p[i], f[i], set(6.9583350e-1f));
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) p[i] = fma(p[i], f[i], set(9.9992526e-1f));
#pragma GCC unroll 4
  for (int i = 0; i < N; i++) x[i] = _mm512_scalef_ps(p[i], x[i]);  // p * 2^floor(x)
}

inline __mmask16 over(Vec total) { return _mm512_cmp_ps_mask(total, set(MOST_TOTAL), _CMP_NLT_UQ); }  // also NaN

// The largest of V vectors of products, as a score.
template <int V>
float largest_score(const Vec* products, float factor) {
  Vec most = set(-INFINITY);
  for (int v = 0; v < V; v++) most = max(products[v] * set(factor), most);
  return largest(most);
}

// Convert V vectors of a block's products q·k to weights. Return `total` plus the weights.
template <int V>
[[gnu::always_inline]] inline Vec weigh_products(const Vec* products, float factor, float base, Vec total, uint32_t* weights) {
  const Vec less = set(-base), ones = _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80));
#if defined(__AMX_BF16__)
  constexpr int ABREAST = V;
#else
  constexpr int ABREAST = V < 2 ? V : 2;  // the scores of a tile take the other registers
#endif
#pragma GCC unroll 4
  for (int first = 0; first < V; first += ABREAST) {
    Vec x[ABREAST];
#pragma GCC unroll 4
    for (int v = 0; v < ABREAST; v++) x[v] = first + v < V ? fma(products[first + v], set(factor), less) : set(0);
    rough_powers_of_two<ABREAST>(x);
#pragma GCC unroll 4
    for (int v = 0; v < ABREAST; v += 2) {
      const bool paired = first + v + 1 < V;
      const Vec rounded = Pairs::joined(x[v], paired ? x[v + 1] : set(0));
      total = Pairs::multiply_add(rounded, ones, total);
      store(reinterpret_cast<float*>(weights + (first + v) * WIDTH / 2), rounded);
    }
  }
  return total;
}

// Convert V vectors of products of a row in a tile to weights, and add the weights to `totals`, by lane. Set the row's base if it
// has none; rescale its sums [width] if its base has to be raised.
template <int V>
[[gnu::always_inline]] inline void weigh_row(const Vec* products, float factor, float& base, float* totals, uint32_t* weights,
                                             float* sums, int64_t width) {
  if (base == -INFINITY) base = largest_score<V>(products, factor);
  const Vec before = load(totals);
  Vec total = weigh_products<V>(products, factor, base > -INFINITY ? base : 0, before, weights);
  if (__builtin_expect(over(total) != 0, false)) {
    const float largest_now = largest_score<V>(products, factor), least = base + LEAST_RAISE;
    const float raised = largest_now > least ? largest_now : least;
    const Vec shrink = power_of_two(set(base - raised));
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + d, load(sums + d) * shrink);
    base = raised;
    total = weigh_products<V>(products, factor, base, before * shrink, weights);
  }
  store(totals, total);
}

// The weights of a row that is in no tile, as in one: relative to the same base, by the same exponential, rounded before
// they are summed. So a query has nearly the same result alone and beside others.
template <>
struct RowOfTile<bf16, bf16, Pairs> {
  static constexpr bool EXISTS = true;

  // Convert a row's products q·k with a block to weights; keys outside [first, last) are masked. Rescale the row's sums
  // [width] if its base, `seen.largest`, is raised.
  static void weigh(float* products, int64_t first, int64_t last, float factor, SoftmaxState& seen, uint32_t* weights,
                    float* sums, int64_t width) {
    for (int64_t i = 0; i < first; i++) products[i] = -INFINITY;
    for (int64_t i = last; i < BLOCK; i++) products[i] = -INFINITY;
    Vec x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = load(products + v * WIDTH);
    if (seen.largest == -INFINITY) seen.largest = largest_score<VECTORS>(x, factor);
    const float base = seen.largest > -INFINITY ? seen.largest : 0;
    const float total = seen.total + sum(weigh_products<VECTORS>(x, factor, base, set(0), weights));
    if (total < MOST_TOTAL) {
      seen.total = total;
      return;
    }
    const float largest_now = largest_score<VECTORS>(x, factor), least = base + LEAST_RAISE;
    seen.largest = largest_now > least ? largest_now : least;
    const Vec shrink = power_of_two(set(base - seen.largest));
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + d, load(sums + d) * shrink);
    seen.total = seen.total * first_of(shrink) + sum(weigh_products<VECTORS>(x, factor, seen.largest, set(0), weights));
  }
};

#endif

}  // namespace
