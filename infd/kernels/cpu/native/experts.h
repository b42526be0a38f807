// The arguments of `route` and `experts`: one layer's router and experts. Activations and biases of experts are all
// bfloat16 or all float; routers are float.
//
// infd/kernels/recipe.py defines a layer; experts.cpp fills in these structures.

#pragma once

#include <stdint.h>

#include "lora.h"
#include "product.h"

// See Router in kernels/router.py.
struct Router {
  const float *weight, *bias, *correction;  // [experts, hidden]; [experts] or null
  int64_t hidden, experts, chosen;
  int64_t scores;  // 0: softmax, 1: chosen, 2: sigmoid, 3: margin
  int64_t groups, chosen_groups, on_input;
  float least_sum;  // negative: none
  float scale, margin;
};

// A product with the matrix of each expert.
struct ExpertProducts {
  StackProduct first;  // with the first expert's matrix
  int64_t stride;      // bytes between two experts' matrices
  int64_t panel;       // bytes of a panel
};

struct Experts {
  int64_t number;  // of the layer, among those with experts
  Router router;
  ExpertProducts gate_up, down;
  int64_t gelu;  // see Gating in kernels/router.py
  float alpha, limit, offset;
};

// The low-rank changes of the experts' matrices by adapter: groups with the rows of tokens and the matrices of the first
// expert, which those of the other experts follow.
struct ExpertChanges {
  const LoraGroup *gate_up, *down;
  int64_t gate_up_count, down_count;
};
