// A block of keys and values: where the cache or the step's own tokens have its rows, and their placement in scratch
// memory, so that products with many queries load whole vectors.

#pragma once

#include "attention.h"
#include "operands.h"
#include "row.h"

namespace {

constexpr int64_t BLOCK = 64;  // keys of a block; a block's keys, values and scores fit the L1 and L2 caches

// Prefetches rows into the L2 cache while `meanwhile` other rows are processed, evenly spread over the latter.
template <class Number>
struct Prefetch {
  const Number* const* rows;
  int64_t count, share;  // rows to prefetch; rows to prefetch for each processed row, times 65536

  Prefetch(const Number* const* rows, int64_t count, int64_t meanwhile)
      : rows(rows), count(count), share(((count << 16) + meanwhile - 1) / meanwhile) {}

  // Always inlined, because a call inside the loops of a product would spill all sums to memory.
  [[gnu::always_inline]] void fetch(int64_t first, int64_t rows_now, int64_t size) const {
    const int64_t end = (first + rows_now) * share >> 16;
    for (int64_t i = first * share >> 16; i < end && i < count; i++) {
      const char* row = reinterpret_cast<const char*>(rows[i]);
      for (int64_t at = 0; at < size * int64_t{sizeof(Number)}; at += 64) _mm_prefetch(row + at, _MM_HINT_T1);
    }
  }
};

// The addresses of one block's keys and values, padded to BLOCK by repeating the last key and value, so that padding
// reads no unwritten memory.
template <class Cached>
struct KeyBlock {
  const Cached* k[BLOCK];
  const Cached* v[BLOCK];
  int64_t count;

  void find(const AttentionStep& step, const AttentionLayer& layer, int64_t span, int64_t head, int64_t begin, int64_t end) {
    if (step.packed) return find_packed(step, layer, span, head, begin, end);
    const int32_t* pages = step.table + span * step.table_width;
    int64_t page = begin / step.page_tokens, slot = begin % step.page_tokens;
    count = end - begin;
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = (pages[page] * layer.kv_heads + head) * step.page_tokens + slot;
      const int64_t at = row * row_size<Cached>(layer.size) + FIRST<Cached>;
      k[i] = static_cast<const Cached*>(layer.k) + at;
      v[i] = static_cast<const Cached*>(layer.v) + at;
      if (++slot == step.page_tokens) page++, slot = 0;
    }
    for (int64_t i = count; i < BLOCK; i++) k[i] = k[count - 1], v[i] = v[count - 1];
  }

  void find_packed(const AttentionStep& step, const AttentionLayer& layer, int64_t span, int64_t head, int64_t begin,
                   int64_t end) {
    const int64_t first = (step.offsets[span] + begin) * layer.kv_stride + head * layer.size;
    count = end - begin;
    for (int64_t i = 0; i < BLOCK; i++) {
      const int64_t at = first + (i < count ? i : count - 1) * layer.kv_stride;
      k[i] = static_cast<const Cached*>(layer.k) + at;
      v[i] = static_cast<const Cached*>(layer.v) + at;
    }
  }

  int64_t padded() const { return whole_vectors(count); }
};

// The dequantization scales of a block's rows. For an unquantized cache, applying the scales changes nothing.
struct Scales {
  float of[BLOCK];
  bool any = false;

  template <class Cached>
  void read(const Cached* const*, int64_t) {}
  void read(const int8_t* const* rows, int64_t padded) {
    any = true;
    for (int64_t i = 0; i < padded; i++) of[i] = scale_of_row(rows[i]);
  }
  Vec operator()(Vec x, int64_t first) const { return any ? x * load(of + first) : x; }
};

// Transpose a block's keys into out [size in units, BLOCK]; prefetch the next block's keys.
template <class Number, class Form>
void place_keys(const KeyBlock<Number>& rows, const KeyBlock<Number>& next, int64_t size, Units out, Matrix<float> spare) {
  const int64_t steps = size / Form::PER_UNIT;
  for (int64_t first = 0; first < rows.padded(); first += WIDTH) {
    Prefetch<Number>{next.k, next.count, rows.padded()}.fetch(first, WIDTH, size);
    const uint32_t* lines[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
      if constexpr (sizeof(Number) * Form::PER_UNIT == 4) {
        lines[i] = reinterpret_cast<const uint32_t*>(rows.k[first + i]);
      } else {
        convert(rows.k[first + i], reinterpret_cast<typename Form::Number*>(spare.row(i)), size);
        lines[i] = reinterpret_cast<const uint32_t*>(spare.row(i));
      }
    }
    int64_t step = 0;
    for (; step + WIDTH <= steps; step += WIDTH) transpose(lines, step, out.row(step) + first, out.pitch);
    for (; step < steps; step++)
      for (int i = 0; i < WIDTH; i++) out.row(step)[first + i] = lines[i][step];
  }
}

// Interleave a block's values into out [BLOCK in units, size]; prefetch the next block's values.
template <class Number, class Form>
void place_values(const KeyBlock<Number>& rows, const KeyBlock<Number>& next, int64_t size, Units out) {
  for (int64_t i = 0; i < rows.count; i += Form::PER_UNIT) {
    float* line = reinterpret_cast<float*>(out.row(i / Form::PER_UNIT));
    int64_t d = 0;
    for (; d + WIDTH <= size; d += WIDTH) store(line + d, Form::across(rows.v + i, d));
    if (d < size) store(line + d, Form::across_first(rows.v + i, d, size - d));
    Prefetch<Number>{next.v, next.count, rows.count}.fetch(i, Form::PER_UNIT, size);
  }
}

}  // namespace
