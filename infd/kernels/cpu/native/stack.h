// The arguments of `stack`: decoder layers, described once, and a step. Activations, weights of norms, and biases are all
// bfloat16 or all float.
//
// infd/kernels/recipe.py defines a layer; stack.py fills in these structures.

#pragma once

#include <stdint.h>

#include "attention.h"
#include "experts.h"

struct StackNorm {
  const void* weight;  // null: no norm
  int64_t size;
  float eps, offset;
  const void* bias;  // of a LayerNorm, or null
  int64_t centered;  // 1: LayerNorm; 0: RMSNorm
};

// The output transform of a sublayer.
struct StackTransform {
  StackNorm norm;
  float factor;  // 1: none
};

struct StackLayer {
  StackNorm input_norm, q_norm, k_norm, post_norm;  // of q and k: no LayerNorm
  StackProduct qkv, output, gate_up, down;  // with experts: gate_up and down of the shared ones, or no `multiply`
  StackProduct shared_gate;                 // no `multiply`: the shared experts have no gate
  const Experts* experts;                   // null: none
  StackTransform attention_transform, mlp_transform;
  const float* rope;  // [max_len, turned]
  const float* temperature;  // [max_len]: multiplies the queries at each position, after their rotation; or null
  const float* sinks;        // see AttentionLayer
  int64_t turned, interleaved;
  int64_t heads, kv_heads, size;
  float scale, softcap;
  int64_t gelu;       // 1: gelu with the tanh approximation; 0: silu
  int64_t group;      // page group
  int64_t quantized;  // pages are int8
  void *k, *v;        // pages
};

struct StackStep {
  int64_t tokens, hidden;
  const int64_t* positions;             // [tokens]
  const AttentionStep* const* groups;   // by page group
  const int64_t* const* slots;          // by page group, [tokens]
  int64_t sampled;                       // number of sampled tokens, see models/base.py; 0: the last layer computes all
  const int64_t* sampled_tokens;         // [sampled], ascending; the last may be repeated as padding
  const AttentionStep* sampled_attention;  // of the last layer's page group, one span per sampled token
  int16_t* routes;                       // [tokens, layers with experts, chosen]: the experts that are chosen, or null
  int64_t routing_layers;                // number of layers with experts
};
