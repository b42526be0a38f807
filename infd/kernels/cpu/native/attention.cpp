// Paged attention, directly from the cache, for spans of any length; and attention without a cache.
//
// A piece is some queries of one span and a range of their keys; a task computes one piece for one key head. A task has
// a row for each of the piece's queries and each query head of the key head. Keys are processed in blocks: scores,
// online softmax, weighted sums of values. Tasks with many rows transpose a block's keys, and interleave its values, in
// scratch memory, so that both products load whole vectors. Tasks with few rows, as in decoding, read the cache itself.
//
// int8 caches are not dequantized: scores are multiplied by the keys' scales, softmax weights by the values' scales.
//
// How a span is cut into pieces depends on the span alone, so results are bitwise independent of other spans and of the
// number of threads. In a short span each query is a piece of its own, so its result is that of a span of one token: a
// token verified among drafts has the bits of a token decoded alone.

#include "attention.h"

#include "row.h"
#include "scratch.h"
#include "sharing.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK = 64;   // keys of a block; a block's keys, values and scores fit the L1 and L2 caches
constexpr int64_t ROWS = 64;    // most rows of a task, unless a single query has more
constexpr int64_t SPLIT = 512;  // keys of a piece, in spans that are also cut along their keys
constexpr int64_t SHORT = 16;   // most tokens of a short span; longer spans have enough pieces without cuts along keys
constexpr int64_t FEW = 8;      // rows up to which transposing a block costs more than it saves

// The operands of a product, in units of 32 bits: one float, or two bfloat16 if the CPU multiplies bfloat16.

struct Singles {
  static constexpr int64_t PER_UNIT = 1;
  using Number = float;
  static Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }

  // WIDTH units of consecutive elements; along_first: the first `count` elements, followed by zeros.
  template <class Cached>
  static Vec along(const Cached* p) { return load(p); }
  template <class Cached>
  static Vec along_first(const Cached* p, int64_t count) { return load_first(p, count); }

  // WIDTH units; each consists of the elements at one position of PER_UNIT rows.
  template <class Cached>
  static Vec across(const Cached* const* rows, int64_t at) { return load(rows[0] + at); }
  template <class Cached>
  static Vec across_first(const Cached* const* rows, int64_t at, int64_t count) { return load_first(rows[0] + at, count); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  static constexpr int64_t PER_UNIT = 2;
  using Number = bf16;
  static Vec multiply_add(Vec a, Vec b, Vec c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Vec along(const bf16* p) { return load(reinterpret_cast<const float*>(p)); }
  static Vec along(const int8_t* p) { return joined(load(p), load(p + WIDTH)); }
  static Vec along_first(const bf16* p, int64_t count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, p));
  }
  static Vec along_first(const int8_t* p, int64_t count) {
    return count < WIDTH ? joined(load_first(p, count), set(0)) : joined(load(p), load_first(p + WIDTH, count - WIDTH));
  }
  static Vec across(const bf16* const* rows, int64_t at) {
    const __m256i* low = reinterpret_cast<const __m256i*>(rows[0] + at);
    const __m256i* high = reinterpret_cast<const __m256i*>(rows[1] + at);
    return interleaved(_mm256_loadu_si256(low), _mm256_loadu_si256(high));
  }
  static Vec across_first(const bf16* const* rows, int64_t at, int64_t count) {
    const uint16_t mask = (1 << count) - 1;
    return interleaved(_mm256_maskz_loadu_epi16(mask, rows[0] + at), _mm256_maskz_loadu_epi16(mask, rows[1] + at));
  }
  // bfloat16 represents all int8 integers exactly, so the upper halves of their floats suffice.
  static Vec across(const int8_t* const* rows, int64_t at) { return paired(load(rows[0] + at), load(rows[1] + at)); }
  static Vec across_first(const int8_t* const* rows, int64_t at, int64_t count) {
    return paired(load_first(rows[0] + at, count), load_first(rows[1] + at, count));
  }
  static Vec paired(Vec low, Vec high) {
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high)));
  }
  static Vec joined(Vec first, Vec second) { return reinterpret_cast<Vec>(_mm512_cvtne2ps_pbh(second, first)); }
  static Vec interleaved(__m256i low, __m256i high) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), both));
  }
};
using Best = Pairs;
#else
using Best = Singles;
#endif

