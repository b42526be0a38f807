// Attention of many queries in bfloat16 by AMX, in tiles of 16 rows: products pass through memory, in the L1 cache, between tile
// registers and softmax in vector registers.
//
// Placed keys and values are lines of pairs as tile registers need them. A step is 16 lines: 32 elements of queries and keys, or
// 32 weights and values.

#pragma once

#if defined(__AMX_BF16__)

#include "tile_registers.h"
#include "tiles.h"

namespace {

constexpr int TILE = TILE_ROWS;
constexpr int64_t LINES = 16;                       // of a step
constexpr int64_t KEYS = LINES * Pairs::PER_UNIT;  // of a step of weights and values

// c [TILE, N vectors] = a [TILE, steps] times b [steps, N vectors], for steps from `from` to `to`; added to c if `add`.
template <int N>
void multiply_tile(const Units& a, const Units& b, const Matrix<float>& c, int64_t from, int64_t to, bool add) {
  const int64_t a_stride = a.pitch * sizeof(uint32_t), b_stride = b.pitch * sizeof(uint32_t), c_stride = c.pitch * sizeof(float);
  if (add) {
    load_tile<0>(c.at, c_stride);
    if constexpr (N > 1) load_tile<1>(c.at + WIDTH, c_stride);
    if constexpr (N > 2) load_tile<2>(c.at + 2 * WIDTH, c_stride);
    if constexpr (N > 3) load_tile<3>(c.at + 3 * WIDTH, c_stride);
  } else {
    zero_tile<0>();
    if constexpr (N > 1) zero_tile<1>();
    if constexpr (N > 2) zero_tile<2>();
    if constexpr (N > 3) zero_tile<3>();
  }
  for (int64_t step = from; step < to; step++) {
    const uint32_t* lines = b.row(step * LINES);
    load_tile<4>(a.at + step * LINES, a_stride);
    load_tile<5>(lines, b_stride);
    add_pairs<0, 4, 5>();
    if constexpr (N > 1) load_tile<6>(lines + WIDTH, b_stride), add_pairs<1, 4, 6>();
    if constexpr (N > 2) load_tile<7>(lines + 2 * WIDTH, b_stride), add_pairs<2, 4, 7>();
    if constexpr (N > 3) load_tile<5>(lines + 3 * WIDTH, b_stride), add_pairs<3, 4, 5>();
  }
  store_tile<0>(c.at, c_stride);
  if constexpr (N > 1) store_tile<1>(c.at + WIDTH, c_stride);
  if constexpr (N > 2) store_tile<2>(c.at + 2 * WIDTH, c_stride);
  if constexpr (N > 3) store_tile<3>(c.at + 3 * WIDTH, c_stride);
}

// The tiles of a thread's task, with their scratch memory.
template <>
class Tiles<bf16, bf16, Pairs> {
 public:
  static constexpr int64_t ROWS = 256;  // most rows of a task, unless a single query has more

  // `width`: the head size, padded to whole vectors of units.
  Tiles(Carver& carver, int64_t most_rows, int64_t width)
      : rows_(carver, (most_rows + TILE - 1) / TILE * TILE, width),
        keys_{carver.take<uint32_t>(width / Pairs::PER_UNIT * BLOCK), BLOCK},
        values_{carver.take<uint32_t>(UNITS * width), width},
        weights_{carver.take<uint32_t>(TILE * UNITS), UNITS},
        scores_{carver.take<float>(TILE * BLOCK), BLOCK} {}

  // Attend a piece's queries to its keys, for one key head, and store the results. `after`: see each_block.
  void attend(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after) {
    const Piece& piece = *task.piece;
    const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
    const int64_t width = rows_.sums.pitch, lines = size / Pairs::PER_UNIT;
    TileShapes shapes;
    shapes.set(0, 8, TILE_ROWS);
    registers_.shape(shapes);
    rows_.begin(layer, task, rows, rows);
    memset(rows_.sums.at, 0, rows * width * sizeof(float));
    // The last step of keys is padded with zeros, like that of queries.
    memset(keys_.row(lines), 0, (width / Pairs::PER_UNIT - lines) * BLOCK * sizeof(uint32_t));
    const Sight sight(step, piece);
    const float factor = layer.scale * LOG2_E;
    each_block<bf16>(step, layer, task, after, [&](const auto& block, int64_t begin, const auto& next) {
      place_keys<bf16, Pairs>(block, next, size, keys_, Matrix<float>{});
      place_values<bf16, Pairs>(block, next, size, values_);
      // So is the last step of values, whose weights are zero: what is left in the scratch memory could be NaN.
      const int64_t used = (block.count + 1) / Pairs::PER_UNIT, padded = (used + LINES - 1) / LINES * LINES;
      memset(values_.row(used), 0, (padded - used) * width * sizeof(uint32_t));
      by_vectors(block.padded(), [&](auto vectors) {
        for (int64_t row = 0; row < rows; row += TILE) {
          const int64_t end = row + TILE < rows ? row + TILE : rows;
          attend_block<vectors.value>(row, end, shared, sight, begin, block.count, factor);
        }
      });
    });
    rows_.finish(layer, task, rows);
  }

 private:
  TileRegisters registers_;
  TiledRows rows_;
  Units keys_, values_, weights_;
  Matrix<float> scores_;

  // Attend a tile's rows to a block of `count` keys.
  template <int V>
  void attend_block(int64_t row, int64_t end, int64_t shared, const Sight& sight, int64_t begin, int64_t count, float factor) {
    // Later queries see later keys.
    const auto upper = sight.of(row / shared, begin, count), lower = sight.of((end - 1) / shared, begin, count);
    if (upper.first >= lower.last) return;
    const Units queries = rows_.queries.from(row);
    multiply_tile<V>(queries, keys_, scores_, 0, queries.pitch / LINES, false);
    const bool whole = lower.first == 0 && upper.last == V * WIDTH;
    for (int64_t r = row; r < end; r++) {
      Vec x[V];
      const float* scores = scores_.row(r - row);
      for (int v = 0; v < V; v++) x[v] = load(scores + v * WIDTH);
      if (!whole) {
        const auto keys = sight.of(r / shared, begin, count);
        const uint64_t seen = keys.first < keys.last ? ~uint64_t{0} >> (BLOCK - (keys.last - keys.first)) << keys.first : 0;
        for (int v = 0; v < V; v++) x[v] = _mm512_mask_mov_ps(set(-INFINITY), seen >> (v * WIDTH), x[v]);
      }
      weigh_row<V>(x, factor, rows_.bases[r], rows_.totals.row(r), weights_.row(r - row), rows_.sums.row(r), rows_.sums.pitch);
    }
    constexpr int FOUR = 4 * WIDTH;
    const int64_t from = upper.first / KEYS, to = (lower.last + KEYS - 1) / KEYS, width = rows_.sums.pitch;
    const Matrix<float> sums = rows_.sums.from(row);
    int64_t column = 0;
    for (; column + FOUR <= width; column += FOUR)
      multiply_tile<4>(weights_, {values_.at + column, width}, {sums.at + column, width}, from, to, true);
    if (column < width) multiply_tile<2>(weights_, {values_.at + column, width}, {sums.at + column, width}, from, to, true);
  }
};

}  // namespace

#endif
