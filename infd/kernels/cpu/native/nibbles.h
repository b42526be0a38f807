// Weights as int4: whole numbers from -8 to 7, times a scale that each output has for every 32 inputs.
//
// A step of a panel is 32 inputs: the scales of its 64 outputs, of bfloat16, then four lines. The bytes of a word hold the
// first four of its inputs in their lower halves and the other four in their upper ones, each with 8 added. All zeros
// is a matrix of zeros, by its scales.

#pragma once

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t GROUP = 32;             // inputs
constexpr int64_t LINES = GROUP / 8;      // of a step
constexpr int64_t SCALES = PANEL / 2;     // words before them
constexpr int64_t STEP = SCALES + LINES * PANEL;
constexpr int ZERO = 8;                   // what stands for 0

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

}  // namespace
