// Routers of mixtures: the logits of all experts in float, the choice of experts, and their weights.

#include "experts.h"
#include "scratch.h"
#include "tokens.h"

namespace {

enum Scores { SOFTMAX, CHOSEN, SIGMOID, MARGIN };

// With more products than this, waking other threads saves time: one token reads 64 KiB of weights.
constexpr int64_t ENOUGH = 1 << 14;

thread_local Scratch scratch, own_scratch;

// Experts whose logits are computed together, with four tokens: as many as have sums in registers.
#if defined(__AVX512F__)
constexpr int EXPERTS_TOGETHER = 2;
#else
constexpr int EXPERTS_TOGETHER = 1;
#endif

// out[i * stride + e] = the logits of EXPERTS experts for COUNT tokens, without bias. A sum is the same for every COUNT
// and EXPERTS.
template <int COUNT, int EXPERTS, class Number>
void logits_of(const Number* x, int64_t size, const float* weight, float* out, int64_t stride) {
  Vec sum[COUNT][EXPERTS][2];
  for (int i = 0; i < COUNT; i++)
    for (int e = 0; e < EXPERTS; e++) sum[i][e][0] = sum[i][e][1] = set(0.0f);
  int64_t at = 0;
  for (; at + 2 * WIDTH <= size; at += 2 * WIDTH) {
    Vec first[EXPERTS], second[EXPERTS];
#pragma GCC unroll 2
    for (int e = 0; e < EXPERTS; e++) first[e] = load(weight + e * size + at), second[e] = load(weight + e * size + at + WIDTH);
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) {
      const Vec one = load(x + i * size + at), other = load(x + i * size + at + WIDTH);
#pragma GCC unroll 2
      for (int e = 0; e < EXPERTS; e++) {
        sum[i][e][0] = fma(one, first[e], sum[i][e][0]);
        sum[i][e][1] = fma(other, second[e], sum[i][e][1]);
      }
    }
  }
  for (int i = 0; i < COUNT; i++)
    for (int e = 0; e < EXPERTS; e++) {
      float total = ::sum(sum[i][e][0] + sum[i][e][1]);
      for (int64_t k = at; k < size; k++) total = fmaf(to_float(x[i * size + k]), weight[e * size + k], total);
      out[i * stride + e] = total;
    }
}

// The index of the largest number that is not taken, the first of equals.
int64_t largest_left(const float* numbers, const bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
  return best;
}

// Write the indices of the largest numbers in descending order, of equals the first one first. Each number is looked at
// once, and few of many change the choice.
void choose_largest(const float* numbers, int64_t count, int64_t* chosen, int64_t chosen_count) {
  int64_t held = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t at = held;
    while (at > 0 && numbers[i] > numbers[chosen[at - 1]]) at--;
    if (at == chosen_count) continue;
    if (held < chosen_count) held++;
    for (int64_t moved = held - 1; moved > at; moved--) chosen[moved] = chosen[moved - 1];
    chosen[at] = i;
  }
}

struct Chooser {
  const Router& router;
  float *scores, *ranked;
  bool* taken;

  void operator()(const float* logits, int64_t* experts, float* weights) const {
    if (router.scores == MARGIN)
      by_margin(logits, experts, weights);
    else
      by_score(logits, experts, weights);
    for (int64_t slot = 0; slot < router.chosen; slot++) weights[slot] *= router.scale;
  }

 private:
  void by_margin(const float* logits, int64_t* experts, float* weights) const {
    memset(taken, 0, router.experts);
    for (int64_t slot = 0; slot < router.chosen; slot++) {
      const int64_t best = largest_left(logits, taken, router.experts);
      const float most = logits[best];
      float total = 0;
      for (int64_t i = 0; i < router.experts; i++) {
        const float size = fabsf(logits[i]), factor = size > most ? size : most;
        if (!taken[i] && !((most - logits[i]) / factor > router.margin)) total += expf(logits[i] - most);
      }
      experts[slot] = best, weights[slot] = 1 / total, taken[best] = true;
    }
  }

