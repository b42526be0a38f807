// Packing matrices into panels of int8, and unpacking rows.

#include "packing.h"
#include "quantized.h"
#include "scratch.h"

namespace {

thread_local Scratch scratch;

// The header of an output's panel, and the output's column in the panel.
struct Output {
  uint32_t* header;
  int64_t column;

  Output(const uint32_t* weights, int64_t output, int64_t quads)
      : header(const_cast<uint32_t*>(weights) + output / PANEL * (HEADER + quads * PANEL)), column(output % PANEL) {}
  uint32_t* words() const { return header + HEADER + column; }
  float scale() const { return reinterpret_cast<const float*>(header)[column]; }

  // Write the output's two words of the header, given its scale and the sum of its weights.
  void describe(float scale, int32_t sum) const {
    const int32_t start = -OFFSET * sum;
    memcpy(header + column, &scale, sizeof scale);
    memcpy(header + PANEL + column, &start, sizeof start);
  }
};

template <class Number>
void pack(uint32_t* weights, int64_t inputs, const Number* rows, int64_t first, int64_t count) {
  const int64_t quads = quads_of(inputs);
  each_panel(first, count, [&](int64_t from, int64_t to) {
    uint32_t* lines = reinterpret_cast<uint32_t*>(scratch.at_least(PANEL * quads * 4));
    for (int64_t i = from; i < to; i++) {
      const Number* row = rows + (i - first) * inputs;
      const float scale = scale_of(row, inputs);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(lines + (i - from) * quads);
      Output(weights, i, quads).describe(scale, quantize(row, inputs, scale, bytes, 0));
    }
    uint32_t* words = Output(weights, from, quads).words();
    int64_t at = 0;
    if (to - from == PANEL) {
      const uint32_t* of[PANEL];
      for (int64_t i = 0; i < PANEL; i++) of[i] = lines + i * quads;
      for (; at + WIDTH <= quads; at += WIDTH)
        for (int64_t i = 0; i < PANEL; i += WIDTH) transpose(of + i, at, words + at * PANEL + i, PANEL);
    }
    for (; at < quads; at++)
      for (int64_t i = 0; i < to - from; i++) words[at * PANEL + i] = lines[i * quads + at];
  });
}

template <class Number>
void unpack(Number* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count) {
  const int64_t quads = quads_of(inputs);
  each_row(out, inputs, outputs, rows, count, [&](int64_t number, Number* row) {
    const Output output(weights, number, quads);
    const Vec scale = set(output.scale());
    for (int64_t at = 0; at < quads; at += WIDTH / 4) {
      uint32_t gathered[WIDTH] = {};
      for (int64_t k = 0; k < WIDTH / 4 && at + k < quads; k++) gathered[k] = output.words()[(at + k) * PANEL];
      const Vec numbers = load(reinterpret_cast<const int8_t*>(gathered)) * scale;
      const int64_t left = inputs - 4 * at;
      if (left >= WIDTH) {
        store(row + 4 * at, numbers);
      } else {
        Number last[WIDTH];
        store(last, numbers);
        memcpy(row + 4 * at, last, left * sizeof(Number));
      }
    }
  });
}

}  // namespace

// Store rows [count, inputs] as the outputs from `first` on.
INFD_KERNEL(pack_int8_bf16)(uint32_t* weights, int64_t, int64_t inputs, const bf16* rows, int64_t first, int64_t count) {
  pack(weights, inputs, rows, first, count);
}
INFD_KERNEL(pack_int8_float)(uint32_t* weights, int64_t, int64_t inputs, const float* rows, int64_t first, int64_t count) {
  pack(weights, inputs, rows, first, count);
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_int8_bf16)
(bf16* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t) {
  unpack(out, weights, outputs, inputs, rows, count);
}
INFD_KERNEL(unpack_int8_float)
(float* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t) {
  unpack(out, weights, outputs, inputs, rows, count);
}
