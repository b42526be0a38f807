// Attention of many queries in bfloat16 by AMX, in tiles of 16 rows. Products pass through memory, in the L1 cache, between tile
// registers and softmax in vector registers.
//
// Placed keys and values are lines of pairs as tile registers need them. A step is 16 lines: 32 elements of queries and keys, or
// 32 weights and values.
//
// A tile's scores, weights and sums follow each other. Weighing one tile during the products of another one does not pay:
// after an instruction with tile registers, a core adds and multiplies 512 bits at half its rate for about a thousand cycles.

#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

#include "tile_registers.h"

namespace {

constexpr int TILE = TILE_ROWS;
constexpr int64_t KEYS = TILE_LINES * Pairs::PER_UNIT;  // of a step of weights and values

// N vectors of sums for each row of a tile, in registers 0 to N - 1.
template <int N>
struct TileSums {
  static void clear() {
    zero_tile<0>();
    if constexpr (N > 1) zero_tile<1>();
    if constexpr (N > 2) zero_tile<2>();
    if constexpr (N > 3) zero_tile<3>();
  }

  static void load(const Matrix<float>& sums) {
    const int64_t stride = sums.pitch * sizeof(float);
    load_tile<0>(sums.at, stride);
    if constexpr (N > 1) load_tile<1>(sums.at + WIDTH, stride);
    if constexpr (N > 2) load_tile<2>(sums.at + 2 * WIDTH, stride);
    if constexpr (N > 3) load_tile<3>(sums.at + 3 * WIDTH, stride);
  }

  // Add rows times lines, for steps from `from` to `to`.
  static void add(const Units& rows, const Units& lines, int64_t from, int64_t to) {
    const int64_t row_stride = rows.pitch * sizeof(uint32_t), stride = lines.pitch * sizeof(uint32_t);
    for (int64_t step = from; step < to; step++) {
      const uint32_t* line = lines.row(step * TILE_LINES);
      load_tile<4>(rows.at + step * TILE_LINES, row_stride);
      load_tile<5>(line, stride), add_pairs<0, 4, 5>();
      if constexpr (N > 1) load_tile<6>(line + WIDTH, stride), add_pairs<1, 4, 6>();
      if constexpr (N > 2) load_tile<7>(line + 2 * WIDTH, stride), add_pairs<2, 4, 7>();
      if constexpr (N > 3) load_tile<5>(line + 3 * WIDTH, stride), add_pairs<3, 4, 5>();
    }
  }

  static void store(const Matrix<float>& sums) {
    const int64_t stride = sums.pitch * sizeof(float);
    store_tile<0>(sums.at, stride);
    if constexpr (N > 1) store_tile<1>(sums.at + WIDTH, stride);
    if constexpr (N > 2) store_tile<2>(sums.at + 2 * WIDTH, stride);
    if constexpr (N > 3) store_tile<3>(sums.at + 3 * WIDTH, stride);
  }
};

// The tiles of a thread's task, with their scratch memory.
template <>
class Tiles<bf16, bf16, Pairs> {
 public:
  static constexpr int64_t ROWS = 512;  // most rows of a task, unless a single query has more

  // `width`: the head size, padded to whole vectors of units.
  Tiles(Carver& carver, int64_t most_rows, int64_t width)
      : rows_(carver, (most_rows + TILE - 1) / TILE * TILE, width),
        begun_(carver.take<bool>((most_rows + TILE - 1) / TILE)),
        keys_{carver.take<uint32_t>(width / Pairs::PER_UNIT * BLOCK), BLOCK},
        values_{carver.take<uint32_t>(UNITS * width), width},
        scores_{carver.take<float>(TILE * BLOCK), BLOCK},
        weights_{carver.take<uint32_t>(TILE * UNITS), UNITS} {}

  // Attend a piece's queries to its keys, for one key head, and store the results. `after`: see each_block.
  void attend(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after) {
    const Piece& piece = *task.piece;
    const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
    const int64_t width = rows_.sums.pitch, units = size / Pairs::PER_UNIT;
    TileShapes shapes;
    shapes.set(0, 8, TILE_ROWS);
    registers_.shape(shapes);
    rows_.begin(layer, task, rows, rows);
    memset(begun_, 0, (rows + TILE - 1) / TILE * sizeof(bool));
    // The last step of keys is padded with zeros, as queries are.
    memset(keys_.row(units), 0, (width / Pairs::PER_UNIT - units) * BLOCK * sizeof(uint32_t));
    const Sight sight(step, piece);
    const float factor = layer.scale * LOG2_E;
    each_block<bf16>(step, layer, task, after, [&](const auto& block, int64_t begin, const auto& next) {
      place_keys<bf16, Pairs>(block, next, size, keys_, Matrix<float>{});
      place_values<bf16, Pairs>(block, next, size, values_);
      // The last step of values is padded, too: its weights are zero, but what is left in the scratch memory could be NaN. So could
      // values of keys that a row does not see, but only of its own text.
      const int64_t lines = (block.count + 1) / Pairs::PER_UNIT, padded = (lines + TILE_LINES - 1) / TILE_LINES * TILE_LINES;
      memset(values_.row(lines), 0, (padded - lines) * width * sizeof(uint32_t));
      const Queries queries{sight, rows, shared, begin, block.count};
      by_vectors(block.padded(), [&](auto vectors) {
        for (int64_t row = 0; row < rows; row += TILE) attend_block<vectors.value>(queries, row, factor);
      });
    });
    finish(layer, task, rows);
  }

