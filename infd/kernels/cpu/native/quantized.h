// Rows quantized to int8: integers from -127 to 127, times one scale for each row; or by a stored scale and zero point.
//
// A panel of int8 weights begins with a header of 128 words: the outputs' scales, which are floats, then the initial
// values of the outputs' sums, see OFFSET. A panel of zero bytes is a matrix of zeros.

#pragma once

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t HEADER = 2 * PANEL;  // words

// VNNI multiplies unsigned with signed bytes, so 128 is added to each input. To compensate, each sum starts at -128
// times the sum of the output's weights.
constexpr int OFFSET = 128;

constexpr float LEAST = 1e-30f;  // rows of smaller magnitude become zeros: from 3e-37 down, a scale's inverse overflows

// The scale of a row; NaN if an element is not finite.
template <class Number>
float scale_of(const Number* x, int64_t count) {
  constexpr int CHAINS = 4;  // each waits for its last operation
  Vec most[CHAINS], spoilt[CHAINS];
  for (int chain = 0; chain < CHAINS; chain++) most[chain] = spoilt[chain] = set(0);
  const auto look = [&](int chain, Vec numbers) {
    most[chain] = max(most[chain], absolute(numbers));
    spoilt[chain] = fma(numbers, set(0), spoilt[chain]);
  };
  int64_t i = 0;
  for (; i + CHAINS * WIDTH <= count; i += CHAINS * WIDTH)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; chain++) look(chain, load(x + i + chain * WIDTH));
  for (; i + WIDTH <= count; i += WIDTH) look(0, load(x + i));
  if (i < count) look(1, load_first(x + i, count - i));
  const float largest_one = largest(max(max(most[0], most[1]), max(most[2], most[3])));
  return (largest_one < LEAST ? 0 : largest_one / 127) + sum(spoilt[0] + spoilt[1] + (spoilt[2] + spoilt[3]));
}

#if defined(__AVX512BW__)
using Ints = __m512i;
inline Ints no_ints() { return _mm512_setzero_si512(); }
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints rounded(Vec x) { return _mm512_cvtps_epi32(x); }
// Round WIDTH numbers to integers and store them as bytes, each XORed with `flip`; return the integers.
inline Ints put_bytes(Vec x, uint8_t* to, uint8_t flip) {
  const Ints whole = rounded(x);
  const __m128i bytes = _mm_xor_si128(_mm512_cvtepi32_epi8(whole), _mm_set1_epi8(static_cast<char>(flip)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  return whole;
}
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
// sums + factor * (starts / OFFSET), of integers.
inline Vec plus_offsets(Vec sums, const uint32_t* starts, int32_t factor) {
  const Ints each = _mm512_srai_epi32(_mm512_loadu_si512(starts), 7);
  const Ints more = _mm512_mullo_epi32(each, _mm512_set1_epi32(factor));
  return _mm512_castsi512_ps(plus(_mm512_castps_si512(sums), more));
}
inline Vec to_floats(Vec bits) { return _mm512_cvtepi32_ps(_mm512_castps_si512(bits)); }
#else
using Ints = __m256i;
inline Ints no_ints() { return _mm256_setzero_si256(); }
inline int32_t sum_of(Ints x) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline Ints rounded(Vec x) { return _mm256_cvtps_epi32(x); }
// Round WIDTH numbers to integers and store them as bytes, each XORed with `flip`; return the integers.
inline Ints put_bytes(Vec x, uint8_t* to, uint8_t flip) {
  const Ints whole = rounded(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128i bytes = _mm_xor_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(static_cast<char>(flip)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
  return whole;
}
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
// sums + factor * (starts / OFFSET), of integers.
inline Vec plus_offsets(Vec sums, const uint32_t* starts, int32_t factor) {
  const Ints each = _mm256_srai_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(starts)), 7);
  const Ints more = _mm256_mullo_epi32(each, _mm256_set1_epi32(factor));
  return _mm256_castsi256_ps(plus(_mm256_castps_si256(sums), more));
}
inline Vec to_floats(Vec bits) { return _mm256_cvtepi32_ps(_mm256_castps_si256(bits)); }
#endif

// Quantize a row; store its integers as bytes, each XORed with `flip`, padded to a multiple of 4; return the integers'
// sum.
template <class Number, class Scaled>
int32_t quantize_by(const Number* x, int64_t count, const Scaled& scaled, uint8_t* to, uint8_t flip) {
  Ints total = no_ints();
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) total = plus(total, put_bytes(scaled(load(x + i)), to + i, flip));
  if (i < count) {
    uint8_t last[WIDTH];
    total = plus(total, put_bytes(scaled(load_first(x + i, count - i)), last, flip));
    memcpy(to + i, last, 4 * quads_of(count - i));
  }
  return sum_of(total);
}

inline Vec inverse_of(float scale) { return set(scale > 0 ? 1 / scale : 0); }

template <class Number>
int32_t quantize(const Number* x, int64_t count, float scale, uint8_t* to, uint8_t flip) {
  const Vec inverse = inverse_of(scale);
  return quantize_by(x, count, [&](Vec numbers) { return numbers * inverse; }, to, flip);
}

// The same with a stored scale and zero point: integers from -128 to 127.
template <class Number>
void quantize_stored(const Number* x, int64_t count, float scale, float zero, uint8_t* to, uint8_t flip) {
  const Vec divisor = set(scale), offset = set(zero), least = set(-128), most = set(127);
  const auto scaled = [&](Vec numbers) { return min(max(numbers / divisor + offset, least), most); };
  quantize_by(x, count, scaled, to, flip);
}

}  // namespace
