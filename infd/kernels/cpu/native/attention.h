// The arguments of attention: a step, prepared once for all layers of a page group, and one layer's tensors.
//
// Letters: T tokens of the step, S spans, H query heads, K key heads, D head size; strides count elements.

#pragma once

#include <stdint.h>

// The spans of a step, for one page group. Span i has tokens offsets[i] to offsets[i + 1] - 1, at positions from
// start[i] on.
struct AttentionStep {
  int64_t tokens;       // T, including padding after the last span; with `queries`, their number
  int64_t spans;        // S
  int64_t page_tokens;
  int64_t window;       // tokens to which a query attends, its own included; 0: all
  int64_t table_width;  // pages
  const int64_t* offsets;  // [S + 1]
  const int32_t* start;    // [S]
  const int32_t* table;    // [S, table_width]: page ids

  // Attention without a cache: if `packed`, keys and values are the step's own tokens, `start` and the fields of pages
  // are not read, and a query sees the keys of its span at most `before` tokens before and `after` tokens after it; -1:
  // any number of tokens.
  int64_t packed, before, after;

  // Of packed steps: the tokens whose rows q and out have, ascending; null: all tokens.
  const int64_t* queries;  // [tokens]
};

// One layer's tensors. Elements are bfloat16 if `half`, else float; cache rows are int8 if `quantized`, see row.h.
struct AttentionLayer {
  int64_t half, quantized;
  int64_t heads, kv_heads, size;  // H, K, D
  const void* q;                  // [T, H, D]; q_stride between tokens; see AttentionStep::queries
  int64_t q_stride;
  const void* k;  // [pages, K, page_tokens, row]
  const void* v;
  void* out;  // [T, H, D]; zeros for padding
  float scale;
  float softcap;  // 0: none
  int64_t awake;  // whether other threads have just run, so that waking them is cheap

  int64_t kv_stride;  // of packed k and v [T, K, D], between tokens
  const float* bias;  // of packed scores, [H, 2 * furthest + 1], by key's position - query's; or null
  int64_t furthest;   // distance, to which longer ones are bounded

  const float* sinks;  // [H]: the score of an extra key without a value; or null
};
