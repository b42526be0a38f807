// What `stack` reads: decoder layers, told once, and a step. Numbers are bfloat16.
//
// infd/kernels/recipe.py says what a layer is; stack.py fills these in.

#pragma once

#include <stdint.h>

#include "attention.h"

// A product with a matrix in some form, by the kernel for that form, and what that kernel is to be told.
struct StackProduct {
  void (*multiply)(const void* x, int64_t x_stride, int64_t rows, const void* weights, int64_t outputs, int64_t inputs,
                   const void* bias, void* out, int64_t out_stride, int64_t wide);
  const void* weights;
  const void* bias;  // or null
  int64_t outputs, inputs;
};

struct StackNorm {
  const void* weight;  // null: no norm
  int64_t size;
  float eps, offset;
};

// The last thing that happens to a branch.
struct StackLast {
  StackNorm norm;
  float factor;  // 1: none
};

struct StackLayer {
  StackNorm input_norm, q_norm, k_norm, post_norm;
  StackProduct qkv, output, gate_up, down;
  StackLast attention_last, mlp_last;
  const float* rope;  // [max_len, turned]
  int64_t turned, interleaved;
  int64_t heads, kv_heads, size;
  float scale, softcap;
  int64_t gelu;   // the activation: silu if 0
  int64_t group;  // of pages
  int64_t quantized;  // whether pages are int8
  void *k, *v;        // pages
};

struct StackStep {
  int64_t tokens, hidden;
  const int64_t* positions;             // [tokens]
  const AttentionStep* const* groups;   // by page group
  const int64_t* const* slots;          // by page group, [tokens]
  int64_t wanted;                       // how many tokens the last layer goes on with; 0: all. models/base.py says more
  const int64_t* wanted_tokens;         // [wanted], ascending, the last one perhaps repeated
  const AttentionStep* wanted_attention;  // of the last layer's page group
};
