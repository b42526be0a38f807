// The layout of int4 weights: integers from -8 to 7, times a scale for each output and 32 inputs.
//
// A step of a panel is 32 inputs: the bfloat16 scales of its 64 outputs, then four lines. The four bytes of a word hold the
// first four of its inputs in their lower halves and the other four in their upper halves, each with 8 added. A panel of
// zero bytes is a matrix of zeros, because its scales are 0.

#pragma once

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t GROUP = 32;             // inputs per scale
constexpr int64_t LINES = GROUP / 8;      // lines of a step
constexpr int64_t SCALES = PANEL / 2;     // words of a step's scales
constexpr int64_t STEP = SCALES + LINES * PANEL;
constexpr int ZERO = 8;                   // the stored value of 0

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

}  // namespace
