// Products with a matrix in panels of any Kind: how the work is divided and ordered.
//
// Rows are computed in groups, one panel of outputs at a time: a group's sums stay in registers while the panel is
// read. The first group reads the panel from memory, later groups from the cache. Each group also prefetches a part of
// the next panel, so that memory reads and arithmetic overlap. A single group, or two of which the second has few rows,
// do not prefetch unless `prefetches` returns true: the hardware prefetcher predicts their sequential reads better.
//
// Each result is accumulated step by step along the inputs. It is bitwise independent of the number of rows, the number
// of threads, and the contents of other rows.
//
// A Kind defines the words of a step and their multiplication:
//
//   ONE_LINE                 whether a step along the inputs is one line of a panel; else several, with their scales
//   step()                   words of a step
//   look()                   words between two prefetches; only if a step has several lines
//   prefetches()             whether a single group prefetches too; only if a step has several lines
//   Weights, Input           a vector of words; one word in every lane
//   weights, input, add      load Weights, broadcast Input, add their products to the 32-bit sums
//   HEADER                   words of a panel before its first step
//   start(header)            initial values of the sums
//   x.word(row, at)          the input word of step `at`
//   x.from(row, at)          the inputs from that row and step on
//   x.HALVES                 whether a row's last word may have no second half in memory
//   x.half_word(row, at)     the first half of the input word of step `at`, read without the second half
//   x.value(sums, row, header)   convert sums to floats
//
// Group::multiply supports any Kind whose step is one line. A Kind with longer steps specializes Group::multiply, or
// ROWS_OF_A_GROUP and RowByRow; one that tile registers multiply, BY_AMX and RowByRow.
//
// Weights that take several instructions to prepare are prepared once for all groups of rows, if there are several: a
// Kind with OPENS has another Kind for prepared weights.
//
//   Opened, opened()         that Kind; its products have the same bits
//   open(words, steps, to)   prepare that many steps of a panel
//
// Preparing takes less time beside products: if FIRST_OPENS, another Kind, in place of `open`, multiplies the first group of
// rows and stores the weights prepared.
//
//   Opening, opening(to)     that Kind
//
// Of a Kind with SOME_OPENED, panels may be stored prepared.
//
//   opened(header)           whether a panel is
//   fitting(), rest(header)  the number of its steps that follow its header, and the address of the others

#pragma once

#include "panels.h"
#include "sharing.h"
#include "vector.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 6;
template <int ROWS>
constexpr int ABREAST = 4;  // vectors of outputs: 6 x 4 sums and 4 vectors of weights fit the registers
#else
constexpr int MOST_ROWS = 2;
template <int ROWS>
constexpr int ABREAST = ROWS == 1 ? 8 : 4;
#endif

constexpr int64_t CACHE_LINE = 16;       // words
constexpr int64_t MOST_WORDS = 1 << 16;  // most words of a panel at a time: 256 KiB, so that they and the rows fit L2
constexpr int64_t TWO_WORDS = 1 << 14;   // MOST_WORDS for two groups, so that the second reads soon after the first
constexpr int64_t PASS_WORDS = 1 << 12;   // MOST_WORDS for groups that compute half a panel at a time: 16 KiB, which stay in L1
constexpr int64_t TILE_WORDS = 96 * PANEL;  // MOST_WORDS for tiles: the lines of 16 outputs, every fourth, stay in L1
constexpr int64_t OPENED_WORDS = 1 << 15;  // most words of prepared weights: 128 KiB, which stay in L2
constexpr int64_t KEPT_WORDS = 1 << 18;    // most words of inputs that stay in L2 while panels pass: 1 MiB
constexpr int64_t MOST_TOGETHER = 240;   // most rows whose sums are kept between stretches of inputs
constexpr int64_t MOST_PREFETCHED = 64;  // most rows whose results are prefetched; more would evict weights

