// The arguments of `encoder`: an encoder, described once, and a step. Activations, tables, weights of norms, and biases are
// all bfloat16 or all float.
//
// infd/kernels/recipe.py defines a layer; encoder.py fills in these structures.

#pragma once

#include <stdint.h>

#include "attention.h"
#include "product.h"

struct EncoderNorm {
  const void* weight;  // null: no norm
  const void* bias;    // null: none
  float eps;
  int64_t centered;  // 1: LayerNorm; 0: RMSNorm
};

struct EncoderLayer {
  StackProduct qkv, output, up, down;
  EncoderNorm attention_norm, mlp_norm;
  int64_t normed_first;  // 1: norms precede sublayers; 0: they follow the sums
  int64_t gated;         // 0: down(activation(up x)); 1: `up` computes gate, then up; 2: up, then gate
  int64_t activation;    // see Activation in encoder.cpp
  const float* rope;     // [max_len, turned], or null
  int64_t turned;
  int64_t heads, kv_heads, size;
  float scale;
  int64_t reach;      // index into EncoderStep::attention
  const float* bias;  // see AttentionLayer
  int64_t furthest;
  // The parts of qkv that compute q, and k and v, for steps in which queries are few; without `multiply` if qkv cannot be
  // divided there.
  StackProduct q, kv;
};

// Rows of a table of embeddings [rows, hidden], one for each token.
struct EncoderTable {
  const void* numbers;
  int64_t rows;
  const int64_t* index;  // [tokens], or null: row 0 for every token
};

// The sum of a row of each table, in order, normed.
struct EncoderEmbeddings {
  const EncoderTable* tables;
  int64_t count;
  EncoderNorm norm;
};

struct EncoderStep {
  int64_t tokens, hidden;
  const int64_t* positions;               // [tokens]
  const AttentionStep* const* attention;  // by reach

  // If `sampled` > 0, the last of these layers computes keys and values of all tokens, and everything else for the sampled
  // tokens alone, which become the first rows of x.
  int64_t sampled;
  const int64_t* sampled_tokens;                  // [sampled], ascending
  const AttentionStep* const* sampled_attention;  // by reach; the queries are the sampled tokens
};
