// The layout of int4 weights: integers from -8 to 7, times a scale that an output's weights for 32 consecutive inputs
// share.
//
// A step of a panel stores the weights for 32 inputs: the bfloat16 scales of the 64 outputs, then four lines. A word
// stores an output's weights for eight inputs, each with 8 added: the first four in the lower halves of the word's four
// bytes, the other four in the upper halves. A panel of zero bytes is a matrix of zeros, because the scales are 0.

#pragma once

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t GROUP = 32;             // inputs per scale
constexpr int64_t LINES = GROUP / 8;      // lines of a step
constexpr int64_t SCALES = PANEL / 2;     // words of a step's scales
constexpr int64_t STEP = SCALES + LINES * PANEL;
constexpr int ZERO = 8;                   // the stored value of the integer 0

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

}  // namespace
