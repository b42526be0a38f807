// Products with a matrix of weights in groups, in panels; algorithm in products.h, layout in groups.h.
//
// The rows of x are quantized to int8 first, in groups of 32 with one scale each, which loses about as much precision
// as rounding to bfloat16. Sums over a group are exact integers; the groups' sums are accumulated in float32. Weights
// are multiplied as unsigned numbers: with 8, 32 or 128 added, or, if they are entries of a table, with the least entry
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
// The two bits of each byte that begin at bit 2 * FOURTH become bits 4 and 5 of numbers that do not have these bits.
template <int FOURTH>
inline Ints with_upper(Ints numbers, Ints words) {
  const Ints moved = FOURTH < 2 ? _mm512_slli_epi16(words, 4 - 2 * FOURTH) : FOURTH == 2 ? words : _mm512_srli_epi16(words, 2);
  return _mm512_ternarylogic_epi32(numbers, moved, _mm512_set1_epi8(0x30), 0xf8);
}
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
// The integers of a group as bytes, in order.
inline __m256i bytes_of(const Ints (&whole)[GROUP / WIDTH]) {
  return _mm256_set_m128i(_mm512_cvtepi32_epi8(whole[1]), _mm512_cvtepi32_epi8(whole[0]));
}
#else
inline Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints words_at(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline void put_words(uint32_t* p, Ints words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words); }
inline Ints lower(Ints words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }
inline Ints upper(Ints words) { return lower(_mm256_srli_epi16(words, 4)); }
// The two bits of each byte that begin at bit 2 * FOURTH become bits 4 and 5 of numbers that do not have these bits.
template <int FOURTH>
inline Ints with_upper(Ints numbers, Ints words) {
  const Ints moved = FOURTH < 2 ? _mm256_slli_epi16(words, 4 - 2 * FOURTH) : FOURTH == 2 ? words : _mm256_srli_epi16(words, 2);
  return _mm256_or_si256(numbers, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
}
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
// The integers of a group as bytes, in order.
inline __m256i bytes_of(const Ints (&whole)[GROUP / WIDTH]) {
  const Ints first = _mm256_packs_epi32(whole[0], whole[1]), second = _mm256_packs_epi32(whole[2], whole[3]);
  const Ints order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing is by halves of 128 bits
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
}
#endif

// Whether a group's weights stay in registers while the rows of a block are multiplied one after the other. AVX-512 has
// enough registers for the sums of several rows instead.
#if defined(__AVX512BW__)
constexpr bool HOLDS_WEIGHTS = false;
#else
constexpr bool HOLDS_WEIGHTS = true;
#endif
constexpr int64_t BLOCK_ROWS = 32;  // their inputs, stored for each lane, stay in L2

// What the lines store. TABLE: indices of a table of small numbers; WIDE_TABLE: of one whose numbers take 8 bits. OPENED:
// one weight a byte, as multiplied; OPENED_WIDE: two weights a word, if SPLITS.
enum Stored { NIBBLES, TABLE, WIDE_TABLE, BYTES, SIXES, OPENED, OPENED_TABLE, OPENED_SIXES, OPENED_WIDE };
constexpr bool is_open(Stored stored) { return stored >= OPENED; }

// Weights are unsigned bytes, inputs signed ones. Without an instruction that adds their products to 32-bit sums, products
// of weights that fit four to six bits are added to 16-bit sums first: of eight quads of weights up to 15 (8 * 2 * 15 *
// 127 < 2^15), of four up to 24, of two up to 63. Larger weights and their inputs are split into pairs of 16 bits.
#if defined(__AVX512VNNI__)
constexpr bool SPLITS = false;
constexpr Stored opened_as(Stored) { return OPENED; }
#else
constexpr bool SPLITS = true;
constexpr Stored opened_as(Stored stored) {
  return stored == NIBBLES ? OPENED : stored == TABLE ? OPENED_TABLE : stored == SIXES ? OPENED_SIXES : OPENED_WIDE;
}
#endif
constexpr bool is_wide(Stored stored) { return SPLITS && (stored == WIDE_TABLE || stored == BYTES || stored == OPENED_WIDE); }
constexpr bool is_narrow(Stored stored) { return SPLITS && !is_wide(stored); }
constexpr int64_t quads_together(Stored stored) {
  return stored == TABLE || stored == OPENED_TABLE ? 4 : stored == SIXES || stored == OPENED_SIXES ? 2 : 8;
}
// Quads of weights that share a line of upper bits, and the quads that a turn of a loop multiplies.
constexpr int64_t quads_of_a_turn(Stored stored) { return stored == SIXES ? 4 : 2; }

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

// A group of a row's inputs, quantized, with the totals of each part's numbers. WIDE: numbers are Halves of 16 bits. If
// HOLDS_WEIGHTS, a word is stored for each lane, so that products read it as an operand in memory.
template <bool WIDE, int PARTS>
struct alignas(HOLDS_WEIGHTS ? 32 : 4) Inputs {
  static constexpr int64_t PART = GROUP / PARTS, WORDS = GROUP / 4 * (WIDE ? 2 : 1), COPIES = HOLDS_WEIGHTS ? WIDTH : 1;

  uint32_t words[WORDS][COPIES];
  float scale;
  int32_t totals[PARTS];
  float scaled_totals[PARTS];

  Ints word(int64_t i) const {
    if constexpr (HOLDS_WEIGHTS)
      return words_at(words[i]);
    else
      return ints(words[i][0]);
  }
  typename Choose<WIDE>::Weights quad(int64_t i) const {
    if constexpr (WIDE)
      return {word(2 * i), word(2 * i + 1)};
    else
      return word(i);
  }

  // Quantize GROUP numbers. Bytes stay in registers until all are known, because a load that spans several recent stores
  // waits for them.
  template <class Number>
  void fill(const Number* x) {
    scale = scale_of(x, GROUP);
    const Vec inverse = inverse_of(scale);
    Ints whole[GROUP / WIDTH];
#pragma GCC unroll 4
    for (int i = 0; i < GROUP / WIDTH; i++) whole[i] = rounded(load(x + i * WIDTH) * inverse);
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      Ints total = no_ints();
#pragma GCC unroll 4
      for (int i = part * PART / WIDTH; i < (part + 1) * PART / WIDTH; i++) total = plus(total, whole[i]);
      totals[part] = sum_of(total);
      scaled_totals[part] = scale * static_cast<float>(totals[part]);
    }
    const __m256i bytes = bytes_of(whole);
    if constexpr (WIDE) {
      put<0>(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
      put<1>(_mm256_srai_epi16(bytes, 8));
    } else {
      put<0>(bytes);
    }
  }

 private:
  // Store a word of each quad.
  template <int HALF>
  void put(__m256i words_of_quads) {
    uint32_t each[GROUP / 4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(each), words_of_quads);
    asm volatile("" ::: "memory");  // a load repeats a word in fewer instructions than a permutation
#pragma GCC unroll 8
    for (int quad = 0; quad < GROUP / 4; quad++) {
      uint32_t* copies = words[WIDE ? 2 * quad + HALF : quad];
      if constexpr (HOLDS_WEIGHTS)
        put_words(copies, ints(each[quad]));
      else
        *copies = each[quad];
    }
  }
};

// PARTS: scales of 32 inputs.
template <Stored STORED, int PARTS>
struct Grouped {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = !HOLDS_WEIGHTS && !is_open(STORED), WIDE = is_wide(STORED);
  static constexpr int TURN = quads_of_a_turn(STORED);
  static constexpr bool FIRST_OPENS = false;
  using Opened = Grouped<opened_as(STORED), PARTS>;
  using Weights = typename Choose<WIDE>::Weights;
  using GroupInputs = Inputs<WIDE, PARTS>;

  const GroupInputs* inputs;  // [groups, rows]
  int64_t rows;
  Layout layout;
  __m128i table;

  Grouped(const GroupInputs* inputs, int64_t rows, const Layout& layout) : inputs(inputs), rows(rows), layout(layout) {
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
  // Nor the order in which several rows read the vectors of lines if HOLDS_WEIGHTS.
  bool prefetches() const { return (HOLDS_WEIGHTS && rows > 1) || layout.sets() > 1; }
  int64_t look() const { return layout.step() / layout.groups; }
  Grouped from(int64_t row, int64_t at) const { return {inputs + at * layout.groups * rows + row, rows, layout}; }
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
  // The lines of a group, and the weights of a quad of the turn that begins with a pair.
  const uint32_t* lines(const uint32_t* step, int64_t group) const {
    return is_open(STORED) ? set_at(step, group, sets()) : step + layout.to_lines() + group * group_words();
  }
  template <int NUMBER>
  Weights weights(const uint32_t* lines, int64_t pair, int64_t column) const {
    lines += column;
    if constexpr (STORED == OPENED_WIDE && SPLITS) {
      const int64_t quad = 2 * pair + NUMBER;
      return {words_at(lines + 2 * quad * PANEL), words_at(lines + (2 * quad + 1) * PANEL)};
    } else if constexpr (STORED == BYTES || is_open(STORED)) {
      return Choose<WIDE>::weights(words_at(lines + (2 * pair + NUMBER) * PANEL));
    } else if constexpr (STORED == SIXES) {
      lines += pair / 2 * 3 * PANEL;
      const Ints words = words_at(lines + (1 + NUMBER / 2) * PANEL);
      return with_upper<NUMBER>(NUMBER % 2 ? upper(words) : lower(words), words_at(lines));
    } else {
      const Ints words = words_at(lines + pair * PANEL);
      const Ints numbers = NUMBER ? upper(words) : lower(words);
      if constexpr (STORED == NIBBLES)
        return numbers;
      else
        return Choose<WIDE>::weights(look_up(table, numbers));
    }
  }

  Opened opened() const { return {inputs, rows, layout}; }
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
        for (int64_t pair = 0; pair < GROUP / 8; pair += TURN / 2, set += TURN * QUAD)
          for (int64_t column = 0; column < PANEL; column += WIDTH) {
            put_opened(set + column, weights<0>(from, pair, column));
            put_opened(set + QUAD + column, weights<1>(from, pair, column));
            if constexpr (TURN == 4) {
              put_opened(set + 2 * QUAD + column, weights<2>(from, pair, column));
              put_opened(set + 3 * QUAD + column, weights<3>(from, pair, column));
            }
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

  // Add the products of a quad of the turn that begins with a pair.
  template <int NUMBER, int VECTORS>
  static void add_quad(const Kind& x, const uint32_t* lines, int64_t pair, int64_t first, const typename Kind::GroupInputs* inputs,
                       Ints (&in)[ROWS][VECTORS]) {
    const int64_t quad = 2 * pair + NUMBER;
    if constexpr (ROWS == 1) {
      const auto input = inputs[0].quad(quad);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++)
        in[0][j] = add_products(in[0][j], x.template weights<NUMBER>(lines, pair, first + j * WIDTH), input);
    } else {
      typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) w[j] = x.template weights<NUMBER>(lines, pair, first + j * WIDTH);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
        const auto input = inputs[i].quad(quad);
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
    constexpr int64_t TURN = Kind::TURN, TURNS = TOGETHER < TURN ? TURN : TOGETHER;
    const Layout layout = x.layout;
    const int64_t length = x.step();
    const int least = layout.least();
    for (int64_t at = 0; at < stretch.steps; at++) {
      const uint32_t* step = stretch.words + at * length;
      for (int64_t group = 0; group < layout.groups; group++) {
        ahead.fetch();
        const typename Kind::GroupInputs* inputs = x.inputs + (at * layout.groups + group) * x.rows;
        const uint32_t* lines = x.lines(step, group);
        const float *scales[PARTS], *minima[PARTS];
        float room[2 * PARTS][PANEL];
        for (int part = 0; part < PARTS; part++) {
          scales[part] = x.scales(step, group, part, room[part]);
          minima[part] = layout.minima ? x.minima(step, group, part, room[PARTS + part]) : nullptr;
        }
        for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
          for (int64_t part = 0; part < PARTS; part++) {
            Ints sum[ROWS][VECTORS];
            if (layout.zeros) {
#pragma GCC unroll 8
              for (int j = 0; j < VECTORS; j++) {
                const Ints zero = x.zeros(step, group, part, first + j * WIDTH);
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++) sum[i][j] = small_products(zero, ints(-inputs[i].totals[part]));
              }
            } else {
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                const Ints start = ints(least * inputs[i].totals[part]);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) sum[i][j] = start;
              }
            }
#pragma GCC unroll 2
            for (int64_t begin = QUADS * part; begin < QUADS * (part + 1); begin += TURNS) {
              Ints pairs[ROWS][VECTORS];
              auto& in = [&]() -> Ints(&)[ROWS][VECTORS] {
                if constexpr (NARROW)
                  return pairs;
                else
                  return sum;
              }();
              const auto clear = [&] {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) pairs[i][j] = no_ints();
              };
              const auto add_pairs = [&] {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) sum[i][j] = plus(sum[i][j], pairs_of_words(pairs[i][j], ones()));
              };
              if constexpr (NARROW) clear();
#pragma GCC unroll 1  // unrolled, its loads would move ahead and spill sums
              for (int64_t pair = begin / 2; pair < (begin + TURNS) / 2; pair += TURN / 2) {
                add_quad<0>(x, lines, pair, first, inputs, in);
                if (ROWS > 1) settle(in);  // else products and loads of the second quad move ahead, and sums are spilled
                add_quad<1>(x, lines, pair, first, inputs, in);
                if constexpr (TURN == 4) {
                  if constexpr (NARROW && TOGETHER == 2) add_pairs(), clear();
                  if (ROWS > 1) settle(in);
                  add_quad<2>(x, lines, pair, first, inputs, in);
                  if (ROWS > 1) settle(in);
                  add_quad<3>(x, lines, pair, first, inputs, in);
                }
              }
              if constexpr (NARROW) add_pairs();
            }
            const bool begins = stretch.header != nullptr && at == 0 && group == 0 && part == 0;
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) {
              const Vec scale = load(scales[part] + first + j * WIDTH);
              const Vec minimum = layout.minima ? load(minima[part] + first + j * WIDTH) : set(0.0f);
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                float* own = sums + i * PANEL + first + j * WIDTH;
                Vec before = begins ? set(0.0f) : load(own);
                if (layout.minima) before = fma(minimum, set(inputs[i].scaled_totals[part]), before);
                store(own, fma(floats(sum[i][j]), scale * set(inputs[i].scale), before));
              }
            }
          }
        }
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

