// How a matrix of weights [outputs, inputs] lies in memory, in panels, for products.
//
// Panels of 64 outputs, one after the other. In a panel, line after line along the inputs, each output has some
// neighbouring inputs in one 32-bit word: two of bfloat16, four of int8, eight of int4. So a line is 64 words, 256 bytes.
// A thread that computes consecutive panels reads one stream from its first byte to its last. Missing inputs are zeros.
//
// A panel of int8 begins with a header, see quantized.h; four lines of int4 begin with their scales, see nibbles.h.

#pragma once

#include "kernel.h"

namespace {

constexpr int64_t PANEL = 64;

inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
inline int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }
constexpr int64_t quads_of(int64_t inputs) { return (inputs + 3) / 4; }

}  // namespace