// Groups of rows for which preparing weights saves time. INT64_MAX: none; the Kind's weights are only stored prepared.
template <class Kind>
constexpr int64_t OPENS_FROM = MOST_ROWS == 2 ? 2 : 3;

// A second group of at most this many rows adds little to the time of the first group's reads. 0 for int4, whose
// bottleneck is arithmetic, and for fp8.
template <class Kind>
constexpr int64_t FEW_MORE = Kind::ONE_LINE ? MOST_ROWS / 3 : 0;

// From this many groups of rows on, the next panel is prefetched into L1: some lines that are prefetched into L2 alone are
// evicted before they are read. Fewer groups fetch more lines at a time than a core can have outstanding as misses of L1.
#if defined(__AVX512F__)
constexpr int64_t NEAR_FROM = 6;
#else
constexpr int64_t NEAR_FROM = INT64_MAX;
#endif

constexpr int64_t LINES_OF_A_LOOK = 4;  // of a panel, between two calls of Prefetch::fetch, if a step is one line

// Words between two prefetches.
template <class Kind>
int64_t look_of(const Kind& x) {
  if constexpr (Kind::ONE_LINE)
    return LINES_OF_A_LOOK * PANEL;
  else
    return x.look();
}

// Whether the hardware prefetcher is no help to a single group.
template <class Kind>
bool prefetches_alone(const Kind& x) {
  if constexpr (Kind::ONE_LINE)
    return false;
  else
    return x.prefetches();
}

// A prefetch stream: some cache lines at every call of fetch.
struct Prefetch {
  const char* next;
  // Of a call; above 0: into L1; below 0: -lines, into L2 alone. A second field would cost the inner loop a register.
  int64_t lines;

  void fetch() {
    if (lines > 0)
      for (int64_t line = 0; line < lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T0);
    else
      for (int64_t line = lines; line < 0; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
  }
};

// `steps` consecutive steps of a panel and, if `half`, another step with half an input word.
struct Stretch {
  const uint32_t* words;
  int64_t steps;
  bool half;
  const uint32_t* header;  // of the panel, if sums start here; null if they continue an earlier stretch
  int64_t begin, end;      // columns of the panel to compute
};

// Multiplies ROWS rows with a stretch of a panel, and starts or continues their sums [ROWS, PANEL].
template <class Kind, int ROWS>
struct Group {
  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead);
};

template <class Kind, int ROWS>
void Group<Kind, ROWS>::multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
  static_assert(Kind::ONE_LINE);
  constexpr int VECTORS = ABREAST<ROWS>;
  for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
    const uint32_t* words = stretch.words + first;
    Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++)
        sum[i][j] = stretch.header ? Kind::start(stretch.header + first + j * WIDTH)
                                   : load(sums + i * PANEL + first + j * WIDTH);

    for (int64_t at = 0; at < stretch.steps;) {
      if (first == 0) ahead.fetch();
      const int64_t next = at + LINES_OF_A_LOOK, end = next < stretch.steps ? next : stretch.steps;
      for (; at < end; at++) {
        typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) w[j] = Kind::weights(words + at * PANEL + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const typename Kind::Input input = Kind::input(x.word(i, at));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = Kind::add(sum[i][j], w[j], input);
        }
      }
    }
    if constexpr (Kind::HALVES) {
      if (stretch.half) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const typename Kind::Input input = Kind::input(x.half_word(i, stretch.steps));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++)
            sum[i][j] = Kind::add(sum[i][j], Kind::weights(words + stretch.steps * PANEL + j * WIDTH), input);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + first + j * WIDTH, sum[i][j]);
  }
}

// Whether a group has any number of rows, and consists of tiles (RowByRow).
template <class Kind>
constexpr bool TILED = WIDTH == 8 && Kind::TILES;

// Whether tile registers multiply any number of rows (amx.h).
template <class Kind>
constexpr bool BY_AMX = false;

// The most rows of a group.
template <class Kind>
constexpr int64_t ROWS_OF_A_GROUP = TILED<Kind> || BY_AMX<Kind> ? MOST_TOGETHER : MOST_ROWS;

