// Products by AMX, as a Kind of products.h.
//
// A tile instruction multiplies 16 rows with 16 lines, 16 outputs wide, and adds the products to 16 x 16 sums. bfloat16 is summed in
// another order than by other instruction sets (tile_registers.h), so every number of rows is computed by tiles, and a row's
// results still are independent of other rows.

#pragma once

#if defined(__AMX_BF16__)

#include "products.h"
#include "tile_registers.h"

namespace {

constexpr int64_t TILE_PANEL = TILE_LINES * PANEL;  // words of a panel in these lines
constexpr int64_t TILE_BYTES = 64;                  // of a row in a tile

inline int64_t tile_steps(int64_t lines) { return (lines + TILE_LINES - 1) / TILE_LINES; }
inline int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

// Prefetches `lines` lines in equal parts at `calls` calls: into L1 if NEAR, else into L2.
template <bool NEAR>
struct PaceOf {
  const char* next;
  int64_t lines, each;

  PaceOf(const void* next, int64_t lines, int64_t calls)
      : next(static_cast<const char*>(next)), lines(lines), each(calls > 0 ? (lines + calls - 1) / calls : 0) {}

  void fetch() {
    const int64_t count = each < lines ? each : lines;
    for (int64_t line = 0; line < count; line++, next += 64) _mm_prefetch(next, NEAR ? _MM_HINT_T0 : _MM_HINT_T1);
    lines -= count;
  }
};
using Pace = PaceOf<false>;

// Steps of COUNT x 16 lines, which consist of words like Lines_, a Kind whose step is one line. Lines_ has
//
//   address(row)         the inputs of a row, from this step on
//   start_line(header)   64 initial values of the sums, or null: 0
//   add_tiles<S, R, L>() add to the sums in tile S the products of rows R and lines L
template <class Lines_, int COUNT = 1>
struct Blocks {
  using Lines = Lines_;
  static constexpr int64_t HEADER = Lines::HEADER, TILES_OF_A_STEP = COUNT;
  static constexpr bool UNPACKS = false;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = false, HALVES = false;

  Lines x;
  int64_t bytes;  // of a row, from this step on

  static constexpr int64_t step() { return COUNT * TILE_PANEL; }
  static constexpr int64_t look() { return step(); }
  bool prefetches() const { return true; }
  Blocks from(int64_t row, int64_t at) const {
    return {x.from(row, at * COUNT * TILE_LINES), bytes - at * COUNT * TILE_BYTES};
  }
  Vec value(Vec sums, int64_t row, const uint32_t* header) const { return x.value(sums, row, header); }
  // Lines from the 16 with number `at` on.
  const uint32_t* lines(const uint32_t* words, int64_t at, int64_t, uint32_t*, Pace*) const { return words + at * TILE_PANEL; }
};

template <class Lines, int COUNT>
constexpr bool BY_AMX<Blocks<Lines, COUNT>> = true;

// Steps of 16 lines, which stay in L1 while many rows pass. More steps save loads and stores of sums, but the steps that are
// prefetched meanwhile evict some of their lines. Those that are unpacked are not prefetched.
template <class Kind>
constexpr int64_t TILES_TOGETHER = Kind::UNPACKS ? 8 : 4;
constexpr int64_t FEW_TOGETHER = 2;    // the same for up to 16 rows, which read a line once
constexpr int64_t TILE_STEP_LINES = TILE_PANEL / CACHE_LINE;  // of the cache, in such a step

// Some steps of 16 lines: rows of inputs, and lines of words. Rows are `stride` bytes apart.
struct TileSteps {
  const char* rows;
  int64_t stride;
  const uint32_t* words;
  int64_t count;
};

// A last step with fewer lines than 16, padded with zeros.
struct PaddedStep {
  alignas(64) char rows[MOST_TOGETHER][TILE_BYTES];
  alignas(64) uint32_t words[TILE_PANEL];

