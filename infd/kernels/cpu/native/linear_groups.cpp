// Products with a matrix of weights in groups, in panels; algorithm in products.h, layout in groups.h.
//
// The rows of x are quantized to int8 first, in groups of 32 with one scale each, which loses about as much precision
// as rounding to bfloat16. Sums over a group are exact integers; the groups' sums are accumulated in float32. Weights
// are multiplied as unsigned numbers: with 8 or 128 added, or, if they are entries of a table, with the least entry
// subtracted. To compensate, each integer sum starts at the least weight, minus the zero point, times the sum of the
// group's inputs. A minimum is multiplied by that sum too, and added in float32.

#include "groups.h"
#include "products.h"
#include "quantized.h"
#include "scratch.h"

namespace {

#if defined(__AVX512BW__)
inline Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints words_at(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void put_words(uint32_t* p, Ints words) { _mm512_storeu_si512(p, words); }
inline Ints lower(Ints words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
inline Ints upper(Ints words) { return lower(_mm512_srli_epi16(words, 4)); }
inline Ints even_bytes(Ints words) { return _mm512_and_si512(words, _mm512_set1_epi16(255)); }
inline Ints odd_bytes(Ints words) { return _mm512_srli_epi16(words, 8); }
inline Vec floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints widened(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
// Products of integers that fit 16 bits.
inline Ints small_products(Ints a, Ints b) { return _mm512_madd_epi16(_mm512_and_si512(a, ints(0xffff)), b); }
inline Ints look_up(__m128i table, Ints indices) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), indices); }
inline Ints pairs_of_bytes(Ints a, Ints b) { return _mm512_maddubs_epi16(a, b); }
inline Ints plus_pairs(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints pairs_of_words(Ints a, Ints b) { return _mm512_madd_epi16(a, b); }
inline Ints ones() { return _mm512_set1_epi16(1); }
#else
inline Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints words_at(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void put_words(uint32_t* p, Ints words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words); }
inline Ints lower(Ints words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }
inline Ints upper(Ints words) { return lower(_mm256_srli_epi16(words, 4)); }
inline Ints even_bytes(Ints words) { return _mm256_and_si256(words, _mm256_set1_epi16(255)); }
inline Ints odd_bytes(Ints words) { return _mm256_srli_epi16(words, 8); }
inline Vec floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints widened(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
// Products of integers that fit 16 bits.
inline Ints small_products(Ints a, Ints b) { return _mm256_madd_epi16(_mm256_and_si256(a, ints(0xffff)), b); }
inline Ints look_up(__m128i table, Ints indices) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), indices); }
inline Ints pairs_of_bytes(Ints a, Ints b) { return _mm256_maddubs_epi16(a, b); }
inline Ints plus_pairs(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints pairs_of_words(Ints a, Ints b) { return _mm256_madd_epi16(a, b); }
inline Ints ones() { return _mm256_set1_epi16(1); }
#endif

// What the lines store. TABLE: indices of a table of small numbers; WIDE_TABLE: of one whose numbers take 8 bits. OPENED:
// one weight a byte, as multiplied; OPENED_WIDE: two weights a word, if SPLITS.
enum Stored { NIBBLES, TABLE, WIDE_TABLE, BYTES, OPENED, OPENED_TABLE, OPENED_WIDE };
constexpr bool is_open(Stored stored) { return stored >= OPENED; }

// Weights are unsigned bytes, inputs signed ones. Without an instruction that adds their products to 32-bit sums, products
// of weights that fit four or five bits are added to 16-bit sums first: of eight quads of weights up to 15 (8 * 2 * 15 *
// 127 < 2^15), of four up to 24. Larger weights and their inputs are split into pairs of 16 bits.
#if defined(__AVX512VNNI__)
constexpr bool SPLITS = false;
constexpr Stored opened_as(Stored) { return OPENED; }
#else
constexpr bool SPLITS = true;
constexpr Stored opened_as(Stored stored) { return stored == NIBBLES ? OPENED : stored == TABLE ? OPENED_TABLE : OPENED_WIDE; }
#endif
constexpr bool is_wide(Stored stored) { return SPLITS && (stored == WIDE_TABLE || stored == BYTES || stored == OPENED_WIDE); }
constexpr bool is_narrow(Stored stored) { return SPLITS && !is_wide(stored); }
constexpr int64_t quads_together(Stored stored) { return stored == TABLE || stored == OPENED_TABLE ? 4 : 8; }

// The first and third, and the second and fourth, byte of each word.
struct Halves {
  Ints even, odd;
};
inline Ints add_products(Ints sums, const Halves& weights, const Halves& inputs) {
  return plus(sums, plus(pairs_of_words(weights.even, inputs.even), pairs_of_words(weights.odd, inputs.odd)));
}
inline Ints add_products(Ints sums, Ints weights, Ints inputs) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, weights, inputs);
#else
  return plus_pairs(sums, pairs_of_bytes(weights, inputs));
