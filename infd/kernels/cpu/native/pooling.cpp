// Sums of the rows of spans, in float.

#include "tokens.h"

namespace {

template <class Number>
void sum_all(const Number* x, int64_t width, const int64_t* counts, int64_t spans, float* out) {
  for (int64_t span = 0; span < spans; span++, out += width) {
    memset(out, 0, width * sizeof *out);
    for (int64_t t = 0; t < counts[span]; t++, x += width) {
      int64_t i = 0;
      for (; i + WIDTH <= width; i += WIDTH) store(out + i, load(out + i) + load(x + i));
      for (; i < width; i++) out[i] += to_float(x[i]);
    }
  }
}

}  // namespace

// out [spans, width]: sums of x [.., width], whose rows are those of one span after the other; counts [spans] rows each.
INFD_KERNEL(sum_spans)
(int64_t half, const void* x, int64_t width, const int64_t* counts, int64_t spans, float* out) {
  if (half)
    sum_all(typed<bf16>(x), width, counts, spans, out);
  else
    sum_all(typed<float>(x), width, counts, spans, out);
}
