// Means of the rows of spans, and rows of unit length, in float.

#include "tokens.h"

namespace {

template <class Number>
void sum_all(const Number* x, int64_t width, const int64_t* counts, const float* divisors, int64_t spans, float* out) {
  for (int64_t span = 0; span < spans; span++, out += width) {
    memset(out, 0, width * sizeof *out);
    int64_t i = 0;
    for (int64_t t = 0; t < counts[span]; t++, x += width) {
      for (i = 0; i + WIDTH <= width; i += WIDTH) store(out + i, load(out + i) + load(x + i));
      for (; i < width; i++) out[i] += to_float(x[i]);
    }
    for (i = 0; i + WIDTH <= width; i += WIDTH) store(out + i, load(out + i) / set(divisors[span]));
    for (; i < width; i++) out[i] /= divisors[span];
  }
}

}  // namespace

// out [spans, width]: sums of x [.., width], whose rows are those of one span after the other, over the spans' divisors;
// counts [spans] rows each.
INFD_KERNEL(sum_spans)
(int64_t half, const void* x, int64_t width, const int64_t* counts, const float* divisors, int64_t spans, float* out) {
  if (half)
    sum_all(typed<bf16>(x), width, counts, divisors, spans, out);
  else
    sum_all(typed<float>(x), width, counts, divisors, spans, out);
}

// out [rows, width]: the rows of x, whose first elements are `stride` apart, each over its length, or over `least` if it
// is shorter. finite [rows]: whether all numbers of a row of x are.
INFD_KERNEL(normalize_rows)
(const float* x, int64_t stride, int64_t rows, int64_t width, float least, float* out, uint8_t* finite) {
  for (int64_t row = 0; row < rows; row++, x += stride, out += width) {
    Vec squares = set(0), zeros = set(0);
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) {
      const Vec numbers = load(x + i);
      squares = fma(numbers, numbers, squares);
      zeros = fma(numbers, set(0), zeros);  // infinite numbers and those that are none become none
    }
    float length = sum(squares), zero = sum(zeros);
    for (; i < width; i++) length += x[i] * x[i], zero += x[i] * 0;
    finite[row] = zero == 0;
    length = sqrtf(length);
    if (length < least) length = least;
    for (i = 0; i + WIDTH <= width; i += WIDTH) store(out + i, load(x + i) / set(length));
    for (; i < width; i++) out[i] = x[i] / length;
  }
}