#endif
}

template <bool WIDE>
struct Choose {
  using Weights = Ints;
  static Weights weights(Ints bytes) { return bytes; }
};
template <>
struct Choose<true> {
  using Weights = Halves;
  static Weights weights(Ints bytes) { return {even_bytes(bytes), odd_bytes(bytes)}; }
};

// A group of a row's inputs, quantized. WIDE: as Halves of 16 bits.
template <bool WIDE>
struct Inputs {
  uint8_t numbers[GROUP * (WIDE ? 2 : 1)];
  float scale;
  int32_t totals[2];  // of the first and the last 16 numbers

  int32_t word(int64_t i) const {
    int32_t word;
    memcpy(&word, numbers + 4 * i, sizeof word);
    return word;
  }
  typename Choose<WIDE>::Weights quad(int64_t i) const {
    if constexpr (WIDE)
      return {ints(word(2 * i)), ints(word(2 * i + 1))};
    else
      return ints(word(i));
  }

  int32_t total() const { return totals[0] + totals[1]; }

  template <class Number>
  void fill(const Number* x, int64_t count) {
    const int64_t half = GROUP / 2, first = count < half ? count : half;
    uint8_t bytes[GROUP] = {};
    scale = scale_of(x, count);
    totals[0] = quantize(x, first, scale, bytes, 0);
    totals[1] = quantize(x + first, count - first, scale, bytes + half, 0);
    if constexpr (WIDE) {
      for (int64_t i = 0; i < GROUP; i += 4) {
        const int8_t* four = reinterpret_cast<const int8_t*>(bytes + i);
        const int16_t halves[4] = {four[0], four[2], four[1], four[3]};
        memcpy(numbers + 2 * i, halves, sizeof halves);
      }
    } else {
      memcpy(numbers, bytes, sizeof bytes);
    }
  }
};

// PARTS: scales of 32 inputs.
template <Stored STORED, int PARTS>
struct Grouped {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, OPENS = !is_open(STORED), WIDE = is_wide(STORED);
  using Opened = Grouped<opened_as(STORED), PARTS>;
  using Weights = typename Choose<WIDE>::Weights;

  const Inputs<WIDE>* inputs;
  int64_t stride;  // between rows
  Layout layout;
  __m128i table;

  Grouped(const Inputs<WIDE>* inputs, int64_t stride, const Layout& layout) : inputs(inputs), stride(stride), layout(layout) {
    const auto entries = reinterpret_cast<const __m128i*>(TABLES[STORED == TABLE || STORED == WIDE_TABLE ? layout.table : 0]);
    table = _mm_sub_epi8(_mm_loadu_si128(entries), _mm_set1_epi8(static_cast<char>(layout.least())));
  }

  // Opened, a group begins with its scales, minima and zero points, as 32-bit numbers.
  static constexpr int64_t OPENED_LINES = GROUP / 4 * (STORED == OPENED_WIDE ? 2 : 1);
  int64_t sets() const { return PARTS * (1 + layout.minima + layout.zeros); }
  int64_t group_words() const { return is_open(STORED) ? (sets() + OPENED_LINES) * PANEL : layout.lines() * PANEL; }
  int64_t step() const { return is_open(STORED) ? group_words() * layout.groups : layout.step(); }

