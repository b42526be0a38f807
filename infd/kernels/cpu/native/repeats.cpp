// The DRY penalty: lowers the logits of tokens that would continue a repetition.
//
// The reference is reference/drawing/repeats.py. The lengths of all repetitions of a sequence's end are found by the
// Z algorithm, read from the end, in time proportional to the window.

#include "scratch.h"

#include <math.h>

namespace {

constexpr int64_t LONGEST = 1024;            // LONGEST_REPETITION of families/draw.py
constexpr float LARGEST_LOG = 88.7228391f;  // of a float

// Sequences of tokens that end a repetition: heads [vocabulary] are bits, tails [count, width] end with -1.
struct Breakers {
  const int32_t* heads;
  const int32_t* tails;
  int64_t count, width;

  // Return the number of tokens in the longest tail, with whose head `back` tokens before the end a breaker begins; -1:
  // none does. `last` is the last token.
  int64_t tail_at(const int32_t* last, int64_t back) const {
    const uint32_t bits = heads[last[-back]];
    int64_t longest = bits & 1 ? 0 : -1;
    for (int64_t n = 0; n < count && bits > 1; n++) {
      if (!(bits >> (n + 1) & 1)) continue;
      const int32_t* tail = tails + n * width;
      int64_t length = 0;
      while (length < width && tail[length] >= 0 && length < back && last[length + 1 - back] == tail[length]) length++;
      if ((length == width || tail[length] < 0) && length > longest) longest = length;
    }
    return longest;
  }
};

struct Penalty {
  float multiplier, base;
  int64_t allowed;

  float of(int64_t length) const {
    double exponent = length - allowed;
    if (base > 1.000001f) {
      const int64_t most = LARGEST_LOG / logf(base);
      if (exponent > most) exponent = most;
    }
    return multiplier * pow(base, exponent);
  }
};

// lengths [known] = the number of tokens before each place, back from the end, that equal the last tokens.
void find_repetitions(const int32_t* last, int64_t known, int32_t* lengths) {
  int64_t left = 0, right = -1;  // the repetition that reaches farthest back: lengths[left] = right - left + 1
  lengths[0] = known;
  for (int64_t k = 1; k < known; k++) {
    int64_t length = k <= right ? lengths[k - left] : 0;
    if (k > right || length >= right - k + 1) {
      length = k > right ? 0 : right - k + 1;
      while (k + length < known && last[-length] == last[-k - length]) length++;
      left = k;
      right = k + length - 1;
    }
    lengths[k] = length;
  }
}

}  // namespace

// For the rows `which` [rows] of logits [.., vocabulary], lower the logits of tokens that would continue a repetition.
// tokens, sequences [rows], ends [rows]: see families.draw.History; `tokens_stride` elements separate sequences.
INFD_KERNEL(penalize_repeats)
(float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const int32_t* tokens,
 int64_t tokens_stride, const int64_t* sequences, const int64_t* ends, const float* multiplier, const float* base,
 const int32_t* allowed, const int32_t* window, const int32_t* heads, const int32_t* tails, int64_t count,
 int64_t width) {
  static thread_local Scratch scratch;
  const Breakers breakers{heads, tails, count, width};
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int64_t i = 0; i < rows; i++) {
    const Penalty penalty{multiplier[i], base[i], allowed[i]};
    const int64_t known = ends[i] < window[i] ? ends[i] : window[i];
    const int32_t* last = tokens + sequences[i] * tokens_stride + ends[i] - 1;
    int64_t limit = known;
    for (int64_t back = 0; back < known; back++) {
      const int64_t tail = breakers.tail_at(last, back);
      if (tail < 0) continue;
      limit = back - tail;
      break;
    }
    if (limit < penalty.allowed) continue;
    if (limit > penalty.allowed + LONGEST) limit = penalty.allowed + LONGEST;

    Carver sizes(nullptr);
    sizes.take<int32_t>(known + 1), sizes.take<int32_t>(vocabulary);
    Carver arrays(scratch.at_least(sizes.used));
    int32_t* lengths = arrays.take<int32_t>(known + 1);
    int32_t* longest = arrays.take<int32_t>(vocabulary);  // by token: length + 1 of the repetition that it would continue
    memset(longest, 0, vocabulary * sizeof(int32_t));
    find_repetitions(last, known, lengths);
    for (int64_t k = 1; k < known; k++) {
      const int64_t length = lengths[k] < limit ? lengths[k] : limit;
      int32_t& found = longest[last[1 - k]];
      if (length >= penalty.allowed && length + 1 > found) found = length + 1;
    }
    float* row = logits + which[i] * stride;
    for (int64_t k = 1; k < known; k++) {
      const int32_t token = last[1 - k];
      if (longest[token] > 0 && !(heads[token] & 1)) row[token] -= penalty.of(longest[token] - 1);
      longest[token] = 0;
    }
  }
}