  // bytes: of a row
  PaddedStep(const char* from, int64_t stride, int64_t count, int64_t bytes, const uint32_t* lines) {
    for (int64_t i = 0; i < count; i++) {
      memset(rows[i], 0, sizeof rows[i]);
      memcpy(rows[i], from + i * stride, bytes);
    }
    const int64_t used = (bytes + 3) / 4 * PANEL;
    memcpy(words, lines, used * sizeof *words);
    memset(words + used, 0, (TILE_PANEL - used) * sizeof *words);
  }
  TileSteps steps() const { return {rows[0], TILE_BYTES, words, 1}; }
};

constexpr int64_t LINE_BYTES = PANEL * sizeof(uint32_t);  // of a line, and of a row of sums

// Begin sums with a line, or with 0; or continue them.
template <int TILE>
void begin_sums(bool starts, const uint32_t* line, const float* sums) {
  if (!starts)
    load_tile<TILE>(sums, LINE_BYTES);
  else if (line)
    load_tile<TILE>(line, 0);
  else
    zero_tile<TILE>();
}

// The sums in tiles 0 to 3: two beside each other, and two that follow LOWER numbers behind these in memory.
template <int64_t LOWER>
struct FourSums {
  // line: of a panel, with the initial values of the first tile's columns, or null
  static void begin(bool starts, const uint32_t* line, const float* sums) {
    begin_sums<0>(starts, line, sums);
    begin_sums<1>(starts, line ? line + 16 : nullptr, sums + 16);
    begin_sums<2>(starts, line ? line + LOWER % PANEL : nullptr, sums + LOWER);
    begin_sums<3>(starts, line ? line + LOWER % PANEL + 16 : nullptr, sums + LOWER + 16);
  }
  static void end(float* sums) {
    store_tile<0>(sums, LINE_BYTES);
    store_tile<1>(sums + 16, LINE_BYTES);
    store_tile<2>(sums + LOWER, LINE_BYTES);
    store_tile<3>(sums + LOWER + 16, LINE_BYTES);
  }
};

// Computes the sums [rows, PANEL] of up to 16 rows.
template <class Lines>
struct SixteenRows : FourSums<32> {
  static void shape(TileRegisters& registers, int64_t rows) {
    TileShapes shapes;
    shapes.set(0, 5, rows);
    shapes.set(5, 8, TILE_LINES);
    registers.shape(shapes);
  }
  template <bool NEAR>
  static void add(const TileSteps& steps, int64_t row, PaceOf<NEAR>& pace) {
    const char* input = steps.rows + row * steps.stride;
    const uint32_t* words = steps.words;
    for (int64_t at = 0; at < steps.count; at++, input += TILE_BYTES, words += TILE_PANEL) {
      load_tile<4>(input, steps.stride);
      pace.fetch();
      load_tile<5>(words, LINE_BYTES);
      Lines::template add_tiles<0, 4, 5>();
      pace.fetch();
      load_tile<6>(words + 16, LINE_BYTES);
      Lines::template add_tiles<1, 4, 6>();
      pace.fetch();
      load_tile<7>(words + 32, LINE_BYTES);
      Lines::template add_tiles<2, 4, 7>();
      pace.fetch();
      load_tile<5>(words + 48, LINE_BYTES);
      Lines::template add_tiles<3, 4, 5>();
    }
  }
};

// Computes 32 columns of the sums [rows, PANEL] of 17 to 32 rows: each line loaded is multiplied twice.
template <class Lines>
struct ThirtyTwoRows : FourSums<TILE_ROWS * PANEL> {
  static void shape(TileRegisters& registers, int64_t rows) {
    TileShapes shapes;
    shapes.set(0, 8, TILE_ROWS);
    shapes.set(2, 4, rows - TILE_ROWS);
    shapes.set(5, 6, rows - TILE_ROWS);
    registers.shape(shapes);
  }
  static void add(const TileSteps& steps, int64_t row, int64_t column, Pace& pace) {
    const char* input = steps.rows + row * steps.stride;
    const uint32_t* words = steps.words + column;
    for (int64_t at = 0; at < steps.count; at++, input += TILE_BYTES, words += TILE_PANEL) {
      pace.fetch();
      load_tile<6>(words, LINE_BYTES);
      pace.fetch();
      load_tile<4>(input, steps.stride);
      Lines::template add_tiles<0, 4, 6>();
      pace.fetch();
      load_tile<7>(words + 16, LINE_BYTES);
      Lines::template add_tiles<1, 4, 7>();
      pace.fetch();
      load_tile<5>(input + TILE_ROWS * steps.stride, steps.stride);
      Lines::template add_tiles<2, 5, 6>();
      Lines::template add_tiles<3, 5, 7>();
    }
  }
};

// Add products to the sums [rows, PANEL] of any number of rows.
template <class Lines>
void add_products(TileRegisters& registers, const TileSteps& steps, int64_t rows, bool starts, const uint32_t* line, float* sums, Pace& pace) {
  for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
    const int64_t count = rows - row < 2 * TILE_ROWS ? rows - row : 2 * TILE_ROWS;
    float* own = sums + row * PANEL;
    if (count <= TILE_ROWS) {
      using Tiles = SixteenRows<Lines>;
      Tiles::shape(registers, count);
      Tiles::begin(starts, line, own);
      Tiles::add(steps, row, pace);
      Tiles::end(own);
      continue;
    }
    using Tiles = ThirtyTwoRows<Lines>;
    Tiles::shape(registers, count);
    for (int64_t column = 0; column < PANEL; column += 32) {
      Tiles::begin(starts, line ? line + column : line, own + column);
      Tiles::add(steps, row, column, pace);
      Tiles::end(own + column);
    }
  }
}