// Rows that are multiplied in the time of one: parts of the rows begin at multiples.
template <class Kind>
constexpr int64_t ROWS_AT_ONCE = BY_AMX<Kind> ? 32 : 1;

// Compute a tile: ROWS rows and VECTORS vectors of outputs, whose weights begin at `words`, and start (`header`) or
// continue their sums [ROWS, PANEL]. A line of `ahead` is fetched every `pause` steps.
template <class Kind, int ROWS, int VECTORS>
void multiply_tile(const Kind& x, const uint32_t* words, const uint32_t* header, const Stretch& stretch, float* sums,
                   Prefetch& ahead, int64_t pause) {
  Vec sum[ROWS][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++)
      sum[i][j] = header ? Kind::start(header + j * WIDTH) : load(sums + i * PANEL + j * WIDTH);
  const auto step = [&](const uint32_t* line, auto word) {
    typename Kind::Weights w[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) w[j] = Kind::weights(line + j * WIDTH);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      const typename Kind::Input input = Kind::input(word(i));
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sum[i][j] = Kind::add(sum[i][j], w[j], input);
    }
  };
  for (int64_t at = 0; at < stretch.steps;) {
    if (ahead.lines > 0) {
      _mm_prefetch(ahead.next, _MM_HINT_T1);
      ahead.next += 64, ahead.lines--;
    }
    const int64_t end = at + pause < stretch.steps ? at + pause : stretch.steps;
    for (; at < end; at++) step(words + at * PANEL, [&](int i) { return x.word(i, at); });
  }
  if constexpr (Kind::HALVES) {
    if (stretch.half) step(words + stretch.steps * PANEL, [&](int i) { return x.half_word(i, stretch.steps); });
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + j * WIDTH, sum[i][j]);
}

// Multiplies any number of rows, and any columns whose number is a multiple of 2 * WIDTH; for Kinds with more
// ROWS_OF_A_GROUP than MOST_ROWS. This one computes tiles of at most six rows and two vectors: twelve sums, which with the
// operands fill sixteen registers, so that a step loads two vectors of weights and six inputs for twelve multiplications.
// (Two rows and four vectors load four and two for eight.)
template <class Kind>
struct RowByRow {
  static constexpr int64_t MOST = 6, COLUMNS = 2 * WIDTH;
  using Tile = void (*)(const Kind&, const uint32_t*, const uint32_t*, const Stretch&, float*, Prefetch&, int64_t);

  static void multiply(const Kind& x, const Stretch& stretch, int64_t rows, float* sums, Prefetch ahead) {
    static constexpr Tile of[] = {multiply_tile<Kind, 1, 2>, multiply_tile<Kind, 2, 2>, multiply_tile<Kind, 3, 2>,
                                  multiply_tile<Kind, 4, 2>, multiply_tile<Kind, 5, 2>, multiply_tile<Kind, 6, 2>};
    const int64_t tiles = (rows + MOST - 1) / MOST, columns = stretch.end - stretch.begin;
    ahead.lines = ahead.lines ? columns * stretch.steps / CACHE_LINE : 0;
    const int64_t lines_a_step = columns / CACHE_LINE, tiles_in_all = tiles * (columns / COLUMNS);
    const int64_t pause = tiles_in_all > lines_a_step ? tiles_in_all / lines_a_step : 1;
    for (int64_t first = stretch.begin; first < stretch.end; first += COLUMNS)
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t row = rows * tile / tiles, count = rows * (tile + 1) / tiles - row;
        of[count - 1](x.from(row, 0), stretch.words + first, stretch.header ? stretch.header + first : nullptr, stretch,
                      sums + row * PANEL + first, ahead, pause);
      }
  }
};
template <class Kind>
constexpr bool ROW_BY_ROW = ROWS_OF_A_GROUP<Kind> > MOST_ROWS;

