// Ordering rows of bfloat16 as the lines of a panel.

#pragma once

#include "packing.h"
#include "vector.h"

namespace {

// Store pairs [from, inputs / 2) of a row as an output's words, and the last input if `inputs` is odd. `words` begin with
// pair `from`.
void place(uint32_t* words, const uint16_t* row, int64_t inputs, int64_t from) {
  for (int64_t at = from; at < inputs / 2; at++) memcpy(words + (at - from) * PANEL, row + 2 * at, sizeof(uint32_t));
  if (inputs % 2) words[(inputs / 2 - from) * PANEL] = row[inputs - 1];
}

// Store lines [begin, end) of the panel of rows [PANEL, inputs].
void place_lines(uint32_t* words, const uint16_t* rows, int64_t inputs, int64_t begin, int64_t end) {
  const uint32_t* of[PANEL];
  for (int64_t i = 0; i < PANEL; i++) of[i] = reinterpret_cast<const uint32_t*>(rows + i * inputs);
  const int64_t last = 2 * end < inputs ? 2 * end : inputs;  // the lines' inputs end here
  int64_t at = begin;
  for (; at + WIDTH <= last / 2; at += WIDTH)
    for (int64_t i = 0; i < PANEL; i += WIDTH) transpose(of + i, at, words + (at - begin) * PANEL + i, PANEL);
  for (int64_t i = 0; i < PANEL; i++) place(words + (at - begin) * PANEL + i, rows + i * inputs, last, at);
}

}  // namespace
