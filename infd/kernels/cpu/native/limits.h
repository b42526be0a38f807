// The limits top-k and top-p of one row of logits, without sorting the vocabulary.
//
// Cooled logits are (logit - largest logit) / temperature, at most 0. A token's mass is e to its cooled logit. Logits are
// counted in narrow buckets; only the bucket that contains a limit is sorted.

#pragma once

#include <stdlib.h>

#include "scratch.h"
#include "vector.h"

namespace {

constexpr int BUCKETS = 2048;
constexpr float PER_UNIT = 64;  // buckets per unit of cooled logit; the last bucket has those of about -32 or less

inline int bucket_of(float cooled) {
  const float place = -cooled * PER_UNIT;
  return place < BUCKETS - 1 ? static_cast<int>(place) : BUCKETS - 1;
}

int descending(const void* a, const void* b) {
  const float x = *static_cast<const float*>(a), y = *static_cast<const float*>(b);
  return (x < y) - (x > y);
}

inline float larger(float a, float b) { return a > b ? a : b; }

// Finds the limits of one row of cooled logits.
class Limits {
 public:
  // cooled [vocabulary]; members: memory for the logits of a bucket
  Limits(const float* cooled, int64_t vocabulary, Scratch& members)
      : cooled_(cooled), vocabulary_(vocabulary), scratch_(members) {}

  // Return the smallest cooled logit to keep, at least `least`; -inf: all tokens are kept. top_k 0 and top_p 1: no limit.
  float smallest(float least, int64_t top_k, float top_p) {
    weighs_ = top_p < 1;
    if (top_k > 0 || weighs_) count(BUCKETS / 4);
    if (top_k > 0) least = larger(kth(top_k), least);
    if (weighs_) least = larger(least_of_nucleus(least, top_p), least);
    return least;
  }

 private:
  const float* cooled_;
  int64_t vocabulary_;
  Scratch& scratch_;
  bool weighs_ = false;
  int counted_ = 0;  // the counts and masses of this many buckets, from the first on, are valid
  int64_t counts_[BUCKETS];
  double masses_[BUCKETS];
  double mass_ = 0;  // of all tokens

  // Count the tokens in the first `buckets` buckets, and sum their masses if top-p needs these. The first quarter of
  // all buckets has the likeliest tokens, and usually suffices.
  void count(int buckets) {
    counted_ = buckets;
    mass_ = 0;
    memset(counts_, 0, sizeof counts_);
    memset(masses_, 0, sizeof masses_);
    constexpr int64_t STRETCH = 64 * WIDTH;  // masses added up in float; their sums are added up in double
    for (int64_t first = 0; first < vocabulary_; first += STRETCH) {
      const int64_t end = first + STRETCH < vocabulary_ ? first + STRETCH : vocabulary_;
      Vec total = set(0);
      for (int64_t i = first; i < end; i += WIDTH) {
        const int64_t lanes = end - i < WIDTH ? end - i : WIDTH;
        const Vec cooled = lanes == WIDTH ? load(cooled_ + i) : load_or_nothing(cooled_ + i, lanes);
        const Vec weight = weighs_ ? exponential(cooled) : set(0);
        total = total + weight;
        float places[WIDTH], weights[WIDTH];
        store(places, min(set(0) - cooled * set(PER_UNIT), set(BUCKETS - 1)));
        if (buckets < BUCKETS && largest(cooled) * -PER_UNIT >= static_cast<float>(buckets)) continue;
        store(weights, weight);
        for (int64_t lane = 0; lane < lanes; lane++) {
          const int bucket = static_cast<int>(places[lane]);
          counts_[bucket]++;
          masses_[bucket] += weights[lane];
        }
      }
      mass_ += sum(total);
    }
  }

  static Vec load_or_nothing(const float* p, int64_t lanes) {
    float numbers[WIDTH];
    for (int64_t lane = 0; lane < WIDTH; lane++) numbers[lane] = lane < lanes ? p[lane] : -INFINITY;
    return load(numbers);
  }

  // Return the cooled logits of a bucket that are at least `least`, in descending order, and their number.
  const float* members(int bucket, float least, int64_t* count) {
    float* found = reinterpret_cast<float*>(scratch_.at_least((counts_[bucket] + 1) * sizeof(float)));
    const Vec middle = set(static_cast<float>(bucket) + 0.5f);
    *count = 0;
    for (int64_t i = 0; i < vocabulary_; i += WIDTH) {
      const int64_t lanes = vocabulary_ - i < WIDTH ? vocabulary_ - i : WIDTH;
      if (lanes == WIDTH && bucket < BUCKETS - 1) {  // skip vectors without a logit near the bucket
        const Vec distance = absolute(fma(load(cooled_ + i), set(PER_UNIT), middle));
        if (largest(set(0) - distance) < -0.6f) continue;
      }
      for (int64_t at = i; at < i + lanes; at++)
        if (cooled_[at] >= least && bucket_of(cooled_[at]) == bucket) found[(*count)++] = cooled_[at];
    }
    qsort(found, *count, sizeof(float), descending);
    return found;
  }

  // Return the smallest cooled logit that top-k keeps; -inf if top-k keeps all tokens.
  float kth(int64_t top_k) {
    int64_t left = top_k;
    int bucket = 0;
    while (bucket < counted_ && counts_[bucket] < left) left -= counts_[bucket++];
    if (bucket == counted_) {
      if (counted_ == BUCKETS) return -INFINITY;
      count(BUCKETS);
      return kth(top_k);
    }
    int64_t count;
    const float* in_order = members(bucket, -INFINITY, &count);
    return left <= count ? in_order[left - 1] : -INFINITY;  // a row of NaN has no members
  }

  // Return the smallest cooled logit that top-p keeps, among the tokens with cooled logits of at least `least`.
  float least_of_nucleus(float least, float top_p) {
    const int last = bucket_of(least);
    if (least > -INFINITY && last >= counted_) count(BUCKETS);
    int64_t count;
    double total = mass_;
    if (least > -INFINITY) {  // only part of the bucket of `least` is kept
      const float* part = members(last, least, &count);
      total = 0;
      for (int64_t i = 0; i < count; i++) total += expf(part[i]);
      for (int bucket = 0; bucket < last; bucket++) total += masses_[bucket];
    }

    double before = 0;
    int bucket = 0;
    while (bucket < last && bucket < counted_ && before + masses_[bucket] < top_p * total)
      before += masses_[bucket++];
    if (bucket == counted_) {
      this->count(BUCKETS);
      return least_of_nucleus(least, top_p);
    }
    const float* in_order = members(bucket, least, &count);
    float nucleus = -INFINITY;
    for (int64_t i = 0; i < count && (i == 0 || before < top_p * total); i++) {
      nucleus = in_order[i];
      before += expf(nucleus);
    }
    return nucleus;
  }
};

}  // namespace
