// Products of bfloat16 by AMX, the matrix unit of Intel's CPUs since Sapphire Rapids, as a Kind of products.h.
//
// A tile register holds 16 rows of 64 bytes. An instruction multiplies 16 rows of 32 inputs with 16 lines of pairs, 16 outputs
// wide, and adds the products to 16 x 16 sums. It sums the products of first and of second inputs of pairs each on its own,
// adds the two, and adds the result to the former sum. So results differ in their last bits from those of other instruction
// sets, and every number of rows is computed by tiles.
//
// Tiles are named by numbers in instructions, which C++ cannot compute: they are written out.

#pragma once

#if defined(__AMX_BF16__)

#include "pairs.h"

namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_LINES = 16;                  // of a tile of weights
constexpr int64_t TILE_PANEL = TILE_LINES * PANEL;  // words of a panel's step

// What LDTILECFG reads: the rows and the bytes of a row of each tile register.
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Give tiles [first, last) so many rows.
  void set(int first, int last, int64_t count) {
    for (int tile = first; tile < last; tile++) bytes[tile] = 64, rows[tile] = static_cast<uint8_t>(count);
  }
};
static_assert(sizeof(TileShapes) == 64);

// The tile registers while a thread uses them. As long as they are in use, each switch of threads saves 8 KiB more.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (used_) _tile_release();
  }

  void shape(const TileShapes& shapes) {
    _tile_loadconfig(&shapes);
    used_ = true;
  }

 private:
  bool used_ = false;
};

// Order the stores before it and the loads of tiles behind it, which the compiler takes for calculations.
inline void settle() { __asm__ volatile("" ::: "memory"); }

// Weights as lines of pairs; a step is 16 lines.
struct Blocks {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = false, HALVES = false;

  Pairs x;
  int64_t inputs;  // from the first step on

  static constexpr int64_t step() { return TILE_PANEL; }
  static constexpr int64_t look() { return LINES_OF_A_LOOK * PANEL; }
  bool prefetches() const { return true; }
  Blocks from(int64_t row, int64_t at) const { return {x.from(row, at * TILE_LINES), inputs - at * 2 * TILE_LINES}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }

  // Inputs of `steps` steps.
  int64_t inputs_of(int64_t steps) const { return steps * 2 * TILE_LINES < inputs ? steps * 2 * TILE_LINES : inputs; }
};

inline int64_t tile_steps_of(int64_t inputs) { return (pairs_of(inputs) + TILE_LINES - 1) / TILE_LINES; }

template <>
constexpr int64_t ROWS_OF_A_GROUP<Blocks> = MOST_TOGETHER;
template <>
constexpr int64_t UNITS<Blocks> = 1;

// The operands of a stretch: whole steps, and a last one with fewer inputs, padded with zeros.
struct TileOperands {
  const uint16_t* rows;
  int64_t stride;  // bytes
  const uint32_t* words;
  int64_t steps;
  bool more;  // whether a last step follows
  alignas(64) uint16_t last_rows[MOST_TOGETHER][2 * TILE_LINES];
  alignas(64) uint32_t last_words[TILE_PANEL];

  TileOperands(const Blocks& x, const Stretch& stretch, int64_t count)
      : rows(x.x.numbers), stride(x.x.stride * static_cast<int64_t>(sizeof *rows)), words(stretch.words) {
    const int64_t inputs = x.inputs_of(stretch.steps), left = inputs % (2 * TILE_LINES), lines = pairs_of(left);
    steps = inputs / (2 * TILE_LINES), more = left > 0;
    if (!more) return;
    for (int64_t i = 0; i < count; i++) {
      memset(last_rows[i], 0, sizeof last_rows[i]);
      memcpy(last_rows[i], rows + i * x.x.stride + inputs - left, left * sizeof *rows);
    }
    memcpy(last_words, words + steps * TILE_PANEL, lines * PANEL * sizeof *words);
    memset(last_words + lines * PANEL, 0, (TILE_LINES - lines) * PANEL * sizeof *words);
  }
};

// Prefetches `lines` lines in equal parts at `calls` calls.
struct Pace {
  const char* next;
  int64_t lines, each;

  Pace(const char* next, int64_t lines, int64_t calls) : next(next), lines(lines), each((lines + calls - 1) / calls) {}

