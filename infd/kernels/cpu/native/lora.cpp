// LoRA: y += x A^T B^T, each row with its own adapter; see kernels/families/adapters.py Lora.
//
// Each result is accumulated in float, along the inputs and then along the ranks, and rounded once. It depends neither
// on other rows nor on the number of threads.

#include "lora.h"

#include "scratch.h"
#include "vector.h"

namespace {

constexpr int64_t ENOUGH = 1 << 16;  // with more multiplications than this, waking other threads saves time
constexpr int TILE = 4;              // rows of x, and rows of A, that are multiplied at a time

// The dot product of each of ROWS rows of x with each of RANKS rows of a.
template <int ROWS, int RANKS, class Number>
void shrink(const Number* const* x, const Number* a, int64_t inputs, float* const* out) {
  Vec sums[ROWS][RANKS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < RANKS; j++) sums[i][j] = set(0);
  int64_t k = 0;
  for (; k + WIDTH <= inputs; k += WIDTH)
    for (int j = 0; j < RANKS; j++) {
      const Vec factor = load(a + j * inputs + k);
      for (int i = 0; i < ROWS; i++) sums[i][j] = fma(load(x[i] + k), factor, sums[i][j]);
    }
  if (k < inputs)
    for (int j = 0; j < RANKS; j++) {
      const Vec factor = load_first(a + j * inputs + k, inputs - k);
      for (int i = 0; i < ROWS; i++) sums[i][j] = fma(load_first(x[i] + k, inputs - k), factor, sums[i][j]);
    }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < RANKS; j++) out[i][j] = sum(sums[i][j]);
}

template <int ROWS, class Number>
void shrink_rows(const Number* const* x, const Number* a, int64_t ranks, int64_t inputs, float* const* out) {
  float* at[ROWS];
  int64_t rank = 0;
  for (; rank + TILE <= ranks; rank += TILE) {
    for (int i = 0; i < ROWS; i++) at[i] = out[i] + rank;
    shrink<ROWS, TILE>(x, a + rank * inputs, inputs, at);
  }
  for (; rank < ranks; rank++) {
    for (int i = 0; i < ROWS; i++) at[i] = out[i] + rank;
    shrink<ROWS, 1>(x, a + rank * inputs, inputs, at);
  }
}

// The elementwise products of one row of b with a part's ranks of one shrunk row, added up to a vector of partial sums.
template <class Number>
Vec product(const Number* b, const float* shrunk, int64_t ranks) {
  Vec total = set(0);
  int64_t j = 0;
  for (; j + WIDTH <= ranks; j += WIDTH) total = fma(load(b + j), load(shrunk + j), total);
  if (j < ranks) total = fma(load_first(b + j, ranks - j), load_first(shrunk + j, ranks - j), total);
  return total;
}

// Add outputs [first, end) of a part to the group's rows.
template <class Number, class Out>
void expand(const LoraGroup& group, const LoraPart& part, const float* shrunk, Out* y, int64_t y_stride, int64_t first,
            int64_t end) {
  const Number* b = static_cast<const Number*>(part.b);
  int64_t o = first;
  for (; o + WIDTH <= end; o += WIDTH)
    for (int64_t i = 0; i < group.count; i++) {
      Vec products[WIDTH];
      for (int lane = 0; lane < WIDTH; lane++)
        products[lane] = product(b + (o + lane) * part.ranks, shrunk + i * group.ranks + part.rank, part.ranks);
      Out* at = y + group.rows[i] * y_stride + part.output + o;
      store(at, load(at) + sums_of(products));
    }
  // The last outputs are padded to a vector, because `sum` of each vector would round differently from `sums_of`.
  if (o < end)
    for (int64_t i = 0; i < group.count; i++) {
      Vec products[WIDTH];
      for (int lane = 0; lane < WIDTH; lane++)
        products[lane] = o + lane < end ? product(b + (o + lane) * part.ranks,
                                                  shrunk + i * group.ranks + part.rank, part.ranks)
                                        : set(0);
      float sums[WIDTH];
      store(sums, sums_of(products));
      Out* at = y + group.rows[i] * y_stride + part.output + o;
      for (int lane = 0; o + lane < end; lane++) set(at + lane, to_float(at[lane]) + sums[lane]);
    }
}

template <class Number, class Out>
void add(const LoraGroup& group, const Number* x, int64_t x_stride, int64_t inputs, const int64_t* tokens, Out* y,
         int64_t y_stride) {
  static thread_local Scratch scratch;
  float* shrunk = reinterpret_cast<float*>(scratch.at_least(group.count * group.ranks * int64_t{sizeof(float)}));
  const Number* a = static_cast<const Number*>(group.a);
  const int64_t tiles = (group.count + TILE - 1) / TILE;
#pragma omp parallel for if (group.count * group.ranks * inputs > ENOUGH && tiles > 1 && tokens == nullptr)
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t begin = tile * TILE, rows = group.count - begin < TILE ? group.count - begin : TILE;
    const Number* from[TILE];
    float* to[TILE];
    for (int64_t i = 0; i < rows; i++) {
      to[i] = shrunk + (begin + i) * group.ranks;
      if (tokens != nullptr)
        convert(a + tokens[group.rows[begin + i]] * group.ranks, to[i], group.ranks);
      else
        from[i] = x + group.rows[begin + i] * x_stride;
    }
    if (tokens != nullptr) continue;
    if (rows == TILE)
      shrink_rows<TILE>(from, a, group.ranks, inputs, to);
    else
      for (int64_t i = 0; i < rows; i++) shrink_rows<1>(from + i, a, group.ranks, inputs, to + i);
  }
  for (int64_t p = 0; p < group.part_count; p++) {
    const LoraPart& part = group.parts[p];
    const int64_t block = 16 * WIDTH, blocks = (part.outputs + block - 1) / block;
#pragma omp parallel for if (group.count * part.ranks * part.outputs > ENOUGH)
    for (int64_t i = 0; i < blocks; i++) {
      const int64_t end = (i + 1) * block < part.outputs ? (i + 1) * block : part.outputs;
      expand<Number>(group, part, shrunk, y, y_stride, i * block, end);
    }
  }
}

}  // namespace

INFD_KERNEL(lora)
(int64_t half, int64_t wide, void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t inputs,
 const int64_t* tokens, const LoraGroup* groups, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (!half)
      add(groups[i], static_cast<const float*>(x), x_stride, inputs, tokens, static_cast<float*>(y), y_stride);
    else if (wide)
      add(groups[i], static_cast<const bf16*>(x), x_stride, inputs, tokens, static_cast<float*>(y), y_stride);
    else
      add(groups[i], static_cast<const bf16*>(x), x_stride, inputs, tokens, static_cast<bf16*>(y), y_stride);
  }
}