  // With several sets of scales, a step reads each after lines at higher addresses. The hardware prefetcher does not
  // predict this order.
  bool prefetches() const { return layout.sets() > 1; }
  int64_t look() const { return layout.step() / layout.groups; }
  Grouped from(int64_t row, int64_t at) const { return {inputs + row * stride + at * layout.groups, stride, layout}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }

  // Of a part of a group of a step: the outputs' scales and minima, stored in `room` unless they are floats in memory.
  const float* scales(const uint32_t* step, int64_t group, int64_t part, float* room) const {
    if constexpr (is_open(STORED)) return reinterpret_cast<const float*>(set_at(step, group, part));
    return layout.scales_of(step, layout.set_of(group, part), room);
  }
  const float* minima(const uint32_t* step, int64_t group, int64_t part, float* room) const {
    if constexpr (is_open(STORED)) return reinterpret_cast<const float*>(set_at(step, group, PARTS + part));
    return layout.minima_of(step, layout.set_of(group, part), room);
  }
  const uint32_t* set_at(const uint32_t* step, int64_t group, int64_t set) const { return step + group * group_words() + set * PANEL; }
  // Minus the least weight, which stored numbers leave out.
  Ints zeros(const uint32_t* step, int64_t group, int64_t part, int64_t column) const {
    if constexpr (is_open(STORED)) return words_at(set_at(step, group, PARTS * (1 + layout.minima) + part) + column);
    return plus(widened(layout.zero_points(step, layout.set_of(group, part)) + column), ints(-layout.least()));
  }
  // The lines of a group, and the weights that the first and the second quad of a pair multiply.
  const uint32_t* lines(const uint32_t* step, int64_t group) const {
    return is_open(STORED) ? set_at(step, group, sets()) : step + layout.to_lines() + group * group_words();
  }
  template <int SECOND>
  Weights weights(const uint32_t* lines, int64_t pair, int64_t column) const {
    lines += column;
    if constexpr (STORED == OPENED_WIDE && SPLITS) {
      const int64_t quad = 2 * pair + SECOND;
      return {words_at(lines + 2 * quad * PANEL), words_at(lines + (2 * quad + 1) * PANEL)};
    } else if constexpr (STORED == BYTES || is_open(STORED)) {
      return Choose<WIDE>::weights(words_at(lines + (2 * pair + SECOND) * PANEL));
    } else {
      const Ints words = words_at(lines + pair * PANEL);
      const Ints numbers = SECOND ? upper(words) : lower(words);
      if constexpr (STORED == NIBBLES)
        return numbers;
      else
        return Choose<WIDE>::weights(look_up(table, numbers));
    }
  }

  Opened opened() const { return {inputs, stride, layout}; }
  void open(const uint32_t* words, int64_t steps, uint32_t* to) const {
    const Opened form = opened();
    for (int64_t at = 0; at < steps; at++, words += step())
      for (int64_t group = 0; group < layout.groups; group++, to += form.group_words()) {
        float room[PANEL];
        uint32_t* set = to;
        for (int part = 0; part < PARTS; part++, set += PANEL)
          memcpy(set, scales(words, group, part, room), sizeof room);
        for (int part = 0; part < PARTS && layout.minima; part++, set += PANEL)
          memcpy(set, minima(words, group, part, room), sizeof room);
        for (int part = 0; part < PARTS && layout.zeros; part++, set += PANEL)
          for (int64_t column = 0; column < PANEL; column += WIDTH) put_words(set + column, zeros(words, group, part, column));
        const uint32_t* from = lines(words, group);
        constexpr int64_t QUAD = Opened::OPENED_LINES / (GROUP / 4) * PANEL;
        for (int64_t pair = 0; pair < GROUP / 8; pair++, set += 2 * QUAD)
          for (int64_t column = 0; column < PANEL; column += WIDTH) {
            put_opened(set + column, weights<0>(from, pair, column));
            put_opened(set + QUAD + column, weights<1>(from, pair, column));
          }
      }
  }