// The units of a panel, at which a run of tasks may begin and end.
template <class Kind>
constexpr int64_t UNITS = ROW_BY_ROW<Kind> && !BY_AMX<Kind> ? 4 : 1;

template <class Kind>
using Multiply = void (*)(const Kind&, const Stretch&, float*, Prefetch);

template <class Kind>
Multiply<Kind> multiply_rows(int64_t rows) {
#if defined(__AVX512F__)
  static constexpr Multiply<Kind> of[] = {Group<Kind, 1>::multiply, Group<Kind, 2>::multiply, Group<Kind, 3>::multiply,
                                          Group<Kind, 4>::multiply, Group<Kind, 5>::multiply, Group<Kind, 6>::multiply};
#else
  static constexpr Multiply<Kind> of[] = {Group<Kind, 1>::multiply, Group<Kind, 2>::multiply};
#endif
  return of[rows - 1];
}

// opened: the stretch consists of prepared weights. to: where to store prepared weights, or null.
template <class Kind>
void multiply_group(const Kind& x, bool opened, uint32_t* to, int64_t rows, const Stretch& stretch, float* sums, Prefetch ahead) {
  if constexpr (Kind::OPENS) {
    if (opened) return multiply_group<typename Kind::Opened>(x.opened(), false, nullptr, rows, stretch, sums, ahead);
    if constexpr (Kind::FIRST_OPENS) {
      if (to != nullptr) return multiply_rows<typename Kind::Opening>(rows)(x.opening(to), stretch, sums, ahead);
    }
  }
  if constexpr (TILED<Kind>) {
    if (rows <= MOST_ROWS && stretch.end - stretch.begin == PANEL) return multiply_rows<Kind>(rows)(x, stretch, sums, ahead);
  }
  if constexpr (ROW_BY_ROW<Kind>) {
    // Weights that only one row multiplies need not be held: a Group reads each input once for all columns.
    if constexpr (!BY_AMX<Kind>) {
      if (rows == 1 && stretch.end - stretch.begin == PANEL) return Group<Kind, 1>::multiply(x, stretch, sums, ahead);
    }
    RowByRow<Kind>::multiply(x, stretch, rows, sums, ahead);
  } else {
    multiply_rows<Kind>(rows)(x, stretch, sums, ahead);
  }
}

// Words of a step of prepared weights.
template <class Kind>
int64_t opened_step(const Kind& x) {
  if constexpr (Kind::OPENS)
    return x.opened().step();
  else
    return x.step();
}

// Whether a panel is stored prepared.
template <class Kind>
bool stored_opened(const uint32_t* header) {
  if constexpr (!Kind::OPENS)
    return false;
  else if constexpr (!Kind::SOME_OPENED)
    return false;
  else
    return Kind::opened(header);
}

// The steps of a panel, in memory.
struct Steps {
  const uint32_t *words, *rest = nullptr;
  int64_t count, step;  // step: words
  int64_t fitting = 0;  // steps at `words`; the others are at `rest`

  const uint32_t* at(int64_t number) const {
    return number < fitting ? words + number * step : rest + (number - fitting) * step;
  }
};

// The steps of a panel. prepared: it is stored prepared.
template <class Kind>
Steps steps_of(const Kind& x, const uint32_t* header, bool prepared, int64_t count) {
  const uint32_t* words = header + Kind::HEADER;
  if constexpr (Kind::OPENS) {
    if constexpr (Kind::SOME_OPENED)
      if (prepared) return {words, Kind::rest(header), count, opened_step(x), x.fitting()};
  }
  return {words, nullptr, count, x.step(), count};
}

// Cuts the steps of a panel into stretches of at most `most` steps that are consecutive in memory.
class Stretches {
 public:
  Stretches(const Steps& steps, int64_t most)
      : steps_(steps), fitting_((steps.fitting + most - 1) / most), count_(fitting_ + (steps.count - steps.fitting + most - 1) / most) {}

