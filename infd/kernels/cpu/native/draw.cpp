// Choosing a token of each row of logits, without sorting a vocabulary.
//
// reference/drawing says what is computed: temperature, min-p, top-k, top-p, then the largest of logit plus noise. Where
// it sorts, this counts: logits fall into narrow buckets, and only the bucket in which a limit lies is looked at closely.
// Where it makes noise for every token, this bounds the noise first, by the exponent of what it is the logarithm of.

#include <stdlib.h>

#include "scratch.h"
#include "vector.h"

namespace {

using Ints = uint32_t __attribute__((vector_size(WIDTH * 4)));
using SignedInts = int32_t __attribute__((vector_size(WIDTH * 4)));

constexpr int BUCKETS = 2048;
constexpr float PER_UNIT = 64;  // buckets; the last one holds all that is e^-32 times as likely as the likeliest, or less
constexpr float LN_2 = 0.69314718055994530942f;

inline Ints load_ints(const uint32_t* p) {
  Ints numbers;
  memcpy(&numbers, p, sizeof numbers);
  return numbers;
}

// What a row asks for. Keys and token hashes are those of reference/drawing/noise.py.
struct Asked {
  float largest, temperature, top_p, min_p;
  int64_t top_k;
  uint32_t keys[2];
};

// The noise of reference/drawing/noise.py, before it becomes a number in (0, 1).
template <class T>
T scramble(T hashed, const uint32_t* keys) {
  T x = hashed ^ keys[0];
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x += keys[1];
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x & 0x7FFFFFFFu;
}

constexpr float STEP = 0x1p-31f * (1 - 0x1p-24f), LEAST = 0x1p-32f;

float gumbel(uint32_t hashed, const uint32_t* keys) {
  float u = static_cast<float>(static_cast<int32_t>(scramble(hashed, keys))) * STEP;
  __asm__("" : "+x"(u));  // rounded here, as torch does: no fused multiplication and addition
  return -logf(-log1pf(-(u + LEAST)));
}

inline int bucket_of(float cooled) {
  const float place = -cooled * PER_UNIT;
  return place < BUCKETS - 1 ? static_cast<int>(place) : BUCKETS - 1;
}

int descending(const void* a, const void* b) {
  const float x = *static_cast<const float*>(a), y = *static_cast<const float*>(b);
  return (x < y) - (x > y);
}

class Row {
 public:
  Row(const float* logits, int64_t vocabulary, const Asked& asked, Scratch& cooled, Scratch& members)
      : cooled_(reinterpret_cast<float*>(cooled.at_least(vocabulary * sizeof(float)))),
        vocabulary_(vocabulary),
        asked_(asked),
        scratch_(members) {
    for (int64_t i = 0; i < vocabulary; i++) cooled_[i] = (logits[i] - asked.largest) / asked.temperature;
  }

  int64_t draw(const uint32_t* hashed) {
    return choose(smallest(), hashed);
  }

 private:
  float* cooled_;
  int64_t vocabulary_;
  Asked asked_;
  Scratch& scratch_;
  int counted_ = 0;  // buckets of which is known:
  int64_t counts_[BUCKETS];
  double masses_[BUCKETS];
  double mass_ = 0;  // of all tokens

