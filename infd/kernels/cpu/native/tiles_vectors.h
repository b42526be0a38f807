// Attention of many queries in bfloat16 in tiles of TILE rows, whose scores of a block of keys stay in vector registers until they
// are weights of softmax.

#pragma once

#include "tiles.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace {

constexpr int TILE = 6;         // rows of a tile, whose scores of a block fit the vector registers
constexpr int PAIR = 2 * TILE;  // rows of which weighted sums of two vectors fit the vector registers

// The keys of a block that a tile's rows see: one bit for each key.
struct Seen {
  uint64_t of[TILE], all, any;

  // Whether all rows see the block's first `keys` keys.
  bool all_of(int keys) const { return ~all << (BLOCK - keys) == 0; }
  __mmask16 lanes(int row, int vector) const { return of[row] >> (vector * WIDTH); }
};

// The rows of a tile, in the scratch memory.
struct Tile {
  Units queries;
  uint32_t* weights;           // [TILE, UNITS]
  Matrix<float> sums, totals;  // totals [TILE, WIDTH]: the sum of weights, by lane
  float* bases;                // times log2(e); -inf: the row has seen no key

  // Compute the weights of a block's `padded` keys, and add them to the totals. Return whether all bases may stay; if not,
  // only `weights` have changed, and `raise` is to be called.
  bool multiply(const Units& keys, int64_t padded, int64_t steps, float factor, const Seen& seen) const {
    return by_vectors(padded, [&](auto vectors) {
      constexpr int V = vectors.value;
      return seen.all_of(V * WIDTH) ? weigh_keys<V, false, false>(keys, steps, factor, seen)
                                    : weigh_keys<V, true, false>(keys, steps, factor, seen);
    });
  }

  // The same for rows of which none has seen a key: their bases are set. Return whether all rows have a base.
  bool begin(const Units& keys, int64_t padded, int64_t steps, float factor, const Seen& seen) const {
    by_vectors(padded, [&](auto vectors) { return weigh_keys<vectors.value, true, true>(keys, steps, factor, seen); });
    return based();
  }

  // The same for any rows: some may have seen no key, and a base may have to be raised. Return whether all rows have a base.
  bool raise(const Units& keys, int64_t padded, int64_t steps, float factor, const Seen& seen) const {
    alignas(64) float scores[TILE * BLOCK];
    ::multiply<Pairs, false>(queries, keys, Matrix<float>{scores, BLOCK}, TILE, padded, steps);
    for (int r = 0; r < TILE; r++) {
      Vec x[VECTORS];
      for (int v = 0; v < VECTORS; v++)
        x[v] = _mm512_mask_loadu_ps(set(-INFINITY), seen.lanes(r, v), scores + r * BLOCK + v * WIDTH);
      weigh_row<VECTORS>(x, factor, bases[r], totals.row(r), weights + r * UNITS, sums.row(r), sums.pitch);
    }
    return based();
  }

  // Whether no row has seen a key.
  bool fresh() const {
    for (int r = 0; r < TILE; r++)
      if (bases[r] > -INFINITY) return false;
    return true;
  }

  // Whether all rows have a base.
  bool based() const {
    for (int r = 0; r < TILE; r++)
      if (!(bases[r] > -INFINITY)) return false;
    return true;
  }

  // FRESH: no row has seen a key, so that each base is the largest score, and no total is too large.
  template <int V, bool MASKED, bool FRESH>
  bool weigh_keys(const Units& keys, int64_t steps, float factor, const Seen& seen) const {
    Vec x[TILE][V], sum[TILE];
    for (int r = 0; r < TILE; r++)
      for (int v = 0; v < V; v++) x[r][v] = set(0);
    for (int64_t step = 0; step < steps; step++) {
      Vec right[V];
      for (int v = 0; v < V; v++) right[v] = load_units(keys.at + step * BLOCK + v * WIDTH);
      for (int r = 0; r < TILE; r++) {
        const Vec left = repeat_unit(queries.row(r) + step);
        for (int v = 0; v < V; v++) x[r][v] = Pairs::multiply_add(left, right[v], x[r][v]);
      }
    }
    __mmask16 beyond = 0;
#pragma GCC unroll TILE  // otherwise the scores would pass through memory
    for (int r = 0; r < TILE; r++) {
      if (MASKED)
        for (int v = 0; v < V; v++) x[r][v] = _mm512_mask_mov_ps(set(-INFINITY), seen.lanes(r, v), x[r][v]);
      float base = bases[r];
      if (FRESH) {
        Vec most = set(-INFINITY);
        for (int v = 0; v < V; v++) most = max(x[r][v] * set(factor), most);
        bases[r] = largest(most);
        base = bases[r] > -INFINITY ? bases[r] : 0;
      }
      sum[r] = weigh_products<V>(x[r], factor, base, load(totals.row(r)), weights + r * UNITS);
      beyond |= over(sum[r]);
    }
    if (!FRESH && beyond) return false;
    for (int r = 0; r < TILE; r++) store(totals.row(r), sum[r]);
    return true;
  }

};

// Adds to the sums of a few rows a block's values, from unit `from` to `to`, by their weights.
struct Weighing {
  const uint32_t* weights;  // [rows, UNITS]
  Units values;
  Matrix<float> sums;
  int64_t from, to;