  int64_t count() const { return count_; }
  int64_t begin(int64_t stretch) const {
    if (stretch < fitting_) return steps_.fitting * stretch / fitting_;
    if (stretch == count_) return steps_.count;
    return steps_.fitting + (steps_.count - steps_.fitting) * (stretch - fitting_) / (count_ - fitting_);
  }

 private:
  const Steps& steps_;
  int64_t fitting_, count_;
};

// Most words of a stretch for that many rows.
template <class Kind>
int64_t stretch_words(int64_t rows) {
  if (TILED<Kind> && rows > MOST_ROWS) return TILE_WORDS;
  if (Kind::ONE_LINE && WIDTH == 8 && rows > 1) return PASS_WORDS;
  return rows > ROWS_OF_A_GROUP<Kind> && rows <= 2 * ROWS_OF_A_GROUP<Kind> ? TWO_WORDS : MOST_WORDS;
}

// The bias [outputs], in either type, or none.
struct Bias {
  const bf16* narrow = nullptr;
  const float* wide = nullptr;

  Bias(const bf16* bias) : narrow(bias) {}
  Bias(const float* bias) : wide(bias) {}
  Bias(const void* bias, bool half) {
    if (half)
      narrow = static_cast<const bf16*>(bias);
    else
      wide = static_cast<const float*>(bias);
  }
};

// One product. The caller has checked all arguments.
template <class Kind>
struct Product {
  Kind x;
  int64_t rows;
  const uint32_t* weights;
  int64_t outputs;
  int64_t steps;  // of a panel, including a last step with half an input word
  bool half;
  Bias bias;
  void* out;  // [rows, outputs], float or bfloat16, `stride` elements between rows
  int64_t stride;
  bool wide;  // out is float
  int64_t slot = Kind::HEADER + steps * x.step();  // words from the begin of a panel to that of the next one

  const uint32_t* panel(int64_t number) const { return weights + number * slot; }

  // Prefetch the lines to which the results of a panel will be written: another core may have them. Inline: GCC removes calls of
  // functions that only prefetch.
  [[gnu::always_inline]] void prefetch_results(int64_t row, int64_t count, int64_t panel) const {
    const int64_t size = wide ? sizeof(float) : sizeof(bf16), first = panel * PANEL;
    const int64_t columns = outputs - first < PANEL ? outputs - first : PANEL;
    const char* at = static_cast<const char*>(out) + (row * stride + first) * size;
    for (int64_t i = 0; i < count; i++, at += stride * size)
      for (int64_t byte = 0; byte < columns * size; byte += 64) __builtin_prefetch(at + byte, 1);
  }

  // Convert sums [count, PANEL], for rows from `row` on and columns [begin, end) of a panel, add the bias, and store the
  // results.
  void finish(const float* sums, int64_t row, int64_t count, int64_t panel, int64_t begin, int64_t end) const {
    const int64_t first = panel * PANEL + begin, columns = outputs - first < end - begin ? outputs - first : end - begin;
    if (columns <= 0) return;
    const uint32_t* header = this->panel(panel) + begin;
    sums += begin;
    if (columns == PANEL && !wide && bias.narrow)
      return put_all(sums, row, count, header, bias.narrow + first, static_cast<bf16*>(out) + row * stride + first);
    float added[PANEL] = {};
    if (bias.narrow) convert(bias.narrow + first, added, columns);
    if (bias.wide) convert(bias.wide + first, added, columns);
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = (row + i) * stride + first;
      if (wide)
        put(sums + i * PANEL, row + i, header, added, static_cast<float*>(out) + at, columns);
      else
        put(sums + i * PANEL, row + i, header, added, static_cast<bf16*>(out) + at, columns);
    }
  }

  // The same for a whole panel in bfloat16.
  void put_all(const float* sums, int64_t row, int64_t count, const uint32_t* header, const bf16* added, bf16* to) const {
    constexpr int VECTORS = PANEL / WIDTH;
    Vec more[VECTORS];
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; j++) more[j] = load(added + j * WIDTH);
    for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++)
        store(to + i * stride + j * WIDTH, x.value(load(sums + i * PANEL + j * WIDTH), row + i, header + j * WIDTH) + more[j]);
  }

  template <class Number>
  void put(const float* sums, int64_t row, const uint32_t* header, const float* added, Number* to, int64_t columns) const {
    Number rounded[PANEL];
    Number* whole = columns % WIDTH == 0 ? to : rounded;
    for (int64_t j = 0; j < columns; j += WIDTH) store(whole + j, x.value(load(sums + j), row, header + j) + load(added + j));
    if (whole == rounded) memcpy(to, rounded, columns * sizeof(Number));
  }
};

