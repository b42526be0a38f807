// The arguments of `decoder`: a whole decoder, described once, the persistent batch, and a step of which every token is
// sampled.
//
// infd/kernels/recipe.py defines a decoder; decoder.py fills in these structures.

#pragma once

#include <stdint.h>

#include "stack.h"

// The rows of an embedding table, in the form in which a matrix is stored.
struct DecoderTable {
  void (*look_up)(void* out, const void* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count,
                  int64_t layout);
  const void* weights;
  int64_t outputs, inputs, layout;
  float scale;  // multiplies the embeddings; 1: none
};

struct Decoder {
  DecoderTable embedding;
  const StackLayer* layers;
  int64_t count;
  StackNorm norm;  // of the last layer's output
  StackProduct head;
  float logit_scale;  // multiplies the logits; 1: none
};

struct DecoderGroup {
  int64_t page_tokens, window;  // see AttentionStep
};

// Progress of the device thread, which other threads watch and may stop; see runner/pulse.py.
struct DecoderPulse {
  int64_t beats, stopped;
};

// What outlives a step: the persistent batch (rows.cpp), and its page groups.
struct DecoderMemory {
  int32_t* tokens;  // [rows, length of a row]
  int64_t tokens_stride;
  int64_t* length;        // [rows]
  const int32_t* tables;  // [rows, groups, pages]
  int64_t groups, pages;
  const DecoderGroup* group;  // [groups]
  DecoderPulse* pulse;
};

// A step of `spans` spans with `tokens` tokens together.
struct DecoderStep {
  int64_t spans, tokens;
  const int64_t *span_row, *bound, *counts;  // by span: row, upper bound of the first token's position, tokens
  const int64_t* shift;                      // by span: added to positions, for rows of the rotary tables
  int64_t append;  // whether to append the likeliest tokens to the persistent batch; all spans have one token then

  // Results, by token.
  int64_t *row, *end;  // row, and the position after the token
  float* logits;       // [tokens, vocabulary]
  float* largest;      // the largest logit
  int64_t* token;      // the likeliest token
  int64_t* verdict;    // 1: the largest logit is not finite; else 0. `keep` also finds 2: no token is allowed
  int64_t* kept;       // by span: number of samples that `keep` kept
  int16_t* routes;     // see StackStep
  int64_t routing_layers;
};