  // Count the first buckets. Few tokens are so likely as to fall into the first quarter, and they mostly settle it.
  void count(int buckets) {
    const bool weighs = asked_.top_p < 1;
    counted_ = buckets;
    mass_ = 0;
    memset(counts_, 0, sizeof counts_);
    memset(masses_, 0, sizeof masses_);
    constexpr int64_t STRETCH = 64 * WIDTH;  // whose sum in float is as good as one in double
    for (int64_t first = 0; first < vocabulary_; first += STRETCH) {
      const int64_t end = first + STRETCH < vocabulary_ ? first + STRETCH : vocabulary_;
      Vec total = set(0);
      for (int64_t i = first; i < end; i += WIDTH) {
        const int64_t lanes = end - i < WIDTH ? end - i : WIDTH;
        const Vec cooled = lanes == WIDTH ? load(cooled_ + i) : load_or_nothing(cooled_ + i, lanes);
        const Vec weight = weighs ? exponential(cooled) : set(0);
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

  // Return the members of a bucket that are at least `least`, largest first.
  const float* members(int bucket, float least, int64_t* count) {
    float* found = reinterpret_cast<float*>(scratch_.at_least((counts_[bucket] + 1) * sizeof(float)));
    const Vec middle = set(static_cast<float>(bucket) + 0.5f);
    *count = 0;
    for (int64_t i = 0; i < vocabulary_; i += WIDTH) {
      const int64_t lanes = vocabulary_ - i < WIDTH ? vocabulary_ - i : WIDTH;
      if (lanes == WIDTH && bucket < BUCKETS - 1) {  // is any of them near?
        const Vec distance = absolute(fma(load(cooled_ + i), set(PER_UNIT), middle));
        if (largest(set(0) - distance) < -0.6f) continue;
      }
      for (int64_t at = i; at < i + lanes; at++)
        if (cooled_[at] >= least && bucket_of(cooled_[at]) == bucket) found[(*count)++] = cooled_[at];
    }
    qsort(found, *count, sizeof(float), descending);
    return found;
  }

  // Return the smallest logit to keep.
  float smallest() {
    float least = logf(asked_.min_p);  // -inf where there is no limit
    if (asked_.top_k > 0 || asked_.top_p < 1) count(BUCKETS / 4);
    if (asked_.top_k > 0) least = larger(kth(), least);
    if (asked_.top_p < 1) least = larger(least_of_nucleus(least), least);
    return least;
  }

  static float larger(float a, float b) { return a > b ? a : b; }

  // Return the logit that top-k keeps as its last.
  float kth() {
    int64_t left = asked_.top_k;
    int bucket = 0;
    while (bucket < counted_ && counts_[bucket] < left) left -= counts_[bucket++];
    if (bucket == counted_) {
      if (counted_ == BUCKETS) return -INFINITY;
      count(BUCKETS);
      return kth();
    }
    int64_t count;
    const float* in_order = members(bucket, -INFINITY, &count);
    return left <= count ? in_order[left - 1] : -INFINITY;  // a row of nothing but NaN has no members
  }

  // Return the least likely of the tokens, at least `least`, before which less than top-p of their mass stands.
  float least_of_nucleus(float least) {
    const int last = bucket_of(least);
    if (least > -INFINITY && last >= counted_) count(BUCKETS);
    int64_t count;
    double total = mass_;
    if (least > -INFINITY) {  // of its bucket only a part counts
      const float* part = members(last, least, &count);
      total = 0;
      for (int64_t i = 0; i < count; i++) total += expf(part[i]);
      for (int bucket = 0; bucket < last; bucket++) total += masses_[bucket];
    }

    double before = 0;
    int bucket = 0;
    while (bucket < last && bucket < counted_ && before + masses_[bucket] < asked_.top_p * total)
      before += masses_[bucket++];
    if (bucket == counted_) {
      this->count(BUCKETS);
      return least_of_nucleus(least);
    }
    const float* in_order = members(bucket, least, &count);
    float nucleus = -INFINITY;
    for (int64_t i = 0; i < count && (i == 0 || before < asked_.top_p * total); i++) {
      nucleus = in_order[i];
      before += expf(nucleus);
    }
    return nucleus;
  }

  // Return the token whose logit, at least `least`, has the largest sum with its noise.
  int64_t choose(float least, const uint32_t* hashed) {
    float best = -INFINITY;
    int64_t chosen = 0;
    const auto look = [&](int64_t token) {
      const float sum = gumbel(hashed[token], asked_.keys) + cooled_[token];
      if (sum > best) best = sum, chosen = token;
    };
    int64_t i = 0;
    for (; i + WIDTH <= vocabulary_; i += WIDTH) {
      const Vec cooled = load(cooled_ + i);
      if (!(largest(cooled) >= least)) continue;
      const SignedInts uniform = reinterpret_cast<SignedInts>(scramble(load_ints(hashed + i), asked_.keys));
      const Vec u = fma(__builtin_convertvector(uniform, FloatVector), set(STEP), set(LEAST));
      // -log(-log(1 - u)) is at most -log(u), and that at most the exponent's part of it.
      const SignedInts exponents = reinterpret_cast<SignedInts>(reinterpret_cast<Ints>(u) >> 23) - 127;
      const Vec bounds = cooled - __builtin_convertvector(exponents, FloatVector) * set(LN_2) + set(1e-3f);
      if (!(largest(bounds) > best)) continue;
      float in_order[WIDTH];
      store(in_order, bounds);
      for (int lane = 0; lane < WIDTH; lane++)
        if (in_order[lane] > best && cooled_[i + lane] >= least) look(i + lane);
    }
    for (; i < vocabulary_; i++)
      if (cooled_[i] >= least) look(i);
    return chosen;
  }

  using FloatVector = float __attribute__((vector_size(WIDTH * 4)));
};

constexpr int64_t BLOCK = 1024;         // logits, in one of which the largest is looked for
constexpr int64_t ENOUGH = 1 << 18;     // logits that are worth waking other threads for

// The largest of some logits, and the first that is it. If any is no number, the first such one.
struct Largest {
  float value = -INFINITY;
  int64_t at = 0;

  Largest(const float* logits, int64_t count) {
    SignedInts broken = {};
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
      const int64_t end = count - begin < BLOCK ? count : begin + BLOCK;
      Vec most = set(-INFINITY);
      int64_t i = begin;
      for (; i + WIDTH <= end; i += WIDTH) {
        const FloatVector x = load(logits + i);
        broken |= x != x;
        most = max(most, x);
      }
      float here = largest(most);
      for (; i < end; i++) {
        broken[0] |= logits[i] != logits[i];
        here = logits[i] > here ? logits[i] : here;
      }
      if (here > value) value = here, at = begin;
    }
    for (int lane = 0; lane < WIDTH; lane++)
      if (broken[lane]) value = NAN;
    if (value != value)
      for (at = 0; logits[at] == logits[at];) at++;
    else
      while (logits[at] != value) at++;
  }

  using FloatVector = float __attribute__((vector_size(WIDTH * 4)));
};

}  // namespace

// values and tokens [rows] = each row's largest logit, and which it is.
INFD_KERNEL(largest)
(const float* logits, int64_t stride, int64_t vocabulary, int64_t rows, float* values, int64_t* tokens) {
#pragma omp parallel for if (rows > 1 && rows * vocabulary > ENOUGH)
  for (int64_t i = 0; i < rows; i++) {
    const Largest found(logits + i * stride, vocabulary);
    values[i] = found.value;
    tokens[i] = found.at;
  }
}

// tokens [rows] = one token for each of some rows `which` of logits [.., vocabulary], rows `stride` numbers apart. The other
// arrays are in the order of `which`: what is asked for, and keys [rows, 2].
INFD_KERNEL(draw)
(const float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const float* largest,
 const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const uint32_t* keys,
 const uint32_t* hashed, int64_t* tokens) {
  static thread_local Scratch cooled, members;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int64_t i = 0; i < rows; i++) {
    const Asked asked{largest[i], temperature[i], top_p[i], min_p[i], top_k[i], {keys[2 * i], keys[2 * i + 1]}};
    tokens[i] = Row(logits + which[i] * stride, vocabulary, asked, cooled, members).draw(hashed);
  }
}