// Compute rows [row, row + count) of columns [begin, end) of one panel. next: a panel to prefetch meanwhile; null: none.
template <class Kind>
void compute(const Product<Kind>& p, int64_t panel, int64_t begin, int64_t end, int64_t row, int64_t count, const void* next) {
  constexpr int64_t MOST = ROWS_OF_A_GROUP<Kind>;
  const int64_t groups = (count + MOST - 1) / MOST;
  const uint32_t* header = p.panel(panel);
  const bool opened_before = stored_opened<Kind>(header), opens = Kind::OPENS && !opened_before && groups >= OPENS_FROM<Kind>;
  const Steps steps = steps_of(p.x, header, opened_before, p.steps);
  const int64_t step = steps.step, most = opens ? OPENED_WORDS / opened_step(p.x) : stretch_words<Kind>(count) / step;
  const Stretches cuts(steps, most);
  const int64_t stretches = cuts.count();
  const int64_t look = look_of(p.x) / CACHE_LINE;
  const bool plain = count <= MOST + FEW_MORE<Kind>;
  const int64_t lines = plain && !prefetches_alone(p.x) && !(TILED<Kind> && count > MOST_ROWS) ? 0 : (look + groups - 1) / groups;
  const auto bound = [&](int64_t group) {
    if (!plain) return count * group / groups;
    return group < groups ? group * MOST : count;
  };
  alignas(64) float sums[MOST_TOGETHER * PANEL];
  alignas(64) uint32_t opened[Kind::OPENS && OPENS_FROM<Kind> < INT64_MAX ? OPENED_WORDS : 1];

  if (BY_AMX<Kind> && count <= MOST_PREFETCHED) p.prefetch_results(row, count, panel);
  for (int64_t stretch = 0; stretch < stretches; stretch++) {
    const int64_t first = cuts.begin(stretch), last = cuts.begin(stretch + 1);
    const bool ends = stretch + 1 == stretches, half = ends && p.half;
    Stretch part = {steps.at(first), last - first - half, half, stretch ? nullptr : header, begin, end};
    bool prepared = opened_before;
    if constexpr (Kind::OPENS) {
      if constexpr (!Kind::FIRST_OPENS && OPENS_FROM<Kind> < INT64_MAX) {
        if (opens) {
          p.x.open(part.words, part.steps, opened);
          part.words = opened, prepared = true;
        }
      }
    }
    const char* coming = static_cast<const char*>(ends ? next : steps.at(last));
    for (int64_t group = 0; group < groups; group++) {
      const int64_t from = bound(group), rows = bound(group + 1) - from;
      float* own = sums + (stretches > 1 ? from * PANEL : 0);
      const int64_t share = (last - first) * step * sizeof(uint32_t) / groups / 64 * 64;
      const Prefetch ahead = coming ? Prefetch{coming + group * share, groups >= NEAR_FROM ? lines : -lines} : Prefetch{nullptr, 0};
      multiply_group(p.x.from(row + from, first), prepared, opens ? opened : nullptr, rows, part, own, ahead);
      if (opens) part.words = opened, prepared = true;
      if (ends) p.finish(own, row + from, rows, panel, begin, end);
    }
  }
}

