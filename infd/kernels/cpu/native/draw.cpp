// Token sampling, without sorting the vocabulary.
//
// The reference is reference/drawing: temperature, min-p, top-k, top-p, then the largest sum of logit and Gumbel noise.
// limits.h finds the limits. In whole vectors of tokens, a token's noise is computed only if the sum of the token's logit
// and an upper bound of the noise exceeds the largest sum so far. The bound is computed from the exponent of the token's
// uniform number.

#include "limits.h"

namespace {

using Ints = uint32_t __attribute__((vector_size(WIDTH * 4)));
using SignedInts = int32_t __attribute__((vector_size(WIDTH * 4)));

constexpr float LN_2 = 0.69314718055994530942f;

inline Ints load_ints(const uint32_t* p) {
  Ints numbers;
  memcpy(&numbers, p, sizeof numbers);
  return numbers;
}

// The sampling parameters of one row. Keys and token hashes as in reference/drawing/noise.py.
struct SamplingParams {
  float largest, temperature, top_p, min_p;
  int64_t top_k;
  uint32_t keys[2];
};

// The hash of reference/drawing/noise.py: 31 random bits.
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
  __asm__("" : "+x"(u));  // round here, as torch does: prevents a fused multiply-add
  return -logf(-log1pf(-(u + LEAST)));
}

class Row {
 public:
  Row(const float* logits, int64_t vocabulary, const SamplingParams& params, Scratch& cooled, Scratch& members)
      : cooled_(reinterpret_cast<float*>(cooled.at_least(vocabulary * sizeof(float)))),
        vocabulary_(vocabulary),
        params_(params),
        members_(members) {
    for (int64_t i = 0; i < vocabulary; i++) cooled_[i] = (logits[i] - params.largest) / params.temperature;
  }

  int64_t draw(const uint32_t* hashed) {
    const float nearest = logf(params_.min_p);  // -inf without min-p
    return choose(Limits(cooled_, vocabulary_, members_).smallest(nearest, params_.top_k, params_.top_p), hashed);
  }

 private:
  float* cooled_;
  int64_t vocabulary_;
  SamplingParams params_;
  Scratch& members_;

  // Return the token with the largest sum of cooled logit and noise, among those with cooled logits of at least
  // `least`.
  int64_t choose(float least, const uint32_t* hashed) {
    float best = -INFINITY;
    int64_t chosen = 0;
    const auto look = [&](int64_t token) {
      const float sum = gumbel(hashed[token], params_.keys) + cooled_[token];
      if (sum > best) best = sum, chosen = token;
    };
    int64_t i = 0;
    for (; i + WIDTH <= vocabulary_; i += WIDTH) {
      const Vec cooled = load(cooled_ + i);
      if (!(largest(cooled) >= least)) continue;
      const SignedInts uniform = reinterpret_cast<SignedInts>(scramble(load_ints(hashed + i), params_.keys));
      const Vec u = fma(__builtin_convertvector(uniform, FloatVector), set(STEP), set(LEAST));
      // -log(-log(1 - u)) <= -log(u) <= -log(2) * (u's exponent).
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

constexpr int64_t BLOCK = 1024;         // logits searched at a time
constexpr int64_t ENOUGH = 1 << 18;     // with more logits than this, waking other threads saves time

// The largest logit and its first index; if any logit is NaN, NaN and the first NaN's index.
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

// values, tokens [rows] = each row's largest logit and the logit's index, as in Largest.
INFD_KERNEL(largest)
(const float* logits, int64_t stride, int64_t vocabulary, int64_t rows, float* values, int64_t* tokens) {
#pragma omp parallel for if (rows > 1 && rows * vocabulary > ENOUGH)
  for (int64_t i = 0; i < rows; i++) {
    const Largest found(logits + i * stride, vocabulary);
    values[i] = found.value;
    tokens[i] = found.at;
  }
}

// In the rows `which` [rows] of logits [.., vocabulary], set the logits of tokens whose bit is 0 to -inf. `stride`
// elements separate rows of logits. bits [rows, words] are in the order of `which`, lowest bit first.
INFD_KERNEL(forbid)
(float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const uint32_t* bits,
 int64_t words) {
#pragma omp parallel for if (rows > 1 && rows * vocabulary > ENOUGH)
  for (int64_t i = 0; i < rows; i++) {
    float* row = logits + which[i] * stride;
    for (int64_t word = 0; word < words; word++) {
      const uint32_t allowed = bits[i * words + word];
      if (allowed == ~0u) continue;
      const int64_t first = 32 * word, count = vocabulary - first < 32 ? vocabulary - first : 32;
      for (int64_t bit = 0; bit < count; bit++)
        if (!(allowed >> bit & 1)) row[first + bit] = -INFINITY;
    }
  }
}

// tokens [rows] = a sampled token for each of the rows `which` [rows] of logits [.., vocabulary]. `stride` elements
// separate rows of logits. Sampling parameters [rows] and keys [rows, 2] are in the order of `which`; hashed
// [vocabulary] is the hash of each token.
INFD_KERNEL(draw)
(const float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const float* largest,
 const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p, const uint32_t* keys,
 const uint32_t* hashed, int64_t* tokens) {
  static thread_local Scratch cooled, members;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int64_t i = 0; i < rows; i++) {
    const SamplingParams params{largest[i], temperature[i], top_p[i], min_p[i], top_k[i], {keys[2 * i], keys[2 * i + 1]}};
    tokens[i] = Row(logits + which[i] * stride, vocabulary, params, cooled, members).draw(hashed);
  }
}
