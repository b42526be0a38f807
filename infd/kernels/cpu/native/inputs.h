// Inputs of a product, quantized as a checkpoint's scheme says and decoded again.
//
// infd/kernels/reference/inputs.py defines the numbers; kernels/cpu/inputs.py fills in the structure.

#pragma once

#include <stdint.h>

struct InputRounding {
  const float* scale;  // by which all inputs are divided; null: the largest magnitude of a group determines its scale
  const float* zero;   // the integer that represents 0; null: 0
  int64_t group;       // inputs that share a scale; 0: all of a row
  enum Numbers : int64_t { FP8, INT8, FP4 } numbers;  // E4M3, int8, E2M1; a scale of FP4 is `scale` times an E4M3
  int64_t powers;  // 1: scales are powers of two
};
