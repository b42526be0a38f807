// Weights in groups as a Kind of products.h: the quantized inputs, and the weights as they are stored or prepared; layout
// in groups.h.
//
// The rows of x are quantized to int8 first, in groups of 32 with one scale each, which loses about as much precision
// as rounding to bfloat16. Sums over a group are exact integers; the groups' sums are accumulated in float32. Weights
// are multiplied as unsigned numbers: with 8, 32 or 128 added, or, if they are entries of a table, with the least entry
// subtracted. To compensate, each integer sum starts at the least weight, minus the zero point, times the sum of the
// group's inputs; or zero points are subtracted from weights before they are multiplied (Grouped::lift). A minimum is
// multiplied by that sum too, and added in float32.

#pragma once

#include "groups.h"
#include "products.h"
#include "quantized.h"

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
// Of vectors of floats, what is largest as integers.
inline Vec largest_bits(Vec a, Vec b) { return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b))); }
inline float largest_of_bits(Vec a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64(bits, 1));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
}
inline Ints plus_bytes(Ints a, Ints b) { return _mm512_add_epi8(a, b); }
// Minus each word, as four bytes.
inline Ints repeated(Ints negated) {
  const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
  return _mm512_shuffle_epi8(_mm512_sub_epi32(_mm512_setzero_si512(), negated), first);
}
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
inline Vec largest_bits(Vec a, Vec b) { return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b))); }
inline float largest_of_bits(Vec a) {
  const __m256i eight = _mm256_castps_si256(a);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
}
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
// Whether weights are prepared once for several groups of rows. With an instruction that adds products to 32-bit sums, four
// bits and eight are multiplied as they are stored: preparing them takes as long as it saves.
constexpr bool opens(Stored stored) { return !HOLDS_WEIGHTS && !is_open(stored) && (SPLITS || stored == SIXES); }
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

// scale_of GROUP numbers, with one reduction: magnitudes are in the order of their bits, and the largest of these are not finite.
template <class Number>
float scale_of_group(const Number* x) {
  Vec most = absolute(load(x));
#pragma GCC unroll 4
  for (int i = WIDTH; i < GROUP; i += WIDTH) most = largest_bits(most, absolute(load(x + i)));
  const float largest_one = largest_of_bits(most);
  return largest_one < LEAST ? 0 : largest_one / 127 + 0 * largest_one;
}

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
    scale = scale_of_group(x);
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
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = opens(STORED), WIDE = is_wide(STORED);
  static constexpr int TURN = quads_of_a_turn(STORED);
  static constexpr bool FIRST_OPENS = false, SOME_OPENED = false;
  static constexpr bool LIFTABLE = STORED == NIBBLES && !SPLITS;
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

  // Of a part of a group of a step: the scales, and the minima, of WIDTH outputs from `column` on.
  INLINE Vec load_scales(const uint32_t* step, int64_t group, int64_t part, int64_t column) const {
    if constexpr (is_open(STORED)) return load(reinterpret_cast<const float*>(set_at(step, group, part)) + column);
    return layout.load_scales(step, layout.set_of(group, part), column);
  }
  INLINE Vec load_minima(const uint32_t* step, int64_t group, int64_t part, int64_t column) const {
    if constexpr (is_open(STORED)) return load(reinterpret_cast<const float*>(set_at(step, group, PARTS + part)) + column);
    return layout.load_minima(step, layout.set_of(group, part), column);
  }
  // Those of all outputs, stored in `room` unless they are floats in memory.
  INLINE const float* scales(const uint32_t* step, int64_t group, int64_t part, float* room) const {
    if constexpr (is_open(STORED)) return reinterpret_cast<const float*>(set_at(step, group, part));
    return layout.scales_of(step, layout.set_of(group, part), room);
  }
  INLINE const float* minima(const uint32_t* step, int64_t group, int64_t part, float* room) const {
    if constexpr (is_open(STORED)) return reinterpret_cast<const float*>(set_at(step, group, PARTS + part));
    return layout.minima_of(step, layout.set_of(group, part), room);
  }
  const uint32_t* set_at(const uint32_t* step, int64_t group, int64_t set) const { return step + group * group_words() + set * PANEL; }
  // Minus the least weight, which stored numbers leave out.
  Ints zeros(const uint32_t* step, int64_t group, int64_t part, int64_t column) const {
    if constexpr (is_open(STORED)) return words_at(set_at(step, group, PARTS * (1 + layout.minima) + part) + column);
    return plus(widened(layout.zero_points(step, layout.set_of(group, part)) + column), ints(-layout.least()));
  }
  // Lifted, weights of four bits are unsigned bytes after the zero point was subtracted: with LIFTED added.
  static constexpr int LIFTED = 128;
  Ints lift(const uint32_t* step, int64_t group, int64_t part, int64_t column) const {
    return repeated(plus(zeros(step, group, part, column), ints(-LIFTED)));
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

#if defined(__AVX512VNNI__)
// Beside products that keep sums in registers, preparing has less to save.
template <int PARTS>
constexpr int64_t OPENS_FROM<Grouped<SIXES, PARTS>> = 6;
#endif

// Start the sums of a part of a group, for VECTORS vectors of outputs from `column` on; LIFTS: of lifted weights.
template <bool LIFTS, int ROWS, int VECTORS, class Kind>
INLINE void start(const Kind& x, const uint32_t* step, int64_t group, int64_t part, int64_t column, const typename Kind::GroupInputs* inputs,
           Ints (&sum)[ROWS][VECTORS]) {
  if (!LIFTS && x.layout.zeros) {
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
      const Ints zero = x.zeros(step, group, part, column + j * WIDTH);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) sum[i][j] = small_products(zero, ints(-inputs[i].totals[part]));
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const Ints start = ints((LIFTS ? -Kind::LIFTED : x.layout.least()) * inputs[i].totals[part]);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sum[i][j] = start;
    }
  }
}

// Add the products of a quad of the turn that begins with a pair; LIFTS: `lift` is added to its weights.
template <int NUMBER, bool LIFTS, int ROWS, int VECTORS, class Kind>
INLINE void add_quad(const Kind& x, const uint32_t* lines, int64_t pair, int64_t column, const typename Kind::GroupInputs* inputs,
              const Ints (&lift)[VECTORS], Ints (&in)[ROWS][VECTORS]) {
  const int64_t quad = 2 * pair + NUMBER;
  if constexpr (ROWS == 1) {
    const auto input = inputs[0].quad(quad);
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++)
      in[0][j] = add_products(in[0][j], x.template weights<NUMBER>(lines, pair, column + j * WIDTH), input);
  } else {
    typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) {
      w[j] = x.template weights<NUMBER>(lines, pair, column + j * WIDTH);
      if constexpr (LIFTS) w[j] = plus_bytes(w[j], lift[j]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      const auto input = inputs[i].quad(quad);
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) in[i][j] = add_products(in[i][j], w[j], input);
    }
  }
}

template <int NUMBER, int ROWS, int VECTORS, class Kind>
INLINE void add_quad(const Kind& x, const uint32_t* lines, int64_t pair, int64_t column, const typename Kind::GroupInputs* inputs,
              Ints (&in)[ROWS][VECTORS]) {
  const Ints none[VECTORS] = {};
  add_quad<NUMBER, false>(x, lines, pair, column, inputs, none, in);
}

// Compute the sums before what follows: else products and loads of later quads move ahead, and sums are spilled.
template <int ROWS, int VECTORS>
INLINE void settle(Ints (&in)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) asm volatile("" : "+v"(in[i][j])::"memory");
}

}  // namespace
