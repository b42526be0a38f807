// The memory layout of a weight matrix [outputs, inputs]: panels, ordered for products.
//
// A panel holds 64 outputs. Line after line along the inputs, each output has consecutive inputs in one 32-bit word: two
// of bfloat16, four of int8, eight of int4. So a line is 64 words, 256 bytes, and a thread that computes consecutive
// panels reads memory sequentially. Inputs are padded with zeros.
//
// Panels of int8 begin with a header (quantized.h); groups of four int4 lines begin with their scales (nibbles.h).

#pragma once

#include "kernel.h"

namespace {

constexpr int64_t PANEL = 64;

inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
inline int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }
constexpr int64_t quads_of(int64_t inputs) { return (inputs + 3) / 4; }

}  // namespace
