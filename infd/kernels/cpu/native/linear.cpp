// Products with a packed matrix of bfloat16 weights.
//
// Rows are computed in groups, a panel of outputs at a time: a group's sums stay in registers while its panel passes
// by. A panel is read from memory once and from the cache after that; where there are several groups, each pass fetches
// a part of the next panel, so that memory and arithmetic keep each other company. A single group is one plain stream,
// which the CPU foresees better than we do.
//
// Each number is one chain of float32 sums along the inputs, in their order. Neither the number of rows nor that of
// threads, nor what stands in other rows, changes a bit of it.

#include "packed.h"
#include "vector.h"

namespace {

#if defined(__AVX512F__)

constexpr int MOST_ROWS = 6;
template <int ROWS>
constexpr int ABREAST = 4;  // vectors of outputs: 24 sums leave room for 4 vectors of weights

#if defined(__AVX512BF16__)

using Weights = __m512bh;
using Input = __m512bh;

inline Weights load_pairs(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline Input spread(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
inline Vec add_products(Vec sums, const Weights& w, const Input& x) { return _mm512_dpbf16_ps(sums, w, x); }

#else

struct Weights {
  __m512 even, odd;
};
using Input = Weights;

inline Weights split(__m512i pairs) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000u)))};
}
inline Weights load_pairs(const uint32_t* p) { return split(_mm512_loadu_si512(p)); }
inline Input spread(uint32_t pair) { return split(_mm512_set1_epi32(static_cast<int>(pair))); }
inline Vec add_products(Vec sums, const Weights& w, const Input& x) {
  return _mm512_fmadd_ps(w.even, x.even, _mm512_fmadd_ps(w.odd, x.odd, sums));
}

#endif
#else

constexpr int MOST_ROWS = 2;
template <int ROWS>
constexpr int ABREAST = ROWS == 1 ? 8 : 4;

struct Weights {
  __m256 even, odd;
};
using Input = Weights;

inline Weights split(__m256i pairs) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000u)))};
}
inline Weights load_pairs(const uint32_t* p) { return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Input spread(uint32_t pair) { return split(_mm256_set1_epi32(static_cast<int>(pair))); }
inline Vec add_products(Vec sums, const Weights& w, const Input& x) {
  return _mm256_fmadd_ps(w.even, x.even, _mm256_fmadd_ps(w.odd, x.odd, sums));
}

#endif

constexpr int64_t STRETCH = 8;          // steps between two looks at what to fetch
constexpr int64_t STEP_LINES = 4;       // cache lines in a step of a panel
constexpr int64_t MOST_PAIRS = 1024;    // of a panel in one go: 256 KiB, which stay in the second cache beside the rows
constexpr int64_t TWO_PAIRS = 256;      // for two groups: the second follows while what the first has read is still near
constexpr int64_t MOST_TOGETHER = 240;  // rows whose sums are kept from one stretch of inputs to the next

// Rows of x, as pairs along the inputs.
struct Rows {
  const uint16_t* numbers;
  int64_t stride;

  uint32_t pair(int64_t row, int64_t at) const {
    uint32_t word;
    memcpy(&word, numbers + row * stride + 2 * at, sizeof word);
    return word;
  }
  uint32_t half_pair(int64_t row, int64_t at) const { return numbers[row * stride + 2 * at]; }
  Rows from(int64_t row, int64_t at) const { return {numbers + row * stride + 2 * at, stride}; }
};

// What is to be fetched meanwhile: `lines` cache lines for every STRETCH steps.
struct Ahead {
  const char* next;
  int64_t lines;
};

// sums [ROWS, PANEL] (+)= rows times `pairs` steps of a panel, and one of a single input if `half`.
template <int ROWS>
void multiply(const Rows& x, const uint32_t* panel, int64_t pairs, bool half, float* sums, bool resume, Ahead ahead) {
  constexpr int VECTORS = ABREAST<ROWS>;
  for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
    const uint32_t* words = panel + first;
    Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sum[i][j] = resume ? load(sums + i * PANEL + first + j * WIDTH) : set(0.0f);

    for (int64_t at = 0; at < pairs;) {
      if (first == 0) {
        for (int64_t line = 0; line < ahead.lines; line++) _mm_prefetch(ahead.next + line * 64, _MM_HINT_T1);
        ahead.next += ahead.lines * 64;
      }
      const int64_t end = at + STRETCH < pairs ? at + STRETCH : pairs;
      for (; at < end; at++) {
        Weights w[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) w[j] = load_pairs(words + at * PANEL + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const Input input = spread(x.pair(i, at));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = add_products(sum[i][j], w[j], input);
        }
      }
    }
    if (half) {
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        const Input input = spread(x.half_pair(i, pairs));
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
          sum[i][j] = add_products(sum[i][j], load_pairs(words + pairs * PANEL + j * WIDTH), input);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + first + j * WIDTH, sum[i][j]);
  }
}