thread_local Scratch scratch;

// Quantize a group of a row: `count` numbers from x[first] on, or, if `order` is given, the numbers that it names; zeros
// follow.
template <class Group, class Number>
void fill(Group& group, const Number* x, const int32_t* order, int64_t first, int64_t count) {
  if (order == nullptr && count == GROUP) return group.fill(x + first);
  Number chosen[GROUP] = {};
  for (int64_t i = 0; i < count; i++) chosen[i] = x[order ? order[first + i] : first + i];
  group.fill(chosen);
}

template <Stored KIND, int COUNT>
struct Chosen {
  static constexpr Stored STORED = KIND;
  static constexpr int PARTS = COUNT;
  using Group = Inputs<is_wide(KIND), COUNT>;
};

// Call use(Chosen) for what the lines of a layout store.
template <class Use>
void with_stored(const Layout& layout, const Use& use) {
  const auto with_parts = [&](auto one, auto two) { layout.parts == 1 ? use(one) : use(two); };
  if (layout.table == 0) return with_parts(Chosen<NIBBLES, 1>(), Chosen<NIBBLES, 2>());
  if (layout.table == Layout::SIXES) return with_parts(Chosen<SIXES, 1>(), Chosen<SIXES, 2>());
  if (layout.table == Layout::BYTES) return with_parts(Chosen<BYTES, 1>(), Chosen<BYTES, 2>());
  if (layout.least() < -12) return with_parts(Chosen<WIDE_TABLE, 1>(), Chosen<WIDE_TABLE, 2>());
  with_parts(Chosen<TABLE, 1>(), Chosen<TABLE, 2>());
}

