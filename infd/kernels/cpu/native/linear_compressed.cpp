// Products with a matrix of compressed bfloat16 weights in panels; algorithm in products.h, layout in compressed.h.
//
// The products have the bits of those with lines of pairs.

#if defined(__AVX512BF16__)

#include "amx.h"
#include "compressed.h"
#include "pairs.h"

namespace {

#if defined(__AMX_BF16__)

// Compressed steps, whose lines of pairs tiles multiply.
struct Compressed {
  using Lines = Pairs;
  using Opened = Blocks<Pairs, LINES / TILE_LINES>;
  static constexpr int64_t HEADER = sizeof(PanelHeader) / sizeof(uint32_t), TILES_OF_A_STEP = LINES / TILE_LINES;
  static constexpr bool UNPACKS = true;
  static constexpr bool ONE_LINE = false, TILES = false, HALVES = false, OPENS = true, FIRST_OPENS = false, SOME_OPENED = true;

  Pairs x;
  int64_t bytes;  // of a row, from this step on

  Compressed(const Pairs& x, int64_t inputs) : x(x), bytes(inputs * int64_t{sizeof(bf16)}) {}

  static constexpr int64_t step() { return sizeof(Step) / sizeof(uint32_t); }
  static constexpr int64_t look() { return step(); }
  bool prefetches() const { return true; }
  Compressed from(int64_t row, int64_t at) const {
    return {x.from(row, at * LINES), inputs() - at * 2 * LINES};
  }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }
  int64_t inputs() const { return bytes / int64_t{sizeof(bf16)}; }

  static bool opened(const uint32_t* header) { return *header == PanelHeader::PAIRS; }
  int64_t fitting() const { return fitting_steps(inputs()); }
  static const uint32_t* rest(const uint32_t* header) {
    return header + reinterpret_cast<const PanelHeader*>(header)->rest / static_cast<int64_t>(sizeof *header);
  }
  Opened opened() const { return {x, bytes}; }

  // Unpack the steps of 16 x `count` lines from the 16 with number `at` on.
  const uint32_t* lines(const uint32_t* words, int64_t at, int64_t count, uint32_t* room, Pace* pace) const {
    const int64_t begin = at / TILES_OF_A_STEP, end = (at + count + TILES_OF_A_STEP - 1) / TILES_OF_A_STEP;
    const int64_t all = pairs_of(inputs());
    uint32_t* to = room;
    for (int64_t number = begin; number < end; number++) {
      Unpacker unpacker(reinterpret_cast<const Step*>(words)[number]);
      const int64_t left = all - number * LINES, lines = left < LINES ? left : LINES;
      for (int64_t line = 0; line < lines; line++, to += PANEL) {
        pace->fetch();
        __m512i pairs[PANEL / WIDTH];
        unpacker.unpack(line, pairs);
        for (int j = 0; j < PANEL / WIDTH; j++) _mm512_store_si512(to + j * WIDTH, pairs[j]);
      }
    }
    return room + (at - begin * TILES_OF_A_STEP) * TILE_PANEL;
  }
};

template <>
constexpr int64_t OPENS_FROM<Compressed> = INT64_MAX;
template <>
constexpr bool BY_AMX<Compressed> = true;
template <>
struct RowByRow<Compressed> : ByTiles<Compressed> {};

#else

// CLOSED: steps as they are stored. OPENING: the same, and products store them as lines of pairs. OPENED: a step is 32 lines of
// pairs.
enum Stage { CLOSED, OPENING, OPENED };

template <Stage STAGE>
struct Compressed {
  static constexpr int64_t HEADER = sizeof(PanelHeader) / sizeof(uint32_t);
  static constexpr bool ONE_LINE = false, TILES = false, HALVES = false;
  static constexpr bool OPENS = STAGE == CLOSED, FIRST_OPENS = true, SOME_OPENED = true;
  using Opening = Compressed<OPENING>;
  using Opened = Compressed<OPENED>;

  Pairs x;
  int64_t inputs;  // from the first step on
  uint32_t* to = nullptr;  // where to store lines of pairs