template <int N>
struct Constant {
  static constexpr int value = N;
};

inline Vec load_units(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
inline Vec repeat_unit(const uint32_t* p) { return set(*reinterpret_cast<const float*>(p)); }

// A matrix in scratch memory.
template <class T>
struct Matrix {
  T* at;
  int64_t pitch;

  T* row(int64_t i) const { return at + i * pitch; }
  Matrix from(int64_t i) const { return {row(i), pitch}; }
};

using Units = Matrix<uint32_t>;

// c [R, V vectors] = a [R, steps units] times b [steps units, V vectors], added to c if ADD.
template <class Form, bool ADD, int R, int V>
void multiply_panel(Units a, Units b, Matrix<float> c, int64_t steps) {
  Vec sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = ADD ? load(c.row(r) + v * WIDTH) : set(0);
  for (int64_t step = 0; step < steps; step++) {
    Vec right[V];
    for (int v = 0; v < V; v++) right[v] = load_units(b.row(step) + v * WIDTH);
    for (int r = 0; r < R; r++) {
      const Vec left = repeat_unit(a.row(r) + step);
      for (int v = 0; v < V; v++) sums[r][v] = Form::multiply_add(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c.row(r) + v * WIDTH, sums[r][v]);
}

// Like multiply_panel, for any number of rows.
template <class Form, bool ADD, int V>
void multiply_columns(Units a, Units b, Matrix<float> c, int64_t rows, int64_t steps) {
  constexpr int MOST = 6;
  int64_t r = 0;
  for (; r + MOST <= rows; r += MOST)
    multiply_panel<Form, ADD, MOST, V>(a.from(r), b, c.from(r), steps);
  a = a.from(r), c = c.from(r);
  switch (rows - r) {
    case 1: return multiply_panel<Form, ADD, 1, V>(a, b, c, steps);
    case 2: return multiply_panel<Form, ADD, 2, V>(a, b, c, steps);
    case 3: return multiply_panel<Form, ADD, 3, V>(a, b, c, steps);
    case 4: return multiply_panel<Form, ADD, 4, V>(a, b, c, steps);
    case 5: return multiply_panel<Form, ADD, 5, V>(a, b, c, steps);
  }
}

// c [rows, columns] = a [rows, steps units] times b [steps units, columns], added to c if ADD; columns is a multiple of
// WIDTH.
template <class Form, bool ADD>
void multiply(Units a, Units b, Matrix<float> c, int64_t rows, int64_t columns, int64_t steps) {
  constexpr int MOST = WIDTH == 16 ? 4 : 2;  // with six rows, sums and operands fit the vector registers
  int64_t column = 0;
  for (; column + MOST * WIDTH <= columns; column += MOST * WIDTH)
    multiply_columns<Form, ADD, MOST>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
  // One vector of columns at a time is bound by loads of `a`.
  if (MOST > 2 && column + 2 * WIDTH <= columns) {
    multiply_columns<Form, ADD, 2>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
    column += 2 * WIDTH;
  }
  for (; column < columns; column += WIDTH)
    multiply_columns<Form, ADD, 1>(a, {b.at + column, b.pitch}, {c.at + column, c.pitch}, rows, steps);
}

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

// The products for tasks with few rows, which read the cache itself.

// scores [R, WIDTH / R] = a [R, size in units] times the first WIDTH / R of `keys`.
template <class Number, class Form, int R>
void score_group(Units a, const Number* const* keys, int64_t size, float* scores, int64_t pitch) {
  constexpr int KEYS = WIDTH / R;
  constexpr int64_t SPAN = WIDTH * Form::PER_UNIT;  // elements in a vector
  Vec products[R * KEYS];
  for (Vec& product : products) product = set(0);
  const auto add = [&](int64_t unit, auto key) {
    Vec right[KEYS];
    for (int i = 0; i < KEYS; i++) right[i] = key(keys[i]);
    for (int r = 0; r < R; r++) {
      const Vec left = load_units(a.row(r) + unit);
      for (int i = 0; i < KEYS; i++) products[r * KEYS + i] = Form::multiply_add(left, right[i], products[r * KEYS + i]);
    }
  };
  int64_t d = 0;
  for (; d + SPAN <= size; d += SPAN) add(d / Form::PER_UNIT, [&](const Number* key) { return Form::along(key + d); });
  if (d < size) add(d / Form::PER_UNIT, [&](const Number* key) { return Form::along_first(key + d, size - d); });
  float sums[WIDTH];
  store(sums, sums_of(products));
  for (int r = 0; r < R; r++) memcpy(scores + r * pitch, sums + r * KEYS, KEYS * sizeof(float));
}

template <class Number, class Form, int R>
void score_rows(Units a, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t size, Matrix<float> scores) {
  for (int64_t first = 0; first < block.padded(); first += WIDTH / R) {
    ahead.fetch(first, WIDTH / R, size);
    score_group<Number, Form, R>(a, block.k + first, size, scores.at + first, scores.pitch);
  }
}

// sums [R, V vectors] from element d on += weights [R, block in units] times the values.
template <class Number, class Form, int R, int V>
void weigh_columns(Units weights, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t d, int64_t size,
                   Matrix<float> sums) {
  Vec kept[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) kept[r][v] = load(sums.row(r) + d + v * WIDTH);
  const bool whole = d + V * WIDTH <= size;
  for (int64_t i = 0; i < block.count; i += Form::PER_UNIT) {
    if (d == 0) ahead.fetch(i, Form::PER_UNIT, size);
    Vec values[V];
    for (int v = 0; v < V; v++) {
      const int64_t at = d + v * WIDTH;
      values[v] = whole ? Form::across(block.v + i, at) : Form::across_first(block.v + i, at, size - at);
    }
    for (int r = 0; r < R; r++) {
      const Vec weight = repeat_unit(weights.row(r) + i / Form::PER_UNIT);
      for (int v = 0; v < V; v++) kept[r][v] = Form::multiply_add(weight, values[v], kept[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(sums.row(r) + d + v * WIDTH, kept[r][v]);
}

template <class Number, class Form, int R>
void weigh_rows(Units weights, const KeyBlock<Number>& block, const Prefetch<Number>& ahead, int64_t size, Matrix<float> sums) {
  // Only the first pass over the values prefetches, so with few passes prefetches are spread more evenly.
  constexpr int MOST = WIDTH == 16 ? (R <= 2 ? 8 : 4) : 2;
  int64_t d = 0;
  for (; d + MOST * WIDTH <= size; d += MOST * WIDTH)
    weigh_columns<Number, Form, R, MOST>(weights, block, ahead, d, size, sums);
  for (; d < size; d += WIDTH) weigh_columns<Number, Form, R, 1>(weights, block, ahead, d, size, sums);
}

// Call `act` for groups of 4, 2 and 1 rows, with the group's size as a Constant, and the group's first row.
template <class Act>
void by_groups(int64_t rows, Act act) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) act(Constant<4>(), row);
  if (row + 2 <= rows) act(Constant<2>(), row), row += 2;
  if (row < rows) act(Constant<1>(), row);
}

// The state of one row's online softmax: the largest score so far, times log2(e), and the sum of weights relative to
// this score.
struct SoftmaxState {
  float largest, total;
};

// The transform of q·k before softmax. The resulting scores are multiplied by log2(e), because softmax uses powers of
// two.
struct Scores {
  float factor, softcap;

  explicit Scores(const AttentionLayer& layer)
      : factor(layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * LOG2_E),
        softcap(layer.softcap > 0 ? layer.softcap * LOG2_E : 0) {}

  Vec operator()(Vec product) const {
    const Vec score = product * set(factor);
    return softcap > 0 ? hyperbolic_tangent(score) * set(softcap) : score;
  }
};

// Rescale a row's sums [width] if `block`, the largest score of a block, exceeds all scores so far. Return the score to
// which weights are relative.
inline Vec base_of(float block, SoftmaxState& seen, float* sums, int64_t width) {
  if (block > seen.largest) {
    const Vec shrink = power_of_two(set(seen.largest - block));
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + d, load(sums + d) * shrink);
    seen.total *= first_of(shrink);
    seen.largest = block;
  }
  return set(seen.largest > -INFINITY ? seen.largest : 0);  // 0: all keys so far were masked, or scores NaN
}

// Convert one row's products q·k to weights of softmax; keys outside [first, last) are masked. Rescale the row's sums
// to the new largest score. `k` and `v` are the scales of keys and values. bias: added to the scores, or null.
template <class Form>
void softmax(float* row, int64_t padded, int64_t first, int64_t last, const Scores& scores, const Scales& k,
             const Scales& v, SoftmaxState& seen, typename Form::Number* weights, float* sums, int64_t width,
             const float* bias) {
  for (int64_t i = 0; i < padded; i += WIDTH) store(row + i, scores(k(load(row + i), i)));
  if (bias)
    for (int64_t i = 0; i < padded; i += WIDTH) store(row + i, fma(load(bias + i), set(LOG2_E), load(row + i)));
  for (int64_t i = 0; i < first; i++) row[i] = -INFINITY;
  for (int64_t i = last; i < padded; i++) row[i] = -INFINITY;
  Vec most = set(-INFINITY);
  for (int64_t i = 0; i < padded; i += WIDTH) most = max(load(row + i), most);
  const Vec base = base_of(largest(most), seen, sums, width);
  Vec total = set(0);
  for (int64_t i = 0; i < padded; i += WIDTH) {
    const Vec weight = power_of_two(load(row + i) - base);
    total = total + weight;
    store(weights + i, v(weight, i));
  }
  seen.total += sum(total);
}

// The same for a whole block of an unquantized cache, of which every key is seen, without softcap and bias: the scores
// stay in registers.
template <class Form>
void softmax_of_block(const float* row, float factor, SoftmaxState& seen, typename Form::Number* weights, float* sums,
                      int64_t width) {
  constexpr int COUNT = BLOCK / WIDTH;
  Vec x[COUNT], most = set(-INFINITY), total = set(0);
  for (int i = 0; i < COUNT; i++) {
    x[i] = load(row + i * WIDTH) * set(factor);
    most = max(x[i], most);
  }
  const Vec base = base_of(largest(most), seen, sums, width);
  for (int i = 0; i < COUNT; i++) {
    const Vec weight = power_of_two(x[i] - base);
    total = total + weight;
    store(weights + i * WIDTH, weight);
  }
  seen.total += sum(total);
}

// The biases of a block's keys for one query, at `self` relative to the block, of one head; null: there are none.
struct Biases {
  float of[BLOCK];

  const float* read(const AttentionLayer& layer, int64_t head, int64_t self, int64_t padded) {
    if (!layer.bias) return nullptr;
    const int64_t most = layer.furthest;
    const float* middle = layer.bias + head * (2 * most + 1) + most;
    if (self <= most && padded - 1 - self <= most) return middle - self;
    for (int64_t i = 0; i < padded; i++) {
      const int64_t distance = i - self;
      of[i] = middle[distance < -most ? -most : distance > most ? most : distance];
    }
    return of;
  }
};

// Some queries of a span, and the range of their keys that one task covers.
struct Piece {
  int32_t span, first_query, queries;
  int32_t parts;     // number of consecutive pieces with these queries, whose results are merged
  int32_t part;      // number of this one among them
  int64_t begin, end;
  int64_t partial;   // number of queries of earlier pieces in Partials
};

int64_t tokens_of_a_piece(int64_t shared) { return shared < ROWS ? ROWS / shared : 1; }

// Call `visit` with every piece of a step, in order of spans, queries, keys.
template <class Visit>
void cut(const AttentionStep& step, int64_t shared, Visit visit) {
  int64_t partial = 0;
  for (int64_t span = 0; span < step.spans; span++) {
    const int64_t count = step.offsets[span + 1] - step.offsets[span];
    if (step.packed) {
      const int64_t most = tokens_of_a_piece(shared);
      for (int64_t query = 0; query < count; query += most) {
        const int64_t queries = count - query < most ? count - query : most;
        const int64_t begin = step.before < 0 || query < step.before ? 0 : query - step.before;
        const int64_t last = query + queries + step.after, end = step.after < 0 || last > count ? count : last;
        visit(Piece{int32_t(span), int32_t(query), int32_t(queries), 1, 0, begin, end, 0});
      }
      continue;
    }
    const int64_t start = step.start[span];
    const int64_t most = count <= SHORT ? 1 : tokens_of_a_piece(shared);
    for (int64_t query = 0; query < count; query += most) {
      const int64_t queries = count - query < most ? count - query : most;
      const int64_t behind = step.window > 0 ? start + query - step.window + 1 : 0;
      const int64_t begin = behind > 0 ? behind : 0, end = start + query + queries;
      const int64_t parts = count <= SHORT ? (end - 1) / SPLIT - begin / SPLIT + 1 : 1;
      for (int64_t part = 0; part < parts; part++) {
        const int64_t from = part == 0 ? begin : (begin / SPLIT + part) * SPLIT;
        const int64_t to = part == parts - 1 ? end : (begin / SPLIT + part + 1) * SPLIT;
        visit(Piece{int32_t(span), int32_t(query), int32_t(queries), int32_t(parts), int32_t(part), from, to, partial});
        if (parts > 1) partial += queries;
      }
    }
  }
}

// The scratch memory of one thread.
template <class Form>
struct Workspace {
  Units queries, keys, values, weights;
  Matrix<float> scores, sums, spare;
  SoftmaxState* seen;

  // `width` is the head size, padded to whole vectors of units. Padding of queries is zero; padding of sums is
  // arbitrary.
  Workspace(Carver& carver, int64_t rows, int64_t width)
      : queries{carver.take<uint32_t>(rows * width / Form::PER_UNIT), width / Form::PER_UNIT},
        keys{carver.take<uint32_t>(width / Form::PER_UNIT * BLOCK), BLOCK},
        values{carver.take<uint32_t>(BLOCK / Form::PER_UNIT * width), width},
        weights{carver.take<uint32_t>(rows * BLOCK / Form::PER_UNIT), BLOCK / Form::PER_UNIT},
        scores{carver.take<float>(rows * BLOCK), BLOCK},
        sums{carver.take<float>(rows * width), width},
        spare{carver.take<float>(WIDTH * width), width},
        seen(carver.take<SoftmaxState>(rows)) {}
};

// One thread's unit of work: a piece for one key head.
struct Task {
  const Piece* piece;
  int64_t head;
};

// Attend a piece's queries to its keys, for one key head; store sums and softmax states in the scratch memory, by row.
// `after`: this thread's next task, whose first keys are prefetched; without a piece if no task follows.
template <class Number, class Cached, class Form>
void attend(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after, Workspace<Form>& workspace) {
  const Piece& piece = *task.piece;
  const int64_t head = task.head;
  const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
  const int64_t width = workspace.sums.pitch;
  const Number* q = static_cast<const Number*>(layer.q) +
                    (step.offsets[piece.span] + piece.first_query) * layer.q_stride + head * shared * size;
  for (int64_t row = 0; row < rows; row++) {
    auto* query = reinterpret_cast<typename Form::Number*>(workspace.queries.row(row));
    convert(q + row / shared * layer.q_stride + row % shared * size, query, size);
    memset(query + size, 0, (width - size) * sizeof *query);
    // Of several pieces with these queries, the first counts the sink.
    const bool sink = layer.sinks && piece.part == 0;
    workspace.seen[row] = sink ? SoftmaxState{layer.sinks[head * shared + row % shared] * LOG2_E, 1} : SoftmaxState{-INFINITY, 0};
  }
  memset(workspace.sums.at, 0, rows * width * sizeof(float));

  const Scores scores(layer);
  // Of the piece's first query, in its sequence or, without a cache, in its span.
  const int64_t position = (step.packed ? 0 : step.start[piece.span]) + piece.first_query;
  // The most tokens between a query and the keys that it sees; -1: any number.
  const int64_t back = step.packed ? step.before : step.window > 0 ? step.window - 1 : -1;
  const int64_t ahead = step.packed ? step.after : 0;
  KeyBlock<Cached> blocks[2];
  Scales k_scales, v_scales;
  Biases biases;
  const bool plain = !layer.quantized && !layer.bias && !(layer.softcap > 0);
  const auto find = [&](KeyBlock<Cached>& block, const Task& of, int64_t begin) {
    const int64_t next = (begin / BLOCK + 1) * BLOCK, end = next < of.piece->end ? next : of.piece->end;
    block.find(step, layer, of.piece->span, of.head, begin, end);
  };
  find(blocks[0], task, piece.begin);
  int turn = 0;
  for (int64_t begin = piece.begin; begin < piece.end; turn ^= 1) {
    const KeyBlock<Cached>& block = blocks[turn];
    KeyBlock<Cached>& next = blocks[turn ^ 1];
    if (begin + block.count < piece.end)
      find(next, task, begin + block.count);
    else if (after.piece)
      find(next, after, after.piece->begin);
    else
      next.count = 0;
    const int64_t padded = block.padded();
    if (rows <= FEW) {
      by_groups(rows, [&](auto group, int64_t row) {
        const Prefetch<Cached> ahead{block.v, row == 0 ? block.count : 0, padded};
        score_rows<Cached, Form, group.value>(workspace.queries.from(row), block, ahead, size, workspace.scores.from(row));
      });
    } else {
      place_keys<Cached, Form>(block, next, size, workspace.keys, workspace.spare);
      multiply<Form, false>(workspace.queries, workspace.keys, workspace.scores, rows, padded, size / Form::PER_UNIT);
    }
    k_scales.read(block.k, padded);
    v_scales.read(block.v, padded);
    for (int64_t row = 0; row < rows; row++) {
      const int64_t self = position + row / shared - begin;  // the query's own position, relative to the block
      const int64_t behind = back < 0 ? 0 : self - back;
      const int64_t first = behind < 0 ? 0 : behind < padded ? behind : padded;
      const int64_t beyond = ahead < 0 ? block.count : self + ahead + 1;
      const int64_t last = beyond < 0 ? 0 : beyond < block.count ? beyond : block.count;
      const float* bias = biases.read(layer, head * shared + row % shared, self, padded);
      auto* weights = reinterpret_cast<typename Form::Number*>(workspace.weights.row(row));
      if (plain && first == 0 && last == BLOCK)
        softmax_of_block<Form>(workspace.scores.row(row), scores.factor, workspace.seen[row], weights,
                               workspace.sums.row(row), width);
      else
        softmax<Form>(workspace.scores.row(row), padded, first, last, scores, k_scales, v_scales, workspace.seen[row],
                      weights, workspace.sums.row(row), width, bias);
    }
    if (rows <= FEW) {
      by_groups(rows, [&](auto group, int64_t row) {
        const Prefetch<Cached> ahead{next.k, row == 0 ? next.count : 0, block.count};
        weigh_rows<Cached, Form, group.value>(workspace.weights.from(row), block, ahead, size, workspace.sums.from(row));
      });
    } else {
      place_values<Cached, Form>(block, next, size, workspace.values);
      const int64_t steps = (block.count + Form::PER_UNIT - 1) / Form::PER_UNIT;
      multiply<Form, true>(workspace.weights, workspace.values, workspace.sums, rows, width, steps);
    }
    begin += block.count;
  }
}

// Results of pieces to be merged: for each row its sums, then its softmax state.
struct Partials {
  float* memory;
  int64_t kv_heads, shared, width;

  int64_t pitch() const { return width + WIDTH; }
  float* row(const Piece& piece, int64_t head, int64_t row) const {
    return memory + ((piece.partial * kv_heads + head * piece.queries) * shared + row) * pitch();
  }
};

template <class Number>
Number* result(const AttentionStep& step, const AttentionLayer& layer, const Piece& piece, int64_t head, int64_t row) {
  const int64_t shared = layer.heads / layer.kv_heads;
  const int64_t token = step.offsets[piece.span] + piece.first_query + row / shared;
  return static_cast<Number*>(layer.out) + (token * layer.heads + head * shared + row % shared) * layer.size;
}

template <class Number>
void divide(const float* sums, float total, Number* out, int64_t size) {
  int64_t d = 0;
  for (; d + WIDTH <= size; d += WIDTH) store(out + d, load(sums + d) / set(total));
  for (; d < size; d++) set(out + d, sums[d] / total);
}

// Merge the results of all pieces with equal queries into the output. `piece` is the first of these pieces; its sums
// are overwritten.
template <class Number>
void merge(const AttentionStep& step, const AttentionLayer& layer, const Piece* piece, int64_t head, const Partials& partials) {
  const int64_t width = partials.width;
  for (int64_t row = 0; row < piece->queries * partials.shared; row++) {
    float most = -INFINITY, total = 0;
    for (int part = 0; part < piece->parts; part++) {
      const float seen = partials.row(piece[part], head, row)[width];
      most = seen > most ? seen : most;
    }
    float* sums = partials.row(piece[0], head, row);
    for (int part = 0; part < piece->parts; part++) {
      const float* more = partials.row(piece[part], head, row);
      const Vec share = power_of_two(set(more[width] - most));
      total += more[width + 1] * first_of(share);
      for (int64_t d = 0; d < width; d += WIDTH) {
        const Vec weighted = load(more + d) * share;
        store(sums + d, part == 0 ? weighted : load(sums + d) + weighted);
      }
    }
    divide(sums, total, result<Number>(step, layer, *piece, head, row), layer.size);
  }
}

template <class Number, class Cached, class Form>
void run(const AttentionStep& step, const AttentionLayer& layer) {
  static thread_local Scratch shared_scratch, own_scratch;
  const int64_t heads = layer.kv_heads, shared = layer.heads / heads, size = layer.size;
  const int64_t width = whole_vectors((size + Form::PER_UNIT - 1) / Form::PER_UNIT) * Form::PER_UNIT;
  int64_t count = 0, partial = 0, products = 0;
  cut(step, shared, [&](const Piece& piece) {
    count++;
    products += (piece.end - piece.begin) * piece.queries * layer.heads * size;
    if (piece.parts > 1) partial = piece.partial + piece.queries;
  });
  Partials partials{nullptr, heads, shared, width};
  const auto carve = [&](Carver carver, Piece** pieces) {
    *pieces = carver.take<Piece>(count);
    partials.memory = carver.take<float>(partial * heads * shared * partials.pitch());
    return carver.used;
  };
  Piece* pieces;
  carve(Carver(shared_scratch.at_least(carve(Carver(nullptr), &pieces))), &pieces);
  int64_t at = 0;
  cut(step, shared, [&](const Piece& piece) { pieces[at++] = piece; });

  const int64_t rows = tokens_of_a_piece(shared) * shared;
  const int64_t used = step.offsets[step.spans], row = layer.heads * size;
  memset(static_cast<Number*>(layer.out) + used * row, 0, (step.tokens - used) * row * sizeof(Number));
  const int64_t tasks = count * heads;
  int64_t taken = 0;
#pragma omp parallel if (tasks > 1 && worth_sharing(products, layer.awake))
  {
    Carver sizes(nullptr);
    Workspace<Form> measured(sizes, rows, width);
    Carver carver(own_scratch.at_least(sizes.used));
    Workspace<Form> workspace(carver, rows, width);
    // Backwards, so that the longest tasks come first: prompts are packed last, and later queries attend to more keys.
    const auto take = [&] {
      const int64_t left = tasks - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
      return left < 0 ? Task{nullptr, 0} : Task{pieces + left / heads, left % heads};
    };
    // A thread takes its next task before it computes one, so that it can prefetch the next task's keys.
    for (Task task = take(), after; task.piece; task = after) {
      after = take();
      attend<Number, Cached, Form>(step, layer, task, after, workspace);
      const Piece& piece = *task.piece;
      const int64_t head = task.head;
      for (int64_t row = 0; row < piece.queries * shared; row++) {
        const SoftmaxState seen = workspace.seen[row];
        if (piece.parts == 1) {
          divide(workspace.sums.row(row), seen.total, result<Number>(step, layer, piece, head, row), size);
        } else {
          float* kept = partials.row(piece, head, row);
          memcpy(kept, workspace.sums.row(row), width * sizeof(float));
          kept[width] = seen.largest;
          kept[width + 1] = seen.total;
        }
      }
    }
    if (partial > 0) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < tasks; i++) {
        const Piece* piece = pieces + i / heads;
        const bool first = i < heads || piece[-1].span != piece->span || piece[-1].first_query != piece->first_query;
        if (piece->parts > 1 && first) merge<Number>(step, layer, piece, i % heads, partials);
      }
    }
  }
}

template <class Number, class Form>
void run_on_cache(const AttentionStep& step, const AttentionLayer& layer) {
  layer.quantized ? run<Number, int8_t, Form>(step, layer) : run<Number, Number, Form>(step, layer);
}

}  // namespace

INFD_KERNEL(attention)(const AttentionStep* step, const AttentionLayer* layer) {
  if (!layer->half)
    run_on_cache<float, Singles>(*step, *layer);
  else if (layer->size % Best::PER_UNIT == 0)
    run_on_cache<bf16, Best>(*step, *layer);
  else
    run_on_cache<bf16, Singles>(*step, *layer);
}
