// Online softmax of a block of scores: products q·k to weights relative to the largest score so far.

#pragma once

#include "key_block.h"

namespace {

// The state of one row's online softmax: the largest score so far, times log2(e), and the sum of weights relative to
// this score. Where tiles exist, their base takes the place of the largest score (row_weights.h).
struct SoftmaxState {
  float largest, total;
};

// The transform of q·k before softmax. The resulting scores are multiplied by log2(e), because softmax uses powers of
// two.
struct Scores {
  float factor, softcap;

  explicit Scores(const AttentionLayer& layer)
      : factor(layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * LOG2_E),
        softcap(layer.softcap > 0 ? layer.softcap * LOG2_E : 0) {}

  Vec operator()(Vec product) const {
    const Vec score = product * set(factor);
    return softcap > 0 ? hyperbolic_tangent(score) * set(softcap) : score;
  }
};

// Rescale a row's sums [width] if `block`, the largest score of a block, exceeds all scores so far. Return the score to
// which weights are relative.
inline Vec base_of(float block, SoftmaxState& seen, float* sums, int64_t width) {
  if (block > seen.largest) {
    const Vec shrink = power_of_two(set(seen.largest - block));
    for (int64_t d = 0; d < width; d += WIDTH) store(sums + d, load(sums + d) * shrink);
    seen.total *= first_of(shrink);
    seen.largest = block;
  }
  return set(seen.largest > -INFINITY ? seen.largest : 0);  // 0: all keys so far were masked, or scores NaN
}

// Convert one row's products q·k to weights of softmax; keys outside [first, last) are masked. Rescale the row's sums
// to the new largest score. `k` and `v` are the scales of keys and values. bias: added to the scores, or null.
template <class Form>
void softmax(float* row, int64_t padded, int64_t first, int64_t last, const Scores& scores, const Scales& k,
             const Scales& v, SoftmaxState& seen, typename Form::Number* weights, float* sums, int64_t width,
             const float* bias) {
  for (int64_t i = 0; i < padded; i += WIDTH) store(row + i, scores(k(load(row + i), i)));
  if (bias)
    for (int64_t i = 0; i < padded; i += WIDTH) store(row + i, fma(load(bias + i), set(LOG2_E), load(row + i)));
  for (int64_t i = 0; i < first; i++) row[i] = -INFINITY;
  for (int64_t i = last; i < padded; i++) row[i] = -INFINITY;
  Vec most = set(-INFINITY);
  for (int64_t i = 0; i < padded; i += WIDTH) most = max(load(row + i), most);
  const Vec base = base_of(largest(most), seen, sums, width);
  Vec total = set(0);
  for (int64_t i = 0; i < padded; i += WIDTH) {
    const Vec weight = power_of_two(load(row + i) - base);
    total = total + weight;
    store(weights + i, v(weight, i));
  }
  seen.total += sum(total);
}

// The same for a whole block of an unquantized cache, of which every key is seen, without softcap and bias: the scores
// stay in registers.
template <class Form>
void softmax_of_block(const float* row, float factor, SoftmaxState& seen, typename Form::Number* weights, float* sums,
                      int64_t width) {
  constexpr int COUNT = BLOCK / WIDTH;
  Vec x[COUNT], most = set(-INFINITY), total = set(0);
  for (int i = 0; i < COUNT; i++) {
    x[i] = load(row + i * WIDTH) * set(factor);
    most = max(x[i], most);
  }
  const Vec base = base_of(largest(most), seen, sums, width);
  for (int i = 0; i < COUNT; i++) {
    const Vec weight = power_of_two(x[i] - base);
    total = total + weight;
    store(weights + i * WIDTH, weight);
  }
  seen.total += sum(total);
}

// The biases of a block's keys for one query, at `self` relative to the block, of one head; null: there are none.
struct Biases {
  float of[BLOCK];

  const float* read(const AttentionLayer& layer, int64_t head, int64_t self, int64_t padded) {
    if (!layer.bias) return nullptr;
    const int64_t most = layer.furthest;
    const float* middle = layer.bias + head * (2 * most + 1) + most;
    if (self <= most && padded - 1 - self <= most) return middle - self;
    for (int64_t i = 0; i < padded; i++) {
      const int64_t distance = i - self;
      of[i] = middle[distance < -most ? -most : distance > most ? most : distance];
    }
    return of;
  }
};

}  // namespace
