// Quantize inputs of products and decode them again: see inputs.h.
//
// Loops over a group have no dependence between iterations, so that the compiler vectorizes them, also where `out` is x.

#include "inputs.h"

#include "sharing.h"
#include "vector.h"

namespace {

constexpr int64_t ENOUGH = 1 << 14;  // with more elements than this, waking other threads saves time
constexpr float MOST_OF[] = {448, 127, 6};  // by InputRounding::Numbers
constexpr float MOST_FP8 = 448, MOST_FP4 = 6;
constexpr float LEAST_FP8 = 0.125f;  // in place of a group's scale that is 0
constexpr uint32_t SMALLEST = 0x03800000;  // 2^-120

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t widened(const float* x) { return bits_of(*x); }
inline uint32_t widened(const uint16_t* x) { return static_cast<uint32_t>(*x) << 16; }
inline void put(float value, float* to) { *to = value; }
// Round to bfloat16, to nearest even. NaN stays NaN: its fraction is set beforehand.
inline void put(float value, uint16_t* to) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  *to = static_cast<uint16_t>((value != value ? 0x7fc00000u : rounded) >> 16);
}

// The number of E4M3 nearest to x, even where two are as near; x is between -448 and 448, or NaN.
inline float nearest_fp8(float x) {
  const uint32_t bits = bits_of(x);
  const float normal = float_of((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
  constexpr float SHIFT = 24576;  // 1.5 * 2^14: the last bit of its sums with small numbers is worth 2^-9
  const float subnormal = x + SHIFT - SHIFT;
  return (bits & 0x7fffffff) < 0x3c800000u ? subnormal : normal;  // 2^-6
}

// The number of E2M1 nearest to x, even where two are as near; x is between -6 and 6, or NaN.
inline float nearest_fp4(float x) {
  const uint32_t bits = bits_of(x);
  const float normal = float_of((bits + 0x1fffff + (bits >> 22 & 1)) & 0xffc00000u);
  constexpr float SHIFT = 6291456;  // 1.5 * 2^22: the last bit of its sums with small numbers is worth 2^-1
  const float subnormal = x + SHIFT - SHIFT;
  return (bits & 0x7fffffff) < 0x3f800000u ? subnormal : normal;
}

inline float clamped(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

template <class Number>
float scale_of(const Number* x, int64_t count, const InputRounding& rounding) {
  const bool fp4 = rounding.numbers == InputRounding::FP4;
  if (rounding.scale != nullptr && !fp4) return *rounding.scale;
  uint32_t most = 0;  // as integers, magnitudes are in the same order; NaN is the largest
  for (int64_t i = 0; i < count; i++) {
    const uint32_t magnitude = widened(x + i) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  float scale = float_of(most) / MOST_OF[rounding.numbers];
  if (rounding.scale != nullptr) {
    const float local = nearest_fp8(clamped(scale / *rounding.scale, -MOST_FP8, MOST_FP8));
    return (local == 0 ? LEAST_FP8 : local) * *rounding.scale;
  }
  if (rounding.powers && fp4) {
    if (most < SMALLEST) return 1;
    // The power of two by which the largest magnitude becomes at least 3.5, and less than 7.
    if (most < 0x7f800000u) scale = float_of((most + 0x200000) & 0xff800000u) / 4;
  } else if (rounding.powers && most < 0x7f800000u && scale >= 0x1p-126f) {
    const uint32_t bits = bits_of(scale);
    scale = float_of((bits + 0x7fffff) & 0xff800000u);  // the next power of two
  }
  return scale == 0 ? 1 : scale;
}

template <class Number>
void round_group(const Number* x, Number* out, int64_t count, const InputRounding& rounding) {
  const float scale = scale_of(x, count, rounding);
  if (rounding.numbers == InputRounding::INT8) {
    const float zero = rounding.zero != nullptr ? *rounding.zero : 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
      const float whole = __builtin_rintf(float_of(widened(x + i)) / scale + zero);
      put((clamped(whole, -128, 127) - zero) * scale, out + i);
    }
  } else if (rounding.numbers == InputRounding::FP4) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++)
      put(nearest_fp4(clamped(float_of(widened(x + i)) / scale, -MOST_FP4, MOST_FP4)) * scale, out + i);
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++)
      put(nearest_fp8(clamped(float_of(widened(x + i)) / scale, -MOST_FP8, MOST_FP8)) * scale, out + i);
  }
}

template <class Number>
void round_rows(const Number* x, int64_t stride, Number* out, int64_t rows, int64_t inputs, const InputRounding& rounding) {
  const int64_t size = rounding.group ? rounding.group : inputs;
#pragma omp parallel for if (rows > 1 && rows * inputs > ENOUGH)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t at = 0; at < inputs; at += size)
      round_group(x + row * stride + at, out + row * inputs + at, inputs - at < size ? inputs - at : size, rounding);
}

}  // namespace

// out [rows, inputs] = x [rows, inputs], rounded. half: numbers are bfloat16; else float.
INFD_KERNEL(round_inputs)
(int64_t half, const void* x, int64_t stride, void* out, int64_t rows, int64_t inputs, const InputRounding* rounding) {
  if (half)
    round_rows(static_cast<const uint16_t*>(x), stride, static_cast<uint16_t*>(out), rows, inputs, *rounding);
  else
    round_rows(static_cast<const float*>(x), stride, static_cast<float*>(out), rows, inputs, *rounding);
}
