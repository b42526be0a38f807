// The layout of fp8 weights (E4M3, without infinities), times a float32 scale that an output's weights for some
// multiple of 4 consecutive inputs share.
//
// A step of a panel stores the weights for the inputs of one scale: the 64 outputs' scales, then a line for each four
// inputs. A word stores an output's weights for four inputs: bytes of E4M3, or with some instructions other codes for them (Code
// in linear_float8.cpp). A panel of zero bytes is a matrix of zeros.

#pragma once

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t LARGEST_STEP = 128;  // inputs

// A layout as a number: the inputs that share a scale, 32, 64 or 128.
struct Float8Layout {
  int64_t inputs;

  int64_t lines() const { return inputs / 4; }
  int64_t step() const { return PANEL + lines() * PANEL; }
  int64_t steps_of(int64_t count) const { return (count + inputs - 1) / inputs; }
};

constexpr int BIAS = 127 - 7;              // between the exponents of float, or bfloat16, and of E4M3
constexpr float SUBNORMAL = 0x1p-9f;       // the least number above 0
constexpr int NOT_A_NUMBER = 0x7f;

// The value of a byte.
inline float value_of(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  uint32_t bits = static_cast<uint32_t>(exponent + BIAS) << 23 | static_cast<uint32_t>(fraction) << 20;
  float number;
  memcpy(&number, &bits, sizeof number);
  if (exponent == 0) number = static_cast<float>(fraction) * SUBNORMAL;
  if ((byte & 0x7f) == NOT_A_NUMBER) number = NAN;
  return byte & 0x80 ? -number : number;
}

}  // namespace