// Multiplies any number of rows. A Kind has the members of Blocks. One that UNPACKS stores lines in the room that lines() is given,
// which suffices for TILES_TOGETHER<Kind> x 16 lines.
template <class Kind>
struct ByTiles {
  using Lines = typename Kind::Lines;

  static void multiply(const Kind& x, const Stretch& stretch, int64_t rows, float* sums, Prefetch ahead) {
    const char* first = x.x.address(0);
    const int64_t stride = x.x.address(1) - first;
    const int64_t most = stretch.steps * Kind::TILES_OF_A_STEP * TILE_BYTES, bytes = most < x.bytes ? most : x.bytes;
    const int64_t whole = bytes / TILE_BYTES, tail = bytes % TILE_BYTES;
    const int64_t next = Kind::UNPACKS && ahead.lines ? stretch.steps * x.step() / CACHE_LINE : 0;
    Pace unpacking(ahead.next, next, whole * TILE_LINES);
    TileRegisters registers;
    alignas(64) uint32_t room[Kind::UNPACKS ? TILES_TOGETHER<Kind> * TILE_PANEL : 1];
    const uint32_t* line = stretch.header ? Lines::start_line(stretch.header) : nullptr;
    bool starts = stretch.header != nullptr;
    const bool few = rows <= TILE_ROWS;
    const int64_t at_once = few ? FEW_TOGETHER : TILES_TOGETHER<Kind>;
    if (few) {
      SixteenRows<Lines>::shape(registers, rows);
      SixteenRows<Lines>::begin(starts, line, sums);
    }
    // Steps are prefetched beside the ones before, so that they are still near when they are read; if they are unpacked, by lines().
    const auto add = [&](const TileSteps& steps, const void* following, int64_t count) {
      const int64_t lines = Kind::UNPACKS ? 0 : count * TILE_STEP_LINES, calls = 4 * tiles_of(rows) * steps.count;
      if (few) {
        // Into L1: lines that are read once are fetched once, not into L2 and then from there.
        PaceOf<true> pace(following, lines, calls);
        return SixteenRows<Lines>::add(steps, 0, pace);
      }
      Pace pace(following, lines, calls);
      add_products<Lines>(registers, steps, rows, starts, line, sums, pace);
      starts = false;
    };
    for (int64_t at = 0, count; at < whole; at += count) {
      count = whole - at < at_once ? whole - at : at_once;
      const int64_t left = whole - at - count;
      const TileSteps steps = {first + at * TILE_BYTES, stride, x.lines(stretch.words, at, count, room, &unpacking), count};
      if (left > 0)
        add(steps, steps.words + count * TILE_PANEL, left < at_once ? left : at_once);
      else
        add(steps, ahead.next, ahead.lines ? at_once : 0);
    }
    if (tail > 0) {
      const PaddedStep last(first + whole * TILE_BYTES, stride, rows, tail, x.lines(stretch.words, whole, 1, room, &unpacking));
      add(last.steps(), nullptr, 0);
    }
    if (few) SixteenRows<Lines>::end(sums);
  }
};

template <class Lines, int COUNT>
struct RowByRow<Blocks<Lines, COUNT>> : ByTiles<Blocks<Lines, COUNT>> {};

}  // namespace

#endif