using Multiply = void (*)(const Rows&, const uint32_t*, int64_t, bool, float*, bool, Ahead);

Multiply multiply_rows(int64_t rows) {
#if defined(__AVX512F__)
  static constexpr Multiply of[] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>};
#else
  static constexpr Multiply of[] = {multiply<1>, multiply<2>};
#endif
  return of[rows - 1];
}

// One product. Everything is checked by the caller.
struct Product {
  Rows x;
  int64_t rows;
  const uint32_t* weights;
  int64_t outputs, inputs;
  const bf16* bias;  // [outputs], or null
  void* out;             // [rows, outputs] of float or bfloat16, rows `stride` numbers apart
  int64_t stride;
  bool wide;  // out is float

  // Round sums [count, PANEL], of rows from `row` on and the panel from output `first` on, into place.
  void finish(const float* sums, int64_t row, int64_t count, int64_t first) const {
    const int64_t columns = outputs - first < PANEL ? outputs - first : PANEL;
    float added[PANEL] = {};
    if (bias) convert(bias + first, added, columns);
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = (row + i) * stride + first;
      if (wide)
        put(sums + i * PANEL, added, static_cast<float*>(out) + at, columns);
      else
        put(sums + i * PANEL, added, static_cast<bf16*>(out) + at, columns);
    }
  }

  template <class Number>
  static void put(const float* sums, const float* added, Number* to, int64_t columns) {
    Number rounded[PANEL];
    Number* whole = columns == PANEL ? to : rounded;
    for (int64_t j = 0; j < PANEL; j += WIDTH) store(whole + j, load(sums + j) + load(added + j));
    if (columns < PANEL) memcpy(to, rounded, columns * sizeof(Number));
  }
};

// Compute rows [row, row + count) of one panel, fetching the panel that follows if there is one to come.
void compute(const Product& p, int64_t panel, int64_t row, int64_t count, bool more) {
  const int64_t pairs = pairs_of(p.inputs);
  const int64_t groups = (count + MOST_ROWS - 1) / MOST_ROWS;
  const int64_t most = groups == 2 ? TWO_PAIRS : MOST_PAIRS;
  const int64_t stretches = (pairs + most - 1) / most;
  const int64_t lines = groups == 1 ? 0 : (STRETCH * STEP_LINES + groups - 1) / groups;
  const uint32_t* words = p.weights + panel * pairs * PANEL;
  alignas(64) float sums[MOST_TOGETHER * PANEL];

  for (int64_t stretch = 0; stretch < stretches; stretch++) {
    const int64_t first = pairs * stretch / stretches, last = pairs * (stretch + 1) / stretches;
    const bool ends = stretch + 1 == stretches, half = ends && p.inputs % 2;
    const char* next = reinterpret_cast<const char*>(words + last * PANEL);  // the next stretch, or the next panel
    for (int64_t group = 0; group < groups; group++) {
      const int64_t from = count * group / groups, rows = count * (group + 1) / groups - from;
      float* own = sums + (stretches > 1 ? from * PANEL : 0);
      const int64_t share = (last - first) * PANEL * sizeof(uint32_t) / groups / 64 * 64;
      const Ahead ahead = {next + group * share, more || !ends ? lines : 0};
      multiply_rows(rows)(p.x.from(row + from, first), words + first * PANEL, last - first - half, half, own,
                          stretch > 0, ahead);
      if (ends) p.finish(own, row + from, rows, panel * PANEL);
    }
  }
}

}  // namespace

// out = x [rows, inputs] times weights, packed, transposed, plus bias.
INFD_KERNEL(linear)
(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide) {
  const Product product = {{x, x_stride}, rows, weights, outputs, inputs, bias, out, out_stride, wide != 0};
  const int64_t panels = panels_of(outputs);
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    // Where panels are too few for the threads, rows are divided as well.
    int64_t parts = (rows + MOST_TOGETHER - 1) / MOST_TOGETHER;
    while (panels * parts < 4 * threads && rows / (parts + 1) >= 4 * MOST_ROWS) parts++;
    const int64_t last = panels * parts * (own + 1) / threads;
    for (int64_t task = panels * parts * own / threads; task < last; task++) {
      const int64_t panel = task / parts, part = task % parts;
      const int64_t from = rows * part / parts;
      compute(product, panel, from, rows * (part + 1) / parts - from, part + 1 == parts && task + 1 < last);
    }
  }
}
