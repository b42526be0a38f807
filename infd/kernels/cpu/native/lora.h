// The arguments of `lora`. kernels/cpu/lora.py fills in these structures.

#pragma once

#include <stdint.h>

#include "kernel.h"

// One module of a product: b [outputs, ranks], the index of its first rank in a, and of its first output in y.
struct LoraPart {
  const void* b;
  int64_t ranks, rank, outputs, output;
};

// The rows of one adapter, ascending, and its low-rank matrices.
struct LoraGroup {
  const int64_t* rows;
  int64_t count;
  const void* a;  // [ranks, inputs]; for an embedding table [vocabulary, ranks]
  int64_t ranks;
  const LoraPart* parts;
  int64_t part_count;
};

// Add each group's x A^T B^T to y [T, outputs], for x [T, inputs]; if `tokens` [T] is not null, A[token] B^T. y_stride
// and x_stride are strides between rows. half: x, A and B are bfloat16, else float. wide: y is float, else of x's type.
INFD_KERNEL(lora)
(int64_t half, int64_t wide, void* y, int64_t y_stride, const void* x, int64_t x_stride, int64_t inputs,
 const int64_t* tokens, const LoraGroup* groups, int64_t count);
