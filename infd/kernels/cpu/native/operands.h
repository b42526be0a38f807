// The operands of attention's products, in units of 32 bits: one float, or two bfloat16 if the CPU multiplies bfloat16.

#pragma once

#include "vector.h"

namespace {

template <int N>
struct Constant {
  static constexpr int value = N;
};

struct Singles {
  static constexpr int64_t PER_UNIT = 1;
  using Number = float;
  static Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // WIDTH units of consecutive elements; along_first: the first `count` elements, followed by zeros.
  template <class Cached>
  static Vec along(const Cached* p) { return load(p); }
  template <class Cached>
  static Vec along_first(const Cached* p, int64_t count) { return load_first(p, count); }

  // WIDTH units; each consists of the elements at one position of PER_UNIT rows.
  template <class Cached>
  static Vec across(const Cached* const* rows, int64_t at) { return load(rows[0] + at); }
  template <class Cached>
  static Vec across_first(const Cached* const* rows, int64_t at, int64_t count) { return load_first(rows[0] + at, count); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int64_t PER_UNIT = 2;
  using Number = bf16;
  static Vec multiply_add(Vec a, Vec b, Vec c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Vec along(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec along(const int8_t* p) { return joined(load(p), load(p + WIDTH)); }
  static Vec along_first(const bf16* p, int64_t count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, p));
  }
  static Vec along_first(const int8_t* p, int64_t count) {
    return count < WIDTH ? joined(load_first(p, count), set(0)) : joined(load(p), load_first(p + WIDTH, count - WIDTH));
  }
  static Vec across(const bf16* const* rows, int64_t at) {
    const __m256i* low = reinterpret_cast<const __m256i*>(rows[0] + at);
    const __m256i* high = reinterpret_cast<const __m256i*>(rows[1] + at);
    return interleaved(_mm256_loadu_si256(low), _mm256_loadu_si256(high));
  }
  static Vec across_first(const bf16* const* rows, int64_t at, int64_t count) {
    const uint16_t mask = (1 << count) - 1;
    return interleaved(_mm256_maskz_loadu_epi16(mask, rows[0] + at), _mm256_maskz_loadu_epi16(mask, rows[1] + at));
  }
  // bfloat16 represents all int8 integers exactly, so the upper halves of their floats suffice.
  static Vec across(const int8_t* const* rows, int64_t at) { return paired(load(rows[0] + at), load(rows[1] + at)); }
  static Vec across_first(const int8_t* const* rows, int64_t at, int64_t count) {
    return paired(load_first(rows[0] + at, count), load_first(rows[1] + at, count));
  }
  static Vec paired(Vec low, Vec high) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high)));
  }
  static Vec joined(Vec first, Vec second) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(second, first)); }
  static Vec interleaved(__m256i low, __m256i high) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both));
  }
};
using Best = Pairs;
#else
using Best = Singles;
#endif

inline Vec load_units(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
inline Vec repeat_unit(const uint32_t* p) { return set(*reinterpret_cast<const float*>(p)); }

// A matrix in scratch memory.
template <class T>
struct Matrix {
  T* at;
  int64_t pitch;

  T* row(int64_t i) const { return at + i * pitch; }
  Matrix from(int64_t i) const { return {row(i), pitch}; }
};

using Units = Matrix<uint32_t>;

}  // namespace
