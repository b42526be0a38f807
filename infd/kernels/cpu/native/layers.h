// What the calls that compute whole layers share: stack.cpp and encoder.cpp.

#pragma once

#include "attention.h"
#include "panels.h"
#include "product.h"
#include "row.h"

INFD_KERNEL(attention)(const AttentionStep* step, const AttentionLayer* layer);
INFD_KERNEL(round_inputs)
(int64_t half, const void* x, int64_t stride, void* out, int64_t rows, int64_t inputs, const InputRounding* rounding);

namespace {

// The argument `half` of kernels: whether activations are bfloat16.
template <class Number>
constexpr int64_t HALF = 0;
template <>
constexpr int64_t HALF<bf16> = 1;

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Multiply x [tokens, inputs]; out [tokens, outputs], out_stride between tokens. If the product rounds its inputs, they are
// stored in `rounded`, which may be x. awake: see worth_sharing. next: the product that follows, or null.
template <class Number>
void multiply(const StackProduct& product, const Number* x, Number* rounded, Number* out, int64_t out_stride,
              int64_t tokens, bool awake, const StackProduct* next = nullptr) {
  if (product.rounding != nullptr) {
    INFD_HERE(round_inputs)(HALF<Number>, x, product.inputs, rounded, tokens, product.inputs, product.rounding);
    x = rounded;
  }
  Neighbors neighbors = {awake, nullptr, 0, 0};
  if (next && next->panel_bytes) {
    neighbors.next_weights = next->weights;
    neighbors.next_panels = panels_of(next->outputs), neighbors.next_panel_bytes = next->panel_bytes;
  }
  product.multiply(x, product.inputs, tokens, product.weights, product.outputs, product.inputs, product.bias, out, out_stride,
                   !HALF<Number>, product.layout, &neighbors);
}

template <class Number>
void multiply(const StackProduct& product, const Number* x, Number* rounded, Number* out, int64_t tokens, bool awake,
              const StackProduct* next = nullptr) {
  multiply(product, x, rounded, out, product.outputs, tokens, awake, next);
}

// Copy the rows with the indices chosen [count], ascending and perhaps repeated, to the front: no row is overwritten before it
// is copied.
template <class Number>
void keep_rows(Number* rows, int64_t stride, int64_t size, const int64_t* chosen, int64_t count) {
  for (int64_t i = 0; i < count; i++) memmove(rows + i * stride, rows + chosen[i] * stride, size * sizeof(Number));
}

}  // namespace