// A matrix and the results of a product; see `multiply_groups_bf16`.
struct Matrix {
  Layout layout;
  const uint32_t* weights;
  int64_t outputs, inputs;
  Bias bias;
  void* out;
  int64_t out_stride, wide;

  int64_t groups() const { return layout.steps_of(inputs) * layout.groups; }
  // Call use(first, count) for blocks of rows, whose inputs stay in L2 if HOLDS_WEIGHTS.
  template <class Use>
  static void each_block(int64_t rows, const Use& use) {
    const int64_t blocks = HOLDS_WEIGHTS ? (rows + BLOCK_ROWS - 1) / BLOCK_ROWS : 1;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t from = rows * block / blocks;
      use(from, rows * (block + 1) / blocks - from);
    }
  }
  // The product with rows [from, from + rows), whose inputs are own [groups, rows].
  template <class Kind>
  Product<Grouped<Kind::STORED, Kind::PARTS>> product(Kind, const typename Kind::Group* own, int64_t from, int64_t rows) const {
    char* to = static_cast<char*>(out) + from * out_stride * (wide ? sizeof(float) : sizeof(bf16));
    return {{own, rows, layout}, rows, layout.panels(weights, inputs), outputs, layout.steps_of(inputs), false, bias, to, out_stride, wide != 0};
  }
};