// The division of a product into tasks, and of the tasks into one contiguous run for each thread, so that each thread
// reads sequentially. A thread that has finished its run continues with tasks of slower threads' runs.
template <class Kind>
struct Division {
  static constexpr int64_t MOST_RUNS = 128;
  static constexpr int64_t WHOLE = UNITS<Kind>, STEP = ROWS_AT_ONCE<Kind>;
  struct alignas(64) Run {
    int64_t next, begin, end;  // units
  };

  const Product<Kind>& product;
  const Neighbors* neighbors;
  int64_t panels, parts, runs;
  bool by_parts;  // the order: all panels of a part of the rows, then the next part; else all parts of a panel
  Run run[MOST_RUNS];

  Division(const Product<Kind>& product, bool shared, const Neighbors* neighbors = nullptr)
      : product(product), neighbors(neighbors) {
    const int64_t threads = shared ? omp_get_max_threads() : 1;
    const int64_t rows = product.rows;
    panels = panels_of(product.outputs);
    // Rows are divided into parts of at most MOST_TOGETHER, and further if there are fewer than four tasks per thread.
    constexpr int64_t MOST = MOST_TOGETHER - (STEP - 1), LEAST = STEP > 4 * MOST_ROWS ? STEP : 4 * MOST_ROWS;
    parts = 0 < rows && rows <= MOST_TOGETHER ? 1 : (rows + MOST - 1) / MOST;
    while (panels * parts < 4 * threads && rows / (parts + 1) >= LEAST) parts++;
    // If inputs exceed L2, all panels are read for each part of the rows, instead of all inputs for each panel. Inputs are taken to
    // have as many words as a panel for so many outputs.
    const int64_t words = rows * product.slot / PANEL;
    by_parts = parts > 1 && words > KEPT_WORDS && words / parts <= KEPT_WORDS;
    runs = threads < MOST_RUNS ? threads : MOST_RUNS;
    const int64_t units = panels * parts * WHOLE;
    for (int64_t i = 0; i < runs; i++) {
      const int64_t begin = units * i / runs;
      run[i] = {begin / WHOLE * WHOLE, begin, units * (i + 1) / runs};
    }
  }

  // Called by every thread of the team.
  void compute_share() {
    const int64_t own = omp_get_thread_num();
    for (int64_t i = own; i < own + runs; i++) {
      Run& from = run[i % runs];
      int64_t at;
      while ((at = __atomic_fetch_add(&from.next, WHOLE, __ATOMIC_RELAXED)) < from.end) compute_task(at, from);
    }
  }

  // Compute the units of a run that belong to the task whose first unit is `at`.
  void compute_task(int64_t at, const Run& own) const {
    constexpr int64_t UNIT = PANEL / WHOLE;
    const int64_t begin = at < own.begin ? own.begin - at : 0, end = own.end - at < WHOLE ? own.end - at : WHOLE;
    const int64_t task = at / WHOLE;
    const int64_t panel = by_parts ? task % panels : task / parts, part = by_parts ? task / panels : task % parts;
    const int64_t from = first_row(part), count = first_row(part + 1) - from;
    const void* next = nullptr;
    if (at + WHOLE >= own.end)
      next = panel_of_next_product();
    else if (by_parts)
      next = product.panel((panel + 1) % panels);
    else if (part + 1 == parts)
      next = product.panel(panel + 1);
    compute(product, panel, begin * UNIT, end * UNIT, from, count, next);
  }

  int64_t first_row(int64_t part) const {
    return part == parts ? product.rows : (product.rows * part / parts + STEP / 2) / STEP * STEP;
  }

  // The calling thread's first panel of the matrix that is multiplied next; null: unknown.
  const void* panel_of_next_product() const {
    if (!neighbors || !neighbors->next_weights) return nullptr;
    const int64_t panel = neighbors->next_panels * (omp_get_thread_num() % runs) / runs;
    return static_cast<const char*>(neighbors->next_weights) + panel * neighbors->next_panel_bytes;
  }
};

}  // namespace
