// A product x W^T + bias, and the kernel for the form in which W is stored.

#pragma once

#include <stdint.h>

#include "inputs.h"
#include "sharing.h"

struct StackProduct {
  void (*multiply)(const void* x, int64_t x_stride, int64_t rows, const void* weights, int64_t outputs, int64_t inputs,
                   const void* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout,
                   const Neighbors* neighbors);
  const void* weights;
  const void* bias;  // or null
  int64_t outputs, inputs;
  int64_t layout;  // argument of forms with several layouts (groups.h, float8.h); 0 for other forms
  int64_t panel_bytes;  // from one panel to the next; 0: unknown, so that they are not prefetched
  const InputRounding* rounding;  // of x before the product, see layers.h; null: none

  // Of forms that quantize x: the product in two steps, so that a row is quantized once for several matrices; or null. Both
  // run on the calling thread.
  void (*quantize)(const void* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t layout);
  // chosen [rows]: indices of quantized rows. half: the bias is bfloat16, else float
  void (*multiply_quantized)(const void* quantized, const int64_t* chosen, int64_t rows, const void* weights,
                             int64_t outputs, int64_t inputs, const void* bias, int64_t half, void* out,
                             int64_t out_stride, int64_t wide, int64_t layout);
  int64_t quantized_bytes;  // of a row
};