template <class Group, class Number>
void fill_group(Group& group, const Number* x, const int32_t* order, int64_t number, int64_t inputs) {
  const int64_t first = number * GROUP < inputs ? number * GROUP : inputs, left = inputs - first;
  fill(group, x, order, first, left < GROUP ? left : GROUP);
}

template <class Number>
void multiply(const Matrix& matrix, const Number* x, int64_t x_stride, int64_t rows, int64_t awake) {
  const int32_t* order = matrix.layout.order(matrix.weights);
  const int64_t groups = matrix.groups();
  with_stored(matrix.layout, [&](auto kind) {
    using Kind = decltype(kind);
    matrix.each_block(rows, [&](int64_t from, int64_t count) {
      typename Kind::Group* own = reinterpret_cast<typename Kind::Group*>(scratch.at_least(count * groups * sizeof *own));
      const auto product = matrix.product(kind, own, from, count);
      const bool shared = worth_sharing(count, matrix.outputs, matrix.inputs, awake);
      Division<Grouped<Kind::STORED, Kind::PARTS>> division(product, shared);
#pragma omp parallel if (shared)
      {
#pragma omp for
        for (int64_t group = 0; group < groups; group++)
          for (int64_t i = 0; i < count; i++)
            fill_group(own[group * count + i], x + (from + i) * x_stride, order, group, matrix.inputs);
        division.compute_share();
      }
    });
  });
}