 private:
  static void put_opened(uint32_t* set, Ints weights) { put_words(set, weights); }
  static void put_opened(uint32_t* set, const Halves& weights) {
    put_words(set, weights.even);
    put_words(set + PANEL, weights.odd);
  }
};

template <Stored STORED, int PARTS, int ROWS>
struct Group<Grouped<STORED, PARTS>, ROWS> {
  using Kind = Grouped<STORED, PARTS>;

  // Add the products of a quad of a pair.
  template <int SECOND, int VECTORS>
  static void add_quad(const Kind& x, const uint32_t* lines, int64_t pair, int64_t first, const Inputs<Kind::WIDE>* inputs,
                       Ints (&in)[ROWS][VECTORS]) {
    const int64_t quad = 2 * pair + SECOND;
    if constexpr (ROWS == 1) {
      const auto input = inputs[0].quad(quad);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++)
        in[0][j] = add_products(in[0][j], x.template weights<SECOND>(lines, pair, first + j * WIDTH), input);
    } else {
      typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) w[j] = x.template weights<SECOND>(lines, pair, first + j * WIDTH);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        const auto input = inputs[i * x.stride].quad(quad);
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) in[i][j] = add_products(in[i][j], w[j], input);
      }
    }
  }

  // Compute the sums before what follows.
  template <int VECTORS>
  static void settle(Ints (&in)[ROWS][VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) asm volatile("" : "+v"(in[i][j])::"memory");
  }

  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    constexpr int VECTORS = ROWS > 4 ? 2 : WIDTH == 8 && ROWS == 1 ? 8 : 4;  // weights and sums together fit the vector registers
    constexpr bool NARROW = is_narrow(STORED);
    constexpr int64_t QUADS = GROUP / 4 / PARTS, TOGETHER = QUADS < quads_together(STORED) ? QUADS : quads_together(STORED);
    const Layout layout = x.layout;
    const int64_t length = x.step();
    const int least = layout.least();
    for (int64_t at = 0; at < stretch.steps; at++) {
      const uint32_t* step = stretch.words + at * length;
      for (int64_t group = 0; group < layout.groups; group++) {
        ahead.fetch();
        const Inputs<Kind::WIDE>* inputs = x.inputs + at * layout.groups + group;
        const uint32_t* lines = x.lines(step, group);
        const float *scales[PARTS], *minima[PARTS];
        float room[2 * PARTS][PANEL];
        for (int part = 0; part < PARTS; part++) {
          scales[part] = x.scales(step, group, part, room[part]);
          minima[part] = layout.minima ? x.minima(step, group, part, room[PARTS + part]) : nullptr;
        }
        for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
          for (int64_t part = 0; part < PARTS; part++) {
            const auto total = [&](int64_t i) {
              const Inputs<Kind::WIDE>& own = inputs[i * x.stride];
              return PARTS == 1 ? own.total() : own.totals[part];
            };
            Ints sum[ROWS][VECTORS];
            if (layout.zeros) {
#pragma GCC unroll 8
              for (int j = 0; j < VECTORS; j++) {
                const Ints zero = x.zeros(step, group, part, first + j * WIDTH);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) sum[i][j] = small_products(zero, ints(-total(i)));
              }
            } else {
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                const Ints start = ints(least * total(i));
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) sum[i][j] = start;
              }
            }
#pragma GCC unroll 2
            for (int64_t begin = QUADS * part; begin < QUADS * (part + 1); begin += TOGETHER) {
              Ints pairs[ROWS][VECTORS];
              auto& in = [&]() -> Ints(&)[ROWS][VECTORS] {
                if constexpr (NARROW)
                  return pairs;
                else
                  return sum;
              }();
              if constexpr (NARROW) {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) in[i][j] = no_ints();
              }