 private:
  // The rows of a task, and what they see of a block of `count` keys.
  struct Queries {
    const Sight& sight;
    int64_t rows, shared, begin, count;

    Sight::Keys of(int64_t row) const { return sight.of(row / shared, begin, count); }
  };

  TileRegisters registers_;
  TiledRows rows_;
  bool* begun_;  // by tile: whether its sums have been set
  Units keys_, values_;
  Matrix<float> scores_;
  Units weights_;

  // Attend the tile from `row` on to a block.
  template <int V>
  void attend_block(const Queries& queries, int64_t row, float factor) {
    const int64_t end = row + TILE < queries.rows ? row + TILE : queries.rows;
    // Later queries see later keys.
    const auto upper = queries.of(row), lower = queries.of(end - 1);
    if (upper.first >= lower.last) return;
    TileSums<V>::clear();
    TileSums<V>::add(rows_.queries.from(row), keys_, 0, rows_.queries.pitch / TILE_LINES);
    TileSums<V>::store(scores_);
    const bool alike = upper.first == lower.first && upper.last == lower.last;
    if (alike && upper.first == 0 && upper.last == V * WIDTH) {
      for (int64_t r = row; r < end; r++) weigh<V>(r, row, factor, [](int, Vec x) { return x; });
    } else {
      uint64_t seen = seen_keys(upper);
      for (int64_t r = row; r < end; r++) {
        if (!alike) seen = seen_keys(queries.of(r));
        weigh<V>(r, row, factor, [&](int v, Vec x) { return _mm512_mask_mov_ps(set(-INFINITY), seen >> (v * WIDTH), x); });
      }
    }
    add_values(row, upper.first / KEYS, (lower.last + KEYS - 1) / KEYS);
  }

  // A bit for each key of a block.
  static uint64_t seen_keys(const Sight::Keys& keys) {
    return keys.first < keys.last ? ~uint64_t{0} >> (BLOCK - (keys.last - keys.first)) << keys.first : 0;
  }

  // Convert the scores of one row of the tile from `first` on to weights.
  template <int V, class Mask>
  [[gnu::always_inline]] void weigh(int64_t row, int64_t first, float factor, const Mask& mask) {
    // The sums of a task exceed the L1 cache.
    for (int64_t d = 0; d < rows_.sums.pitch; d += WIDTH) _mm_prefetch(rows_.sums.row(row) + d, _MM_HINT_T0);
    Vec x[V];
    for (int v = 0; v < V; v++) x[v] = mask(v, load(scores_.row(row - first) + v * WIDTH));
    weigh_row<V>(x, factor, rows_.bases[row], rows_.totals.row(row), weights_.row(row - first), rows_.sums.row(row),
                 rows_.sums.pitch);
  }

  // Add a block's values, by their weights, to the sums of the tile from `row` on; steps of values from `from` to `to`.
  void add_values(int64_t row, int64_t from, int64_t to) {
    const int64_t width = rows_.sums.pitch;
    bool& begun = begun_[row / TILE];
    const auto add = [&](auto vectors, int64_t column) {
      const Matrix<float> sums{rows_.sums.row(row) + column, width};
      using Sums = TileSums<vectors.value>;
      begun ? Sums::load(sums) : Sums::clear();
      Sums::add(weights_, {values_.at + column, width}, from, to);
      Sums::store(sums);
    };
    int64_t column = 0;
    for (; column + 4 * WIDTH <= width; column += 4 * WIDTH) add(Constant<4>(), column);
    if (column < width) add(Constant<2>(), column);
    begun = true;
  }

  // Store the results. A division for each row, not for each vector, which would take a tenth of the time.
  void finish(const AttentionLayer& layer, Task task, int64_t rows) const {
    for (int64_t row = 0; row < rows; row++) {
      const float share = 1 / sum(load(rows_.totals.row(row)));
      const float* sums = rows_.sums.row(row);
      bf16* out = result<bf16>(layer, *task.piece, task.head, row);
      int64_t d = 0;
      for (; d + WIDTH <= layer.size; d += WIDTH) store(out + d, load(sums + d) * set(share));
      for (; d < layer.size; d++) set(out + d, sums[d] * share);
    }
  }
};

}  // namespace

#endif
