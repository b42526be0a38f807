// Products with a matrix of bfloat16 weights in panels; algorithm in products.h.

#include "amx.h"
#include "pairs.h"

// out [rows, outputs] = x [rows, inputs] times the packed weights, transposed, plus bias.
INFD_KERNEL(multiply_bf16_bf16)
(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t, const Neighbors* neighbors) {
#if defined(__AMX_BF16__)
  using Kind = Blocks<Pairs>;
  const Kind kind = {{x, x_stride}, inputs * int64_t{sizeof *x}};
  const int64_t steps = tile_steps(pairs_of(inputs));
  const bool half = false;
#else
  using Kind = Pairs;
  const Kind kind = {x, x_stride};
  const int64_t steps = pairs_of(inputs);
  const bool half = inputs % 2 != 0;
#endif
  const Product<Kind> product = {kind, rows, weights, outputs, steps, half, bias, out, out_stride, wide != 0, pairs_of(inputs) * PANEL};
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Kind> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  division.compute_share();
}