  void by_score(const float* logits, int64_t* experts, float* weights) const {
    const int64_t count = router.experts;
    if (router.scores == SIGMOID)
      for (int64_t i = 0; i < count; i++) scores[i] = 1 / (1 + expf(-logits[i]));
    else if (router.scores == SOFTMAX)
      softmax(logits, scores, count);
    else
      memcpy(scores, logits, count * sizeof(float));
    const float* by = logits;
    if (router.correction || router.groups > 1) {
      for (int64_t i = 0; i < count; i++) ranked[i] = router.correction ? scores[i] + router.correction[i] : scores[i];
      by = ranked;
    }
    if (router.groups > 1) drop_groups();
    choose_largest(by, count, experts, router.chosen);
    for (int64_t slot = 0; slot < router.chosen; slot++) weights[slot] = scores[experts[slot]];
    if (router.scores == CHOSEN) softmax(weights, weights, router.chosen);
    if (router.least_sum < 0) return;
    float total = 0;
    for (int64_t slot = 0; slot < router.chosen; slot++) total += weights[slot];
    if (total < router.least_sum) total = router.least_sum;
    for (int64_t slot = 0; slot < router.chosen; slot++) weights[slot] /= total;
  }

  // Rank the experts of all groups but the best at -inf.
  void drop_groups() const {
    const int64_t size = router.experts / router.groups;
    bool kept[1 << 10] = {};  // at most as many groups, see experts.py
    float best[1 << 10];
    for (int64_t group = 0; group < router.groups; group++) {
      float first = -INFINITY, second = -INFINITY;
      for (const float* x = ranked + group * size; x < ranked + (group + 1) * size; x++) {
        if (*x > first)
          second = first, first = *x;
        else if (*x > second)
          second = *x;
      }
      best[group] = size > 1 ? first + second : first;
    }
    for (int64_t i = 0; i < router.chosen_groups; i++) kept[largest_left(best, kept, router.groups)] = true;
    for (int64_t i = 0; i < router.experts; i++)
      if (!kept[i / size]) ranked[i] = -INFINITY;
  }

  static void softmax(const float* x, float* out, int64_t count) {
    float most = x[0], total = 0;
    for (int64_t i = 1; i < count; i++)
      if (x[i] > most) most = x[i];
    for (int64_t i = 0; i < count; i++) total += out[i] = expf(x[i] - most);
    for (int64_t i = 0; i < count; i++) out[i] /= total;
  }
};

template <class Number>
void route_all(const Router& router, const Number* x, int64_t tokens, int64_t* experts, float* weights) {
  const int64_t count = router.experts, size = router.hidden;
  Carver sizes(nullptr);
  sizes.take<float>(tokens * count);
  float* logits = Carver(scratch.at_least(sizes.used)).take<float>(tokens * count);
  constexpr int64_t BLOCK = 4;
#pragma omp parallel if (tokens * count * size > ENOUGH)
  {
#pragma omp for collapse(2)
    for (int64_t block = 0; block < (tokens + BLOCK - 1) / BLOCK; block++)
      for (int64_t e = 0; e < count; e += EXPERTS_TOGETHER) {
        const int64_t t = block * BLOCK, together = count - e < EXPERTS_TOGETHER ? 1 : EXPERTS_TOGETHER;
        const float* weight = router.weight + e * size;
        float* out = logits + t * count + e;
        if (tokens - t >= BLOCK) {
          const auto compute = together == 1 ? logits_of<BLOCK, 1, Number> : logits_of<BLOCK, EXPERTS_TOGETHER, Number>;
          compute(x + t * size, size, weight, out, count);
        } else {
          const auto compute = together == 1 ? logits_of<1, 1, Number> : logits_of<1, EXPERTS_TOGETHER, Number>;
          for (int64_t i = t; i < tokens; i++) compute(x + i * size, size, weight, out + (i - t) * count, count);
        }
      }
    Carver carver(nullptr);
    const auto carve = [&](Carver& from, float*& scores, float*& ranked, bool*& taken) {
      scores = from.take<float>(count), ranked = from.take<float>(count), taken = from.take<bool>(count);
    };
    float *scores, *ranked;
    bool* taken;
    carve(carver, scores, ranked, taken);
    Carver own(own_scratch.at_least(carver.used));
    carve(own, scores, ranked, taken);
    const Chooser choose{router, scores, ranked, taken};
#pragma omp for
    for (int64_t t = 0; t < tokens; t++) {
      float* row = logits + t * count;
      if (router.bias)
        for (int64_t e = 0; e < count; e++) row[e] += router.bias[e];
      choose(row, experts + t * router.chosen, weights + t * router.chosen);
    }
  }
}

}  // namespace

// Choose experts [tokens, chosen], and their weights, for tokens x [tokens, hidden]. half: x is bfloat16, else float.
INFD_KERNEL(route)
(int64_t half, const Router* router, const void* x, int64_t tokens, int64_t* experts, float* weights) {
  if (half)
    route_all(*router, typed<bf16>(x), tokens, experts, weights);
  else
    route_all(*router, typed<float>(x), tokens, experts, weights);
}