  template <int R, int V>
  void add(int64_t row, int64_t column) const {
    const uint32_t* left = weights + row * UNITS;
    float* out = sums.row(row) + column;
    Vec x[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) x[r][v] = load(out + r * sums.pitch + v * WIDTH);
    for (int64_t unit = from; unit < to; unit++) {
      Vec right[V];
      for (int v = 0; v < V; v++) right[v] = load_units(values.row(unit) + column + v * WIDTH);
      for (int r = 0; r < R; r++) {
        const Vec weight = repeat_unit(left + r * UNITS + unit);
        for (int v = 0; v < V; v++) x[r][v] = Pairs::multiply_add(weight, right[v], x[r][v]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(out + r * sums.pitch + v * WIDTH, x[r][v]);
  }
};

// The tiles of a thread's task, with their scratch memory.
template <>
class Tiles<bf16, bf16, Pairs> {
 public:
  static constexpr int64_t ROWS = 256;  // most rows of a task, unless a single query has more

  // `width`: the head size, padded to whole vectors of units.
  Tiles(Carver& carver, int64_t most_rows, int64_t width)
      : Tiles(carver, whole_tiles(most_rows), width, width / Pairs::PER_UNIT) {}

  // Attend a piece's queries to its keys, for one key head, and store the results. `after`: see each_block.
  void attend(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after) {
    const Piece& piece = *task.piece;
    const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
    const int64_t padded = whole_tiles(rows);
    rows_.begin(layer, task, rows, padded);
    memset(rows_.sums.at, 0, padded * rows_.sums.pitch * sizeof(float));
    for (int64_t tile = 0; tile < padded / TILE; tile++) based_[tile] = layer.sinks;
    const Sight sight(step, piece);
    const int64_t steps = size / Pairs::PER_UNIT;
    const float factor = layer.scale * LOG2_E;
    each_block<bf16>(step, layer, task, after, [&](const auto& block, int64_t begin, const auto& next) {
      place_keys<bf16, Pairs>(block, next, size, keys_, Matrix<float>{});
      place_values<bf16, Pairs>(block, next, size, values_);
      const Seen ends[] = {seen_by(sight, 0, rows, shared, begin, block.count),
                           seen_by(sight, padded - TILE, rows, shared, begin, block.count)};
      // If the first and the last row see the same keys, the rows between do, too; unless they see none.
      const uint64_t all = ends[0].all;
      const bool alike = all != 0 && ends[0].any == all && ends[1].all == all && ends[1].any == all;
      for (int64_t row = 0; row < padded; row += PAIR) {
        const int count = row + PAIR <= padded ? 2 : 1;
        uint64_t used = 0;
        for (int i = 0; i < count; i++) {
          const int64_t first = row + i * TILE;
          const Seen seen = alike ? ends[0] : seen_by(sight, first, rows, shared, begin, block.count);
          const Tile tile = at(first, i);
          used |= seen.any;
          if (seen.any == 0)
            memset(tile.weights, 0, TILE * BLOCK * sizeof(bf16));
          else if (!based_[first / TILE] && tile.fresh())
            based_[first / TILE] = tile.begin(keys_, block.padded(), steps, factor, seen);
          else if (!based_[first / TILE] || !tile.multiply(keys_, block.padded(), steps, factor, seen))
            based_[first / TILE] = tile.raise(keys_, block.padded(), steps, factor, seen);
        }
        if (used) weigh(row, count, used);
      }
    });
    for (int64_t row = 0; row < rows; row++)
      divide(rows_.sums.row(row), sum(load(rows_.totals.row(row))), result<bf16>(layer, piece, task.head, row), size);
  }

 private:
  static int64_t whole_tiles(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

  TiledRows rows_;
  Units keys_, values_;
  uint32_t* weights_;  // of a pair of tiles
  bool* based_;  // by tile: whether all of its rows have a base

  Tiles(Carver& carver, int64_t rows, int64_t width, int64_t units)
      : rows_(carver, rows, width),
        keys_{carver.take<uint32_t>(units * BLOCK), BLOCK},
        values_{carver.take<uint32_t>(UNITS * width), width},
        weights_(carver.take<uint32_t>(PAIR * UNITS)),
        based_(carver.take<bool>(rows / TILE)) {}

  Tile at(int64_t row, int number) const {
    return {rows_.queries.from(row), weights_ + number * TILE * UNITS, rows_.sums.from(row), rows_.totals.from(row),
            rows_.bases + row};
  }

  // Add the values of the block's keys, by their weights, to the sums of `tiles` tiles from `row` on. used: a bit for
  // each key that some row sees.
  void weigh(int64_t row, int tiles, uint64_t used) const {
    constexpr int FOUR = 4 * WIDTH;
    const Weighing weighing{weights_, values_, rows_.sums.from(row), __builtin_ctzll(used) / Pairs::PER_UNIT,
                            UNITS - __builtin_clzll(used) / Pairs::PER_UNIT};
    const int64_t width = rows_.sums.pitch;  // a multiple of two vectors
    int64_t column = 0;
    for (; column + FOUR <= width; column += FOUR)
      for (int i = 0; i < tiles; i++) weighing.add<TILE, 4>(i * TILE, column);
    if (column < width) tiles == 2 ? weighing.add<PAIR, 2>(0, column) : weighing.add<TILE, 2>(0, column);
  }

  // Rows of padding see what the last row sees.
  static Seen seen_by(const Sight& sight, int64_t first, int64_t rows, int64_t shared, int64_t begin, int64_t count) {
    Seen seen{{}, ~uint64_t{0}, 0};
    for (int i = 0; i < TILE; i++) {
      const int64_t row = first + i < rows ? first + i : rows - 1;
      const auto keys = sight.of(row / shared, begin, count);
      seen.of[i] = keys.first < keys.last ? ~uint64_t{0} >> (BLOCK - (keys.last - keys.first)) << keys.first : 0;
      seen.all &= seen.of[i];
      seen.any |= seen.of[i];
    }
    return seen;
  }
};

}  // namespace

#endif
