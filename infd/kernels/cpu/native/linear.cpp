// Products with a matrix of bfloat16 weights in panels; algorithm in products.h.

#include "pairs.h"

// out [rows, outputs] = x [rows, inputs] times the packed weights, transposed, plus bias.
INFD_KERNEL(multiply_bf16_bf16)
(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t, const Neighbors* neighbors) {
  const Product<Pairs> product = {{x, x_stride}, rows, weights, outputs, pairs_of(inputs), inputs % 2 != 0, bias, out,
                                  out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Pairs> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  division.compute_share();
}
