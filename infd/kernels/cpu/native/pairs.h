// bfloat16 weights as a Kind of products.h.
//
// Each result is accumulated in float32, pair after pair of inputs.

#pragma once

#include "products.h"
#include "tile_registers.h"

namespace {

// A word is two consecutive inputs.
struct Pairs {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = true, TILES = false, OPENS = false, HALVES = true;

  const uint16_t* numbers;
  int64_t stride;

  static constexpr int64_t step() { return PANEL; }
  uint32_t word(int64_t row, int64_t at) const {
    uint32_t pair;
    memcpy(&pair, numbers + row * stride + 2 * at, sizeof pair);
    return pair;
  }
  uint32_t half_word(int64_t row, int64_t at) const { return numbers[row * stride + 2 * at]; }
  Pairs from(int64_t row, int64_t at) const { return {numbers + row * stride + 2 * at, stride}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }
  static Vec start(const uint32_t*) { return set(0.0f); }

#if defined(__AMX_BF16__)
  const char* address(int64_t row) const { return reinterpret_cast<const char*>(numbers + row * stride); }
  static const uint32_t* start_line(const uint32_t*) { return nullptr; }
  template <int SUMS, int ROWS, int LINES>
  static void add_tiles() {
    add_pairs<SUMS, ROWS, LINES>();
  }
#endif

#if defined(__AVX512BF16__)
  using Weights = __m512bh;
  using Input = __m512bh;

  static Weights weights(const uint32_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Input input(uint32_t pair) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)); }
  static Vec add(Vec sums, const Weights& w, const Input& x) { return _mm512_dpbf16_ps(sums, w, x); }
#else
  struct Weights {
    Vec even, odd;
  };
  using Input = Weights;

  static Vec add(Vec sums, const Weights& w, const Input& x) { return fma(w.even, x.even, fma(w.odd, x.odd, sums)); }
#if defined(__AVX512F__)
  static Weights split(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000u)))};
  }
  static Weights weights(const uint32_t* p) { return split(_mm512_loadu_si512(p)); }
  static Input input(uint32_t pair) { return split(_mm512_set1_epi32(static_cast<int>(pair))); }
#else
  static Weights split(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000u)))};
  }
  static Weights weights(const uint32_t* p) { return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Input input(uint32_t pair) { return split(_mm256_set1_epi32(static_cast<int>(pair))); }
#endif
#endif
};

}  // namespace
