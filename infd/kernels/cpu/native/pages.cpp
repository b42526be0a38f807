// New keys and values, put into the cache.

#include "kernel.h"

// pages [P, heads, page_tokens, head_bytes] at slots [tokens], page * page_tokens + offset, = rows [tokens, heads,
// head_bytes], tokens `row_bytes` apart.
INFD_KERNEL(write_pages)
(char* pages, const char* rows, const int64_t* slots, int64_t tokens, int64_t heads, int64_t page_tokens,
 int64_t head_bytes, int64_t row_bytes) {
#pragma omp parallel for if (tokens * heads * head_bytes > (1 << 18))
  for (int64_t t = 0; t < tokens; t++) {
    const int64_t page = slots[t] / page_tokens, offset = slots[t] % page_tokens;
    for (int64_t head = 0; head < heads; head++)
      memcpy(pages + ((page * heads + head) * page_tokens + offset) * head_bytes,
             rows + t * row_bytes + head * head_bytes, head_bytes);
  }
}
