// A product x W^T + bias, and the kernel for the form in which W is stored.

#pragma once

#include <stdint.h>

#include "inputs.h"

struct StackProduct {
  void (*multiply)(const void* x, int64_t x_stride, int64_t rows, const void* weights, int64_t outputs, int64_t inputs,
                   const void* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout,
                   int64_t awake);
  const void* weights;
  const void* bias;  // or null
  int64_t outputs, inputs;
  int64_t layout;  // argument of forms with several layouts (groups.h, float8.h); 0 for other forms
  const InputRounding* rounding;  // of x before the product, see layers.h; null: none
};