  static constexpr int64_t step() { return STAGE == OPENED ? LINES * PANEL : sizeof(Step) / sizeof(uint32_t); }
  static constexpr int64_t look() { return step() / (LINES / LINES_OF_A_LOOK); }
  bool prefetches() const { return false; }
  Compressed from(int64_t row, int64_t at) const { return {x.from(row, at * LINES), inputs - at * 2 * LINES}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }

  static bool opened(const uint32_t* header) { return *header == PanelHeader::PAIRS; }
  int64_t fitting() const { return fitting_steps(inputs); }
  static const uint32_t* rest(const uint32_t* header) {
    return header + reinterpret_cast<const PanelHeader*>(header)->rest / static_cast<int64_t>(sizeof *header);
  }
  Opened opened() const { return {x, inputs}; }
  Opening opening(uint32_t* to) const { return {x, inputs, to}; }

  // Whole pairs of `steps` steps.
  int64_t lines(int64_t steps) const { return steps * LINES < inputs / 2 ? steps * LINES : inputs / 2; }
  // Whether half a pair follows them.
  bool half(int64_t steps) const { return steps * 2 * LINES > inputs && inputs % 2 != 0; }
};

// The first group of rows reads memory, the second one only the cache.
template <>
constexpr int64_t OPENS_FROM<Compressed<CLOSED>> = 2;

template <Stage STAGE, int ROWS>
struct Group<Compressed<STAGE>, ROWS> {
  static void multiply(const Compressed<STAGE>& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    constexpr int VECTORS = PANEL / WIDTH;
    static_assert(VECTORS == 4);
    Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) sum[i][j] = stretch.header ? set(0.0f) : load(sums + i * PANEL + j * WIDTH);

    const int64_t lines = x.lines(stretch.steps);
    const Step* steps = reinterpret_cast<const Step*>(stretch.words);
    for (int64_t at = 0; at < stretch.steps; at++) {
      Unpacker unpacker(steps[at]);
      const auto multiply_line = [&](int64_t line, auto word) {
        __m512i pairs[VECTORS];
        unpacker.unpack(line % LINES, pairs);
        if constexpr (STAGE == OPENING)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) _mm512_storeu_si512(x.to + line * PANEL + j * WIDTH, pairs[j]);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          const Pairs::Input input = Pairs::input(word(i, line));
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = Pairs::add(sum[i][j], (__m512bh)pairs[j], input);
        }
      };
      const int64_t end = (at + 1) * LINES < lines ? (at + 1) * LINES : lines;
      for (int64_t line = at * LINES; line < end; line++) {
        if (line % LINES_OF_A_LOOK == 0) ahead.fetch();
        multiply_line(line, [&](int i, int64_t line) { return x.x.word(i, line); });
      }
      if (at + 1 == stretch.steps && x.half(stretch.steps))
        multiply_line(lines, [&](int i, int64_t line) { return x.x.half_word(i, line); });
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + j * WIDTH, sum[i][j]);
  }
};

template <int ROWS>
struct Group<Compressed<OPENED>, ROWS> {
  static void multiply(const Compressed<OPENED>& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    Stretch lines = stretch;
    lines.steps = x.lines(stretch.steps), lines.half = x.half(stretch.steps);
    Group<Pairs, ROWS>::multiply(x.x, lines, sums, ahead);
  }
};

#endif

}  // namespace

// out [rows, outputs] = x [rows, inputs] times the packed weights, transposed, plus bias.
INFD_KERNEL(multiply_compressed_bf16)
(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t, const Neighbors* neighbors) {
#if defined(__AMX_BF16__)
  using Kind = Compressed;
#else
  using Kind = Compressed<CLOSED>;
#endif
  const int64_t panel = panel_bytes(inputs) / sizeof(uint32_t);
  const Product<Kind> product = {{{x, x_stride}, inputs}, rows, weights, outputs, steps_of(inputs), false, bias, out,
                                 out_stride, wide != 0, panel};
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Kind> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  division.compute_share();
}

#endif
