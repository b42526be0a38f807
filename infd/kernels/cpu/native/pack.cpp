// Packing bfloat16 matrices into panels, and unpacking rows.

#include "pack_pairs.h"

namespace {

// The address of an output's first word.
uint32_t* words_of(const uint32_t* weights, int64_t output, int64_t pairs) {
  return const_cast<uint32_t*>(weights) + output / PANEL * pairs * PANEL + output % PANEL;
}

}  // namespace

// Store rows [count, inputs] as the outputs from `first` on.
INFD_KERNEL(pack_bf16_bf16)(uint32_t* weights, int64_t, int64_t inputs, const uint16_t* rows, int64_t first, int64_t count) {
  const int64_t pairs = pairs_of(inputs);
  each_panel(first, count, [&](int64_t from, int64_t to) {
    if (to - from == PANEL)
      place_lines(words_of(weights, from, pairs), rows + (from - first) * inputs, inputs, 0, pairs);
    else
      for (int64_t i = from; i < to; i++) place(words_of(weights, i, pairs), rows + (i - first) * inputs, inputs, 0);
  });
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_bf16_bf16)
(uint16_t* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t) {
  const int64_t pairs = pairs_of(inputs);
  each_row(out, inputs, outputs, rows, count, [&](int64_t output, uint16_t* row) {
    const uint32_t* words = words_of(weights, output, pairs);
    for (int64_t at = 0; at < inputs / 2; at++) memcpy(row + 2 * at, words + at * PANEL, sizeof(uint32_t));
    if (inputs % 2) row[inputs - 1] = static_cast<uint16_t>(words[inputs / 2 * PANEL]);
  });
}
