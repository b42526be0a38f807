// Packing matrices into panels of int4 in groups, and unpacking rows of all weights in groups.

#include "groups.h"
#include "packing.h"
#include "quantized.h"

namespace {

// The step of a panel that stores a group of an output's weights, the group's first line, and the output's column.
struct Place {
  uint32_t *step, *lines;
  int64_t column;

  Place(const Layout& layout, const uint32_t* panels, int64_t output, int64_t steps, int64_t group)
      : step(const_cast<uint32_t*>(panels) + (output / PANEL * steps + group / layout.groups) * layout.step()),
        lines(step + layout.to_lines() + group % layout.groups * layout.lines() * PANEL),
        column(output % PANEL) {}
  uint32_t* word(int64_t line) const { return lines + line * PANEL + column; }

  // The integer of the group's input k.
  int integer(const Layout& layout, int64_t k) const {
    if (layout.table == Layout::BYTES) return static_cast<int>(*word(k / 4) >> k % 4 * 8 & 255) + layout.least();
    if (layout.table == Layout::SIXES) {
      const int64_t line = k / 16 * 3, at = k % 4 * 8;
      const int upper = *word(line) >> (at + k % 16 / 4 * 2) & 3, lower = *word(line + 1 + k % 16 / 8) >> (at + k % 8 / 4 * 4) & 15;
      return (upper << 4 | lower) + layout.least();
    }
    const int nibble = *word(k / 8) >> (k % 4 * 8 + k % 8 / 4 * 4) & 15;
    return layout.table == 0 ? nibble + layout.least() : TABLES[layout.table][nibble];
  }

  // The first column of the vector that contains the output's column; the output's number in that vector.
  int64_t vector() const { return column / WIDTH * WIDTH; }
  float number(Vec numbers) const {
    float of[WIDTH];
    store(of, numbers);
    return of[column % WIDTH];
  }
};

constexpr Layout PLAIN(0);  // of matrices that are quantized here: bfloat16 scales of 32 inputs

// The scale that maps a group's weight of largest magnitude to -8; NaN if any weight is not finite.
float scale_of_group(const float* x) {
  Vec most = set(0), least = set(0), spoilt = set(0);
  for (int64_t i = 0; i < GROUP; i += WIDTH) {
    const Vec numbers = load(x + i);
    most = max(most, numbers);
    least = max(least, set(0) - numbers);
    spoilt = fma(numbers, set(0), spoilt);
  }
  const float above = largest(most), below = largest(least);
  const float farthest = above > below ? above : -below;
  return (fabsf(farthest) < LEAST ? 0 : farthest / -ZERO) + sum(spoilt);
}

void put_group(const float* x, const Place& place) {
  bf16* stored = reinterpret_cast<bf16*>(place.step) + place.column;
  set(stored, scale_of_group(x));
  const float scale = to_float(*stored);
  const Vec inverse = set(scale != 0 ? 1 / scale : 0);  // if the scale is NaN, the integers do not matter
  uint8_t numbers[GROUP];
  for (int64_t i = 0; i < GROUP; i += WIDTH) {
    const Vec whole = round_to_whole(load(x + i) * inverse);
    put_bytes(min(set(ZERO - 1), max(set(-ZERO), whole)) + set(ZERO), numbers + i, 0);
  }
  for (int64_t line = 0; line < LINES; line++) {
    uint32_t first, second;
    memcpy(&first, numbers + 8 * line, sizeof first);
    memcpy(&second, numbers + 8 * line + 4, sizeof second);
    *place.word(line) = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
  }
}

template <class Number>
void pack(uint32_t* weights, int64_t inputs, const Number* rows, int64_t first, int64_t count) {
  const int64_t groups = groups_of(inputs);
  each_panel(first, count, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t left = inputs - group * GROUP;
        float x[GROUP] = {};
        convert(rows + (i - first) * inputs + group * GROUP, x, left < GROUP ? left : GROUP);
        put_group(x, Place(PLAIN, weights, i, groups, group));
      }
  });
}

template <class Number>
void unpack(Number* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count,
            int64_t number) {
  const Layout layout(number);
  const int32_t* order = layout.order(weights);
  const uint32_t* panels = layout.panels(weights, inputs);
  const int64_t groups = groups_of(inputs), steps = layout.steps_of(inputs);
  each_row(out, inputs, outputs, rows, count, [&](int64_t output, Number* row) {
    for (int64_t group = 0; group < groups; group++) {
      const Place place(layout, panels, output, steps, group);
      float x[GROUP];
      for (int64_t part = 0; part < layout.parts; part++) {
        const int64_t set_of = layout.set_of(group % layout.groups, part), each = GROUP / layout.parts;
        const float scale = place.number(layout.load_scales(place.step, set_of, place.vector()));
        const float minimum = layout.minima ? place.number(layout.load_minima(place.step, set_of, place.vector())) : 0;
        const int zero = layout.zeros ? layout.zero_points(place.step, set_of)[place.column] : 0;
        for (int64_t k = part * each; k < (part + 1) * each; k++) {
          const float scaled = static_cast<float>(place.integer(layout, k) - zero) * scale;
          x[k] = layout.minima ? scaled + minimum : scaled;
        }
      }
      const int64_t left = inputs - group * GROUP, filled = left < GROUP ? left : GROUP;
      if (order == nullptr)
        convert(x, row + group * GROUP, filled);
      else
        for (int64_t k = 0; k < filled; k++) set(row + order[group * GROUP + k], x[k]);
    }
  });
}

}  // namespace

// Store rows [count, inputs] as the outputs from `first` on.
INFD_KERNEL(pack_groups_bf16)(uint32_t* weights, int64_t, int64_t inputs, const bf16* rows, int64_t first, int64_t count) {
  pack(weights, inputs, rows, first, count);
}
INFD_KERNEL(pack_groups_float)(uint32_t* weights, int64_t, int64_t inputs, const float* rows, int64_t first, int64_t count) {
  pack(weights, inputs, rows, first, count);
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_groups_bf16)
(bf16* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t layout) {
  unpack(out, weights, outputs, inputs, rows, count, layout);
}
INFD_KERNEL(unpack_groups_float)
(float* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t layout) {
  unpack(out, weights, outputs, inputs, rows, count, layout);
}
