// How a matrix of bfloat16 weights [outputs, inputs] lies in memory, packed for products.
//
// Panels of 64 outputs, one after the other. In a panel, step after step along the inputs, each output has a pair of
// neighbouring inputs: one 32-bit word, so a step is 64 words, 256 bytes. A thread that computes consecutive panels
// reads one stream from its first byte to its last. Missing outputs and inputs are zeros.

#pragma once

#include "kernel.h"

namespace {

constexpr int64_t PANEL = 64;

inline int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
inline int64_t pairs_of(int64_t inputs) { return (inputs + 1) / 2; }

}  // namespace
