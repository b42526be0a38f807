// Norms, rotation and activations of one token, computed in float; tensors are float or bfloat16.

#pragma once

#include "vector.h"

namespace {

// The argument of a kernel as a tensor of floats or bfloat16.
template <class Number>
const Number* typed(const void* p) { return static_cast<const Number*>(p); }
template <class Number>
Number* typed(void* p) { return static_cast<Number*>(p); }

// RMSNorm: x / sqrt(mean(x²) + eps) * (weight + offset).
template <class Number>
struct Norm {
  const Number* weight;
  float eps, offset;

  void operator()(const Number* x, Number* out, int64_t size) const {
    Vec squares = set(0);
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) squares = fma(load(x + i), load(x + i), squares);
    if (i < size) squares = fma(load_first(x + i, size - i), load_first(x + i, size - i), squares);
    const float factor = 1 / sqrtf(sum(squares) / static_cast<float>(size) + eps);
    for (i = 0; i + WIDTH <= size; i += WIDTH)
      store(out + i, load(x + i) * set(factor) * (load(weight + i) + set(offset)));
    for (; i < size; i++) set(out + i, to_float(x[i]) * factor * (to_float(weight[i]) + offset));
  }
};

// (x - mean) / sqrt(variance + eps) * weight + bias
template <class Number>
struct LayerNorm {
  const Number *weight, *bias;  // bias: or null
  float eps;

  void operator()(const Number* x, Number* out, int64_t size) const {
    Vec total = set(0);
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) total = total + load(x + i);
    float all = sum(total);
    for (; i < size; i++) all += to_float(x[i]);
    const float mean = all / static_cast<float>(size);
    Vec squares = set(0);
    for (i = 0; i + WIDTH <= size; i += WIDTH) {
      const Vec off = load(x + i) - set(mean);
      squares = fma(off, off, squares);
    }
    float spread = sum(squares);
    for (; i < size; i++) spread += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    const float factor = 1 / sqrtf(spread / static_cast<float>(size) + eps);
    for (i = 0; i + WIDTH <= size; i += WIDTH) {
      const Vec scaled = (load(x + i) - set(mean)) * set(factor);
      store(out + i, bias ? fma(scaled, load(weight + i), load(bias + i)) : scaled * load(weight + i));
    }
    for (; i < size; i++) {
      const float scaled = (to_float(x[i]) - mean) * factor;
      set(out + i, scaled * to_float(weight[i]) + (bias ? to_float(bias[i]) : 0.0f));
    }
  }
};

// stream = x + residual
template <class Number>
void add(const Number* x, const Number* residual, Number* stream, int64_t size) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(stream + i, load(x + i) + load(residual + i));
  for (; i < size; i++) set(stream + i, to_float(x[i]) + to_float(residual[i]));
}

// x *= factor
template <class Number>
void scale(Number* x, float factor, int64_t size) {
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(x + i, load(x + i) * set(factor));
  for (; i < size; i++) set(x + i, to_float(x[i]) * factor);
}

// Rotates the first `turned` elements of a head; angles [turned] are cosines, then sines.
struct Rotation {
  int64_t turned;
  bool interleaved;  // elements 2i and 2i + 1 form a pair, not i and i + turned / 2

  template <class Number>
  void operator()(const Number* x, const float* angles, Number* out, int64_t size) const {
    const int64_t half = turned / 2;
    const float *cosines = angles, *sines = angles + half;
    if (interleaved) {
      for (int64_t i = 0; i < half; i++) turn(x[2 * i], x[2 * i + 1], cosines[i], sines[i], out + 2 * i, out + 2 * i + 1);
    } else {
      int64_t i = 0;
      for (; i + WIDTH <= half; i += WIDTH) {
        const Vec first = load(x + i), second = load(x + half + i), c = load(cosines + i), s = load(sines + i);
        store(out + i, first * c - second * s);
        store(out + half + i, second * c + first * s);
      }
      for (; i < half; i++) turn(x[i], x[half + i], cosines[i], sines[i], out + i, out + half + i);
    }
    if (out != x && turned < size) memcpy(out + turned, x + turned, (size - turned) * sizeof(Number));
  }

 private:
  template <class Number>
  static void turn(Number first, Number second, float c, float s, Number* out_first, Number* out_second) {
    const float a = to_float(first), b = to_float(second);
    set(out_first, a * c - b * s);
    set(out_second, b * c + a * s);
  }
};

struct Silu {
  Vec operator()(Vec x) const { return x / (set(1) + exponential(set(0) - x)); }
};

// The tanh approximation of gelu.
struct Gelu {
  Vec operator()(Vec x) const {
    const Vec inner = x * fma(x * x, set(0.044715f * 0.7978845608f), set(0.7978845608f));
    return x * set(0.5f) * (set(1) + hyperbolic_tangent(inner));
  }
};

// out = activation(gated) * up
template <class Activation, class Number>
void gate(const Number* gated, const Number* up, Number* out, int64_t size) {
  const Activation activation;
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(out + i, activation(load(gated + i)) * load(up + i));
  if (i < size) {
    Number last[WIDTH];
    store(last, activation(load_first(gated + i, size - i)) * load_first(up + i, size - i));
    memcpy(out + i, last, (size - i) * sizeof(Number));
  }
}

}  // namespace
