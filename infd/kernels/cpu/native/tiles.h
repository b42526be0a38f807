// Attention of many queries in bfloat16, tile by tile. How a tile is computed depends on the instruction set: tiles_vectors.h,
// tiles_amx.h.

#pragma once

#include "many_queries.h"
#include "pieces.h"
#include "row_weights.h"
#include "scratch.h"

namespace {

// Where tiles do not exist.
template <class Number, class Cached, class Form>
class Tiles {
 public:
  static constexpr int64_t ROWS = 0;

  Tiles(Carver&, int64_t, int64_t) {}
  void attend(const AttentionStep&, const AttentionLayer&, Task, Task) {}
};

#if defined(__AVX512BF16__)

// The rows of a task, in the scratch memory.
struct TiledRows {
  Units queries;
  Matrix<float> sums, totals;  // totals [rows, WIDTH]: the sum of weights, by lane
  float* bases;                // times log2(e); -inf: the row has seen no key

  // `width`: the head size, padded to whole vectors of units.
  TiledRows(Carver& carver, int64_t rows, int64_t width)
      : queries{carver.take<uint32_t>(rows * width / Pairs::PER_UNIT), width / Pairs::PER_UNIT},
        sums{carver.take<float>(rows * width), width},
        totals{carver.take<float>(rows * WIDTH), WIDTH},
        bases(carver.take<float>(rows)) {}

  // Copy a piece's queries, for one key head, padded with zeros, also to `padded` rows; nothing has been seen but sinks. The sums
  // are left as they are.
  void begin(const AttentionLayer& layer, Task task, int64_t rows, int64_t padded) const {
    const int64_t size = layer.size, shared = layer.heads / layer.kv_heads;
    const bf16* q = static_cast<const bf16*>(layer.q) + task.piece->row * layer.q_stride + task.head * shared * size;
    if (sums.pitch > size || padded > rows) memset(queries.at, 0, padded * queries.pitch * sizeof(uint32_t));
    for (int64_t row = 0; row < rows; row++)
      memcpy(queries.row(row), q + row / shared * layer.q_stride + row % shared * size, size * sizeof(bf16));
    memset(totals.at, 0, padded * WIDTH * sizeof(float));
    for (int64_t row = 0; row < padded; row++) {
      bases[row] = layer.sinks ? layer.sinks[task.head * shared + row % shared] * LOG2_E : -INFINITY;
      if (layer.sinks) totals.row(row)[0] = 1;
    }
  }
};

// Call `act` with the number of vectors of `padded` keys, as a constant.
template <class Act>
auto by_vectors(int64_t padded, Act act) {
  switch (padded / WIDTH) {
    case 1: return act(Constant<1>());
    case 2: return act(Constant<2>());
    case 3: return act(Constant<3>());
    default: return act(Constant<4>());
  }
}

#endif

}  // namespace