// The groups of each row follow one another.
template <class Number>
void quantize_rows(const Number* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t number) {
  const Layout layout(number);
  const int64_t groups = layout.steps_of(inputs) * layout.groups;
  with_stored(layout, [&](auto kind) {
    auto* to = static_cast<typename decltype(kind)::Group*>(quantized);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t group = 0; group < groups; group++) fill_group(*to++, x + i * x_stride, nullptr, group, inputs);
  });
}

void multiply_quantized(const Matrix& matrix, const void* quantized, const int64_t* chosen, int64_t rows) {
  const int64_t groups = matrix.groups();
  with_stored(matrix.layout, [&](auto kind) {
    using Kind = decltype(kind);
    const auto* all = static_cast<const typename Kind::Group*>(quantized);
    matrix.each_block(rows, [&](int64_t from, int64_t count) {
      const auto* own = all + chosen[from] * groups;
      if (count > 1) {
        auto* copied = reinterpret_cast<typename Kind::Group*>(scratch.at_least(count * groups * sizeof *own));
        for (int64_t i = 0; i < count; i++)
          for (int64_t group = 0; group < groups; group++)
            copied[group * count + i] = all[chosen[from + i] * groups + group];
        own = copied;
      }
      const auto product = matrix.product(kind, own, from, count);
      Division<Grouped<Kind::STORED, Kind::PARTS>>(product, false).compute_share();
    });
  });
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] times weights in a layout, transposed, plus bias.
INFD_KERNEL(multiply_groups_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, int64_t awake) {
  multiply({Layout(layout), weights, outputs, inputs, bias, out, out_stride, wide}, x, x_stride, rows, awake);
}

INFD_KERNEL(multiply_groups_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, int64_t awake) {
  multiply({Layout(layout), weights, outputs, inputs, bias, out, out_stride, wide}, x, x_stride, rows, awake);
}

// See StackProduct; weights whose inputs are reordered are not supported.
INFD_KERNEL(quantize_groups_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(quantize_groups_float)
(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(multiply_quantized_groups)
(const void* quantized, const int64_t* chosen, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const void* bias, int64_t half, void* out, int64_t out_stride, int64_t wide, int64_t layout) {
  multiply_quantized({Layout(layout), weights, outputs, inputs, Bias(bias, half != 0), out, out_stride, wide}, quantized, chosen, rows);
}

// *bytes = the size of a quantized row.
INFD_KERNEL(quantized_bytes_groups)(int64_t inputs, int64_t number, int64_t* bytes) {
  const Layout layout(number);
  with_stored(layout, [&](auto kind) { *bytes = layout.steps_of(inputs) * layout.groups * int64_t{sizeof(typename decltype(kind)::Group)}; });
}