  void fetch() {
    const int64_t count = each < lines ? each : lines;
    for (int64_t line = 0; line < count; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    lines -= count;
  }
};

template <>
struct RowByRow<Blocks> {
  static void multiply(const Blocks& x, const Stretch& stretch, int64_t rows, float* sums, Prefetch ahead) {
    const TileOperands of(x, stretch, rows);
    TileRegisters registers;
    settle();
    const int64_t blocks = rows <= TILE_ROWS ? 1 : 2 * ((rows + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS));
    Pace pace(ahead.next, ahead.lines ? stretch.steps * TILE_PANEL / CACHE_LINE : 0, blocks * stretch.steps);
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
      const int64_t count = rows - row < 2 * TILE_ROWS ? rows - row : 2 * TILE_ROWS;
      if (count <= TILE_ROWS)
        multiply_one(registers, of, row, count, sums + row * PANEL, stretch.header != nullptr, pace);
      else
        multiply_two(registers, of, row, count, sums + row * PANEL, stretch.header != nullptr, pace);
    }
  }

 private:
  static constexpr int64_t PITCH = PANEL * sizeof(float);  // bytes of a row of sums and of a line

  // Zero the sums.
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Up to 16 rows and all outputs of a panel.
  static void multiply_one(TileRegisters& registers, const TileOperands& of, int64_t row, int64_t count, float* sums,
                           bool starts, Pace& pace) {
    TileShapes shapes;
    shapes.set(0, 5, count);
    shapes.set(5, 8, TILE_LINES);
    registers.shape(shapes);
    if (starts) {
      clear();
    } else {
      _tile_loadd(0, sums, PITCH);
      _tile_loadd(1, sums + 16, PITCH);
      _tile_loadd(2, sums + 32, PITCH);
      _tile_loadd(3, sums + 48, PITCH);
    }
    const auto step = [&](const void* input, int64_t stride, const uint32_t* words) {
      _tile_loadd(4, input, stride);
      _tile_loadd(5, words, PITCH);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, words + 16, PITCH);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, words + 32, PITCH);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, words + 48, PITCH);
      _tile_dpbf16ps(3, 4, 5);
    };
    const char* input = reinterpret_cast<const char*>(of.rows) + row * of.stride;
    for (int64_t at = 0; at < of.steps; at++) {
      pace.fetch();
      step(input + at * 64, of.stride, of.words + at * TILE_PANEL);
    }
    if (of.more) step(of.last_rows[row], 64, of.last_words);
    _tile_stored(0, sums, PITCH);
    _tile_stored(1, sums + 16, PITCH);
    _tile_stored(2, sums + 32, PITCH);
    _tile_stored(3, sums + 48, PITCH);
  }

  // 17 to 32 rows and all outputs of a panel, half of them at a time.
  static void multiply_two(TileRegisters& registers, const TileOperands& of, int64_t row, int64_t count, float* sums,
                           bool starts, Pace& pace) {
    TileShapes shapes;
    shapes.set(0, 8, TILE_ROWS);
    shapes.set(2, 4, count - TILE_ROWS);
    shapes.set(5, 6, count - TILE_ROWS);
    registers.shape(shapes);
    const char* input = reinterpret_cast<const char*>(of.rows) + row * of.stride;
    for (int64_t first = 0; first < PANEL; first += 32) {
      float *upper = sums + first, *lower = upper + TILE_ROWS * PANEL;
      if (starts) {
        clear();
      } else {
        _tile_loadd(0, upper, PITCH);
        _tile_loadd(1, upper + 16, PITCH);
        _tile_loadd(2, lower, PITCH);
        _tile_loadd(3, lower + 16, PITCH);
      }
      const auto step = [&](const char* input, int64_t stride, const uint32_t* words) {
        _tile_loadd(6, words, PITCH);
        _tile_loadd(4, input, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, words + 16, PITCH);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, input + TILE_ROWS * stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      };
      for (int64_t at = 0; at < of.steps; at++) {
        pace.fetch();
        step(input + at * 64, of.stride, of.words + at * TILE_PANEL + first);
      }
      if (of.more) step(reinterpret_cast<const char*>(of.last_rows[row]), 64, of.last_words + first);
      _tile_stored(0, upper, PITCH);
      _tile_stored(1, upper + 16, PITCH);
      _tile_stored(2, lower, PITCH);
      _tile_stored(3, lower + 16, PITCH);
    }
  }
};

template <>
struct Group<Blocks, 1> {
  static void multiply(const Blocks& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    RowByRow<Blocks>::multiply(x, stretch, 1, sums, ahead);
  }
};

}  // namespace

#endif