#pragma GCC unroll 1  // unrolled, its loads would move ahead and spill sums
              for (int64_t pair = begin / 2; pair < (begin + TOGETHER) / 2; pair++) {
                add_quad<0>(x, lines, pair, first, inputs, in);
                if (ROWS > 1) settle(in);  // else products and loads of the second quad move ahead, and sums are spilled
                add_quad<1>(x, lines, pair, first, inputs, in);
              }
              if constexpr (NARROW) {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) sum[i][j] = plus(sum[i][j], pairs_of_words(pairs[i][j], ones()));
              }
            }
            const bool begins = stretch.header != nullptr && at == 0 && group == 0 && part == 0;
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) {
              const Vec scale = load(scales[part] + first + j * WIDTH);
              const Vec minimum = layout.minima ? load(minima[part] + first + j * WIDTH) : set(0.0f);
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                float* own = sums + i * PANEL + first + j * WIDTH;
                const float size = inputs[i * x.stride].scale;
                Vec before = begins ? set(0.0f) : load(own);
                if (layout.minima) before = fma(minimum, set(size * static_cast<float>(total(i))), before);
                store(own, fma(floats(sum[i][j]), scale * set(size), before));
              }
            }
          }
        }
      }
    }
  }
};

thread_local Scratch scratch;

// Quantize a group of a row: `count` numbers from x[first] on, or, if `order` is given, the numbers that it names.
template <bool WIDE, class Number>
void fill(Inputs<WIDE>& group, const Number* x, const int32_t* order, int64_t first, int64_t count) {
  if (order == nullptr) return group.fill(x + first, count);
  Number chosen[GROUP];
  for (int64_t i = 0; i < count; i++) chosen[i] = x[order[first + i]];
  group.fill(chosen, count);
}

template <Stored STORED, int PARTS, class Number>
void multiply_in(const Layout& layout, const Number* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
              const Number* bias, void* out, int64_t out_stride, int64_t wide) {
  const int32_t* order = layout.order(weights);
  const int64_t steps = layout.steps_of(inputs), groups = steps * layout.groups;
  using Group = Inputs<is_wide(STORED)>;
  Group* own = reinterpret_cast<Group*>(scratch.at_least(rows * groups * sizeof(Group)));
  const Product<Grouped<STORED, PARTS>> product = {
      {own, groups, layout}, rows, layout.panels(weights, inputs), outputs, steps, false, bias, out, out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs);
  Division<Grouped<STORED, PARTS>> division(product, shared);
#pragma omp parallel if (shared)
  {
#pragma omp for
    for (int64_t i = 0; i < rows; i++)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t first = group * GROUP < inputs ? group * GROUP : inputs, left = inputs - first;
        fill(own[i * groups + group], x + i * x_stride, order, first, left < GROUP ? left : GROUP);
      }
    division.compute_share();
  }
}

template <class Number>
void multiply(const Number* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
              const Number* bias, void* out, int64_t out_stride, int64_t wide, int64_t number) {
  const Layout layout(number);
  using Apply = decltype(&multiply_in<NIBBLES, 1, Number>);
  constexpr Apply of[][2] = {{multiply_in<NIBBLES, 1, Number>, multiply_in<NIBBLES, 2, Number>},
                             {multiply_in<TABLE, 1, Number>, multiply_in<TABLE, 2, Number>},
                             {multiply_in<WIDE_TABLE, 1, Number>, multiply_in<WIDE_TABLE, 2, Number>},
                             {multiply_in<BYTES, 1, Number>, multiply_in<BYTES, 2, Number>}};
  const Stored stored = layout.table == 0               ? NIBBLES
                        : layout.table == Layout::BYTES ? BYTES
                        : layout.least() < -12          ? WIDE_TABLE
                                                        : TABLE;
  const Apply apply = of[stored][layout.parts - 1];
  apply(layout, x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide);
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] times weights in a layout, transposed, plus bias.
INFD_KERNEL(multiply_groups_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide, layout);
}

INFD_KERNEL(multiply_groups_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide, layout);
}
