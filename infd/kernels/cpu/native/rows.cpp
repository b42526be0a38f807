// Reads and writes of the persistent batch: `tokens` [rows, max_len], known tokens; `length` [rows], their numbers;
// tables [rows, groups, pages], page ids. Strides separate rows, in elements.

#include "kernel.h"

// Locate a step's tokens. Of each span, row [spans], and an upper bound of its first token's position; of each token, its
// span [count], and its distance from the span's first token. start [spans] and the other outputs [count] are exact.
INFD_KERNEL(place_tokens)
(const int32_t* tokens, int64_t stride, const int64_t* length, const int64_t* row, const int64_t* bound, int64_t spans,
 const int64_t* span, const int64_t* offset, int64_t count, int32_t* start, int64_t* token_row, int64_t* position,
 int64_t* token) {
  for (int64_t i = 0; i < spans; i++) {
    const int64_t last = length[row[i]] - 1;
    start[i] = static_cast<int32_t>(bound[i] < last ? bound[i] : last);
  }
  for (int64_t t = 0; t < count; t++) {
    token_row[t] = row[span[t]];
    position[t] = start[span[t]] + offset[t];
    token[t] = tokens[token_row[t] * stride + position[t]];
  }
}

// Of one page group: table [spans, pages] = the first pages of the rows of spans; slots [count] = page * page_tokens +
// offset of each token.
INFD_KERNEL(place_pages)
(const int32_t* tables, int64_t stride, const int64_t* row, int64_t spans, int64_t pages, const int64_t* token_row,
 const int64_t* position, int64_t count, int64_t page_tokens, int32_t* table, int64_t* slots) {
  for (int64_t i = 0; i < spans; i++) memcpy(table + i * pages, tables + row[i] * stride, pages * sizeof *table);
  for (int64_t t = 0; t < count; t++) {
    const int64_t page = position[t] / page_tokens, offset = position[t] % page_tokens;
    slots[t] = tables[token_row[t] * stride + page] * page_tokens + offset;
  }
}

// Append a token to each of the rows [count], at position `end`.
INFD_KERNEL(append_tokens)
(int32_t* tokens, int64_t stride, int64_t* length, const int64_t* row, const int64_t* end, const int64_t* token,
 int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    tokens[row[i] * stride + end[i]] = static_cast<int32_t>(token[i]);
    length[row[i]] = end[i] + 1;
  }
}
