// Write keys and values to the cache.

#include "row.h"

namespace {

template <class Number, class Cached>
void write(void* pages, const void* rows, const int64_t* slots, int64_t tokens, int64_t heads, int64_t page_tokens,
           int64_t size, int64_t stride) {
  const int64_t width = row_size<Cached>(size);
#pragma omp parallel for if (tokens * heads * size > (1 << 17))
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t page = slots[t] / page_tokens, offset = slots[t] % page_tokens;
    for (int64_t head = 0; head < heads; head++)
      put_row(static_cast<const Number*>(rows) + t * stride + head * size, size,
              static_cast<Cached*>(pages) + ((page * heads + head) * page_tokens + offset) * width);
  }
}

}  // namespace

// Write rows [tokens, heads, size] to pages [P, heads, page_tokens, row] at slots [tokens] (page * page_tokens +
// offset). Rows have `stride` elements between tokens, bfloat16 if `half`, else float; they are quantized to int8 if
// `quantized`.
INFD_KERNEL(write_pages)
(int64_t half, int64_t quantized, void* pages, const void* rows, const int64_t* slots, int64_t tokens, int64_t heads,
 int64_t page_tokens, int64_t size, int64_t stride) {
  const auto put = half ? (quantized ? write<bf16, int8_t> : write<bf16, bf16>)
                        : (quantized ? write<float, int8_t> : write<float, float>);
  put(pages, rows, slots, tokens, heads, page_tokens, size, stride);
}
