// Attention of many queries in bfloat16, tile by tile: the scores of TILE rows and one block of keys stay in registers
// until they are weights of softmax.
//
// A row's weights are relative to its base: its largest score in the first block of which it sees a key. The base is
// raised only when the sum of weights exceeds MOST_TOTAL, for a common factor changes the precision neither of bfloat16
// nor of float. So most blocks need no maximum, and sums are hardly ever rescaled. The total is that of weights as rounded
// to bfloat16, so that a weight which outweighs all others is exact. Whether a base is raised depends on its row alone:
// neither the tile nor the other queries of the piece change a bit of a row's result.

#pragma once

#include "many_queries.h"
#include "pieces.h"
#include "scratch.h"
#include "softmax.h"

namespace {

// Where tiles do not exist.
template <class Number, class Cached, class Form>
class Tiles {
 public:
  static constexpr int64_t ROWS = 0;

  Tiles(Carver&, int64_t, int64_t) {}
  void attend(const AttentionStep&, const AttentionLayer&, Task, Task) {}
};

template <class Number, class Cached, class Form>
struct RowOfTile {
  static constexpr bool EXISTS = false;

  static void weigh(float*, int64_t, int64_t, float, SoftmaxState&, uint32_t*, float*, int64_t) {}
};

#if defined(__AVX512BF16__)

constexpr int TILE = 6;         // rows of a tile, whose scores of a block fit the vector registers
constexpr int PAIR = 2 * TILE;  // rows of which weighted sums of two vectors fit the vector registers
constexpr int VECTORS = BLOCK / WIDTH;
constexpr int UNITS = BLOCK / Pairs::PER_UNIT;
constexpr float MOST_TOTAL = 1 << 20;  // of weights, in a lane
constexpr float LEAST_RAISE = 16;      // of a base: a total above MOST_TOTAL stays far above 0

// 2^x, with a relative error below 8e-5, a twentieth of bfloat16's; 0 below -150; NaN for NaN. The polynomial is the best
// approximation of 2^f for 0 <= f <= 1.
inline Vec rough_power_of_two(Vec x) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Vec p = fma(set(7.8024551e-2f), f, set(2.2606719e-1f));
  p = fma(p, f, set(6.9583350e-1f));
  p = fma(p, f, set(9.9992526e-1f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

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
    bool based = true;
    ::multiply<Pairs, false>(queries, keys, Matrix<float>{scores, BLOCK}, TILE, padded, steps);
    for (int r = 0; r < TILE; r++) {
      Vec x[VECTORS], most = set(-INFINITY);
      for (int v = 0; v < VECTORS; v++) {
        x[v] = _mm512_mask_loadu_ps(set(-INFINITY), seen.lanes(r, v), scores + r * BLOCK + v * WIDTH);
        most = max(x[v] * set(factor), most);
      }
      const float largest_now = largest(most);
      if (bases[r] == -INFINITY) bases[r] = largest_now;
      if (bases[r] == -INFINITY) based = false;
      const Vec total = load(totals.row(r));
      Vec sum = weigh<VECTORS>(x, factor, bases[r] > -INFINITY ? bases[r] : 0, total, weights + r * UNITS);
      if (over(sum)) {
        const float least = bases[r] + LEAST_RAISE, base = largest_now > least ? largest_now : least;
        const Vec shrink = power_of_two(set(bases[r] - base));
        for (int64_t d = 0; d < sums.pitch; d += WIDTH) store(sums.row(r) + d, load(sums.row(r) + d) * shrink);
        bases[r] = base;
        sum = weigh<VECTORS>(x, factor, base, total * shrink, weights + r * UNITS);
      }
      store(totals.row(r), sum);
    }
    return based;
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

  // Call `act` with the number of vectors of `padded` keys, as a constant.
  template <class Act>
  static bool by_vectors(int64_t padded, Act act) {
    switch (padded / WIDTH) {
      case 1: return act(Constant<1>());
      case 2: return act(Constant<2>());
      case 3: return act(Constant<3>());
      default: return act(Constant<4>());
    }
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
      sum[r] = weigh<V>(x[r], factor, base, load(totals.row(r)), weights + r * UNITS);
      beyond |= over(sum[r]);
    }
    if (!FRESH && beyond) return false;
    for (int r = 0; r < TILE; r++) store(totals.row(r), sum[r]);
    return true;
  }

  static __mmask16 over(Vec total) { return _mm512_cmp_ps_mask(total, set(MOST_TOTAL), _CMP_NLT_UQ); }  // also NaN

  // Convert V vectors of a block's products q·k to weights. Return `total` plus the weights.
  template <int V>
  [[gnu::always_inline]] static Vec weigh(const Vec* products, float factor, float base, Vec total, uint32_t* weights) {
    const Vec less = set(-base), ones = _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80));
    for (int v = 0; v < V; v += 2) {
      const Vec low = rough_power_of_two(fma(products[v], set(factor), less));
      const Vec high = v + 1 < V ? rough_power_of_two(fma(products[v + 1], set(factor), less)) : set(0);
      const Vec rounded = Pairs::joined(low, high);
      total = Pairs::multiply_add(rounded, ones, total);
      store(reinterpret_cast<float*>(weights + v * WIDTH / 2), rounded);
    }
    return total;
  }
};

