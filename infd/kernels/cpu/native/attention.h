// What attention reads: a step, prepared once for all layers of a page group, and one layer's tensors.
//
// Letters: T tokens of the step, S spans, H query heads, K key-value heads, D numbers a head; strides count numbers.

#pragma once

#include <stdint.h>

// Which cached tokens each span attends to. Span i owns tokens offsets[i] to offsets[i + 1], at positions start[i] and up.
struct AttentionStep {
  int64_t tokens;       // T, padding behind the last span included
  int64_t spans;        // S
  int64_t page_tokens;
  int64_t window;       // tokens that a query sees, itself included; 0: all
  int64_t table_width;  // pages
  const int64_t* offsets;  // [S + 1]
  const int32_t* start;    // [S]
  const int32_t* table;    // [S, table_width]: page ids
};

// One layer. Numbers are float, or bfloat16 where `half` is not 0; in the cache they are int8 if `quantized`, see row.h.
struct AttentionLayer {
  int64_t half, quantized;
  int64_t heads, kv_heads, size;  // H, K, D
  const void* q;                  // [T, H, D], tokens q_stride apart
  int64_t q_stride;
  const void* k;  // [pages, K, page_tokens, row]
  const void* v;
  void* out;  // [T, H, D]; zeros for padding
  float scale;
  float softcap;  // 0: none
  int64_t awake;  // whether other threads have just computed something
};