// The weights of a row that is in no tile, as in one: relative to the same base, by the same exponential, rounded before
// they are summed. So a query has nearly the same result alone and beside others.
template <>
struct RowOfTile<bf16, bf16, Pairs> {
  static constexpr bool EXISTS = true;

  // Convert a row's products q·k with a block to weights; keys outside [first, last) are masked. Rescale the row's sums
  // [width] if its base, `seen.largest`, is raised.
  static void weigh(float* products, int64_t first, int64_t last, float factor, SoftmaxState& seen, uint32_t* weights,
                    float* sums, int64_t width) {
    for (int64_t i = 0; i < first; i++) products[i] = -INFINITY;
    for (int64_t i = last; i < BLOCK; i++) products[i] = -INFINITY;
    Vec x[VECTORS];
    for (int v = 0; v < VECTORS; v++) x[v] = load(products + v * WIDTH);
    if (seen.largest == -INFINITY) seen.largest = largest_of(x, factor);
    const float base = seen.largest > -INFINITY ? seen.largest : 0;
    const float total = seen.total + sum(Tile::weigh<VECTORS>(x, factor, base, set(0), weights));
    if (total < MOST_TOTAL) {
      seen.total = total;
      return;
    }
    const float largest_now = largest_of(x, factor), least = base + LEAST_RAISE;
    seen.largest = largest_now > least ? largest_now : least;
    const Vec shrink = power_of_two(set(base - seen.largest));
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + d, load(sums + d) * shrink);
    seen.total = seen.total * first_of(shrink) + sum(Tile::weigh<VECTORS>(x, factor, seen.largest, set(0), weights));
  }

 private:
  static float largest_of(const Vec* products, float factor) {
    Vec most = set(-INFINITY);
    for (int v = 0; v < VECTORS; v++) most = max(products[v] * set(factor), most);
    return largest(most);
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
    begin(layer, task, shared, rows);
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
    for (int64_t row = 0; row < rows; row++) {
      divide(sums_.row(row), sum(load(totals_.row(row))), result<bf16>(layer, piece, task.head, row), size);
    }
  }

 private:
  static int64_t whole_tiles(int64_t rows) { return (rows + TILE - 1) / TILE * TILE; }

  Units queries_, keys_, values_;
  uint32_t* weights_;  // of a pair of tiles
  Matrix<float> sums_, totals_;
  float* bases_;
  bool* based_;  // by tile: whether all of its rows have a base

  Tiles(Carver& carver, int64_t rows, int64_t width, int64_t units)
      : queries_{carver.take<uint32_t>(rows * units), units},
        keys_{carver.take<uint32_t>(units * BLOCK), BLOCK},
        values_{carver.take<uint32_t>(UNITS * width), width},
        weights_(carver.take<uint32_t>(PAIR * UNITS)),
        sums_{carver.take<float>(rows * width), width},
        totals_{carver.take<float>(rows * WIDTH), WIDTH},
        bases_(carver.take<float>(rows)),
        based_(carver.take<bool>(rows / TILE)) {}

  Tile at(int64_t row, int number) const {
    return {queries_.from(row), weights_ + number * TILE * UNITS, sums_.from(row), totals_.from(row), bases_ + row};
  }

  // Add the values of the block's keys, by their weights, to the sums of `tiles` tiles from `row` on. used: a bit for
  // each key that some row sees.
  void weigh(int64_t row, int tiles, uint64_t used) const {
    constexpr int FOUR = 4 * WIDTH;
    const Weighing weighing{weights_, values_, sums_.from(row), __builtin_ctzll(used) / Pairs::PER_UNIT,
                            UNITS - __builtin_clzll(used) / Pairs::PER_UNIT};
    const int64_t width = sums_.pitch;  // a multiple of two vectors
    int64_t column = 0;
    for (; column + FOUR <= width; column += FOUR)
      for (int i = 0; i < tiles; i++) weighing.add<TILE, 4>(i * TILE, column);
    if (column < width) tiles == 2 ? weighing.add<PAIR, 2>(0, column) : weighing.add<TILE, 2>(0, column);
  }

  // Copy the queries, padded with zeros to whole tiles; nothing has been seen but sinks.
  void begin(const AttentionLayer& layer, Task task, int64_t shared, int64_t rows) {
    const int64_t size = layer.size, padded = whole_tiles(rows);
    const bf16* q = static_cast<const bf16*>(layer.q) + task.piece->row * layer.q_stride + task.head * shared * size;
    if (sums_.pitch > size || padded > rows) memset(queries_.at, 0, padded * queries_.pitch * sizeof(uint32_t));
    for (int64_t row = 0; row < rows; row++)
      memcpy(queries_.row(row), q + row / shared * layer.q_stride + row % shared * size, size * sizeof(bf16));
    memset(sums_.at, 0, padded * sums_.pitch * sizeof(float));
    memset(totals_.at, 0, padded * WIDTH * sizeof(float));
    for (int64_t row = 0; row < padded; row++) {
      based_[row / TILE] = layer.sinks;
      bases_[row] = layer.sinks ? layer.sinks[task.head * shared + row % shared] * LOG2_E : -INFINITY;
      if (layer.sinks) totals_.row(row)[0] = 1;
    }
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

#endif

}  // namespace
