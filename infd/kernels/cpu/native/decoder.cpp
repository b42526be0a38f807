// A step of a whole decoder in one call, without returning to Python: finds the step's tokens in the persistent batch,
// embeds them, computes the layers, the last norm and the head, and finds the likeliest tokens. A second call keeps the
// tokens that masks allow and drafts anticipated.
//
// The calls compute the same operations as runner/batch.py, models/decoder.py and runner/sampler.py, which compute all
// other steps, so results are bitwise equal.

#include "decoder.h"

#include "layers.h"
#include "scratch.h"
#include "tokens.h"

INFD_KERNEL(place_tokens)
(const int32_t* tokens, int64_t stride, const int64_t* length, const int64_t* row, const int64_t* bound, int64_t spans,
 const int64_t* span, const int64_t* offset, int64_t count, int32_t* start, int64_t* token_row, int64_t* position,
 int64_t* token);
INFD_KERNEL(place_pages)
(const int32_t* tables, int64_t stride, const int64_t* row, int64_t spans, int64_t pages, const int64_t* token_row,
 const int64_t* position, int64_t count, int64_t page_tokens, int32_t* table, int64_t* slots);
INFD_KERNEL(append_tokens)
(int32_t* tokens, int64_t stride, int64_t* length, const int64_t* row, const int64_t* end, const int64_t* token,
 int64_t count);
INFD_KERNEL(stack)
(int64_t half, const StackLayer* layers, int64_t count, const StackStep* step, void* x, void* stream, int64_t starts,
 int64_t ends);
INFD_KERNEL(add_rms_norm)
(int64_t half, const void* x, const void* residual, void* stream, void* out, int64_t tokens, int64_t size,
 const void* weight, float eps, float offset);
INFD_KERNEL(layer_norm)
(int64_t half, const void* x, void* out, int64_t tokens, int64_t size, const void* weight, const void* bias, float eps);
INFD_KERNEL(largest)
(const float* logits, int64_t stride, int64_t vocabulary, int64_t rows, float* values, int64_t* tokens);
INFD_KERNEL(forbid)
(float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const uint32_t* bits,
 int64_t words);

namespace {

constexpr int64_t ENOUGH = 1 << 18;  // with more logits than this, waking other threads saves time

enum Verdict { SOUND, NOT_FINITE, NOTHING_ALLOWED };  // as in runner/sampled.py

bool finite(float x) { return x - x == 0; }  // an infinite or invalid number minus itself is NaN

// Count a beat. Return whether the step goes on.
bool beat(DecoderPulse* pulse) {
  if (__atomic_load_n(&pulse->stopped, __ATOMIC_RELAXED)) return false;
  __atomic_store_n(&pulse->beats, pulse->beats + 1, __ATOMIC_RELAXED);
  return true;
}

// The spans and tokens of a step, in scratch memory.
struct Places {
  int32_t* start;                         // by span: position of the first token
  int64_t* offsets;                       // [spans + 1]: the spans' first tokens
  int64_t *span, *within;                 // by token: span, and distance from the span's first token
  int64_t *position, *rotary, *token;     // by token: position, row of the rotary tables, id
  int64_t** slots;                        // by page group, [tokens]
  int32_t** tables;                       // by page group, [spans, pages]
  AttentionStep* attention;               // by page group
  const AttentionStep** each;             // their addresses

  Places(Carver& carver, const DecoderMemory& memory, const DecoderStep& step) {
    start = carver.take<int32_t>(step.spans);
    offsets = carver.take<int64_t>(step.spans + 1);
    span = carver.take<int64_t>(step.tokens);
    within = carver.take<int64_t>(step.tokens);
    position = carver.take<int64_t>(step.tokens);
    rotary = carver.take<int64_t>(step.tokens);
    token = carver.take<int64_t>(step.tokens);
    slots = carver.take<int64_t*>(memory.groups);
    tables = carver.take<int32_t*>(memory.groups);
    attention = carver.take<AttentionStep>(memory.groups);
    each = carver.take<const AttentionStep*>(memory.groups);
    int64_t* all_slots = carver.take<int64_t>(memory.groups * step.tokens);
    int32_t* all_tables = carver.take<int32_t>(memory.groups * step.spans * memory.pages);
    if (slots == nullptr) return;  // only the sizes are wanted
    for (int64_t i = 0; i < memory.groups; i++) {
      slots[i] = all_slots + i * step.tokens;
      tables[i] = all_tables + i * step.spans * memory.pages;
    }
  }

  void fill(const DecoderMemory& memory, const DecoderStep& step) {
    int64_t at = 0;
    for (int64_t i = 0; i < step.spans; i++) {
      offsets[i] = at;
      for (int64_t j = 0; j < step.counts[i]; j++, at++) span[at] = i, within[at] = j;
    }
    offsets[step.spans] = at;
    INFD_HERE(place_tokens)
    (memory.tokens, memory.tokens_stride, memory.length, step.span_row, step.bound, step.spans, span, within, step.tokens,
     start, step.row, position, token);
    int64_t end = 0;
    for (int64_t t = 0; t < step.tokens; t++) {
      step.end[t] = position[t] + 1;
      rotary[t] = position[t] + step.shift[span[t]];
      end = larger(end, step.end[t]);
    }
    for (int64_t i = 0; i < memory.groups; i++) {
      const DecoderGroup& group = memory.group[i];
      const int64_t pages = (end + group.page_tokens - 1) / group.page_tokens;
      INFD_HERE(place_pages)
      (memory.tables + i * memory.pages, memory.groups * memory.pages, step.span_row, step.spans, pages, step.row, position,
       step.tokens, group.page_tokens, tables[i], slots[i]);
      attention[i] = {step.tokens, step.spans, group.page_tokens, group.window, pages, offsets, start, tables[i], 0, 0, 0, nullptr};
      each[i] = &attention[i];
    }
  }
};

// The hidden states of a step's tokens, in scratch memory.
template <class Number>
struct Hidden {
  Number *x, *stream, *normed;

  Hidden(Carver& carver, int64_t numbers) {
    x = carver.take<Number>(numbers);
    stream = carver.take<Number>(numbers);
    normed = carver.take<Number>(numbers);
  }
};

template <class Number>
void embed(const DecoderTable& table, const int64_t* tokens, int64_t count, Number* x) {
  table.look_up(x, table.weights, table.outputs, table.inputs, tokens, count, table.layout);
  if (table.scale != 1) scale(x, table.scale, count * table.inputs);
}

// normed = the norm of x + stream, which becomes `stream`.
template <class Number>
void norm_sum(const StackNorm& norm, const Hidden<Number>& hidden, int64_t tokens, int64_t size) {
  if (!norm.centered) {
    INFD_HERE(add_rms_norm)
    (HALF<Number>, hidden.x, hidden.stream, hidden.stream, hidden.normed, tokens, size, norm.weight, norm.eps, norm.offset);
    return;
  }
  add(hidden.x, hidden.stream, hidden.stream, tokens * size);
  INFD_HERE(layer_norm)(HALF<Number>, hidden.stream, hidden.normed, tokens, size, norm.weight, norm.bias, norm.eps);
}

template <class Number>
void multiply_head(const Decoder& decoder, const Hidden<Number>& hidden, const DecoderStep& step) {
  const StackProduct& head = decoder.head;
  const Number* x = hidden.normed;
  if (head.rounding != nullptr) {
    INFD_HERE(round_inputs)(HALF<Number>, x, head.inputs, hidden.x, step.tokens, head.inputs, head.rounding);
    x = hidden.x;
  }
  head.multiply(x, head.inputs, step.tokens, head.weights, head.outputs, head.inputs, head.bias, step.logits, head.outputs,
                true, head.layout, nullptr);
  if (decoder.logit_scale == 1) return;
#pragma omp parallel for if (step.tokens > 1 && step.tokens * head.outputs > ENOUGH)
  for (int64_t t = 0; t < step.tokens; t++) scale(step.logits + t * head.outputs, decoder.logit_scale, head.outputs);
}

void choose(int64_t vocabulary, const DecoderStep& step) {
  INFD_HERE(largest)(step.logits, vocabulary, vocabulary, step.tokens, step.largest, step.token);
  for (int64_t t = 0; t < step.tokens; t++)
    step.verdict[t] = !finite(step.largest[t]);
}

template <class Number>
void compute(const Decoder& decoder, const DecoderMemory& memory, const DecoderStep& step) {
  static thread_local Scratch scratch;
  const int64_t size = decoder.head.inputs;
  Carver sizes(nullptr);
  Places(sizes, memory, step);
  Hidden<Number>(sizes, step.tokens * size);
  Carver carver(scratch.at_least(sizes.used));
  Places places(carver, memory, step);
  const Hidden<Number> hidden(carver, step.tokens * size);

  places.fill(memory, step);
  embed(decoder.embedding, places.token, step.tokens, hidden.x);
  StackStep layers = {};
  layers.tokens = step.tokens, layers.hidden = size;
  layers.positions = places.rotary, layers.groups = places.each, layers.slots = places.slots;
  layers.routes = step.routes, layers.routing_layers = step.routing_layers;
  for (int64_t i = 0; i < decoder.count; i++) {
    if (!beat(memory.pulse)) return;
    INFD_HERE(stack)(HALF<Number>, decoder.layers + i, 1, &layers, hidden.x, hidden.stream, i == 0, i == decoder.count - 1);
  }
  norm_sum(decoder.norm, hidden, step.tokens, size);
  multiply_head(decoder, hidden, step);
  choose(decoder.head.outputs, step);
  if (step.append)
    INFD_HERE(append_tokens)
    (memory.tokens, memory.tokens_stride, memory.length, step.row, step.end, step.token, step.tokens);
}

// Whether a mask [words] may change the likeliest token of a row.
bool may_change(int64_t token, int64_t verdict, const uint32_t* allowed, int64_t words) {
  if (verdict == SOUND) return !(allowed[token >> 5] >> (token & 31) & 1);
  for (int64_t word = 0; word < words; word++)
    if (allowed[word] != ~0u) return true;
  return false;
}

// Mask token t's logits, and choose again.
void choose_allowed(int64_t vocabulary, const DecoderStep& step, int64_t t, const uint32_t* allowed, int64_t words) {
  float* logits = step.logits + t * vocabulary;
  const int64_t only = 0;
  INFD_HERE(forbid)(logits, vocabulary, vocabulary, &only, 1, allowed, words);
  INFD_HERE(largest)(logits, vocabulary, vocabulary, 1, step.largest + t, step.token + t);
  const float most = step.largest[t];
  step.verdict[t] = most == -INFINITY ? NOTHING_ALLOWED : finite(most) ? SOUND : NOT_FINITE;
}

}  // namespace

// Of the samples of a computed step, keep those of each span up to the first that is not sound, or that the draft behind
// it does not equal. Append the last kept one to the persistent batch, the drafts before which are there. A span of which
// none is sound appends its first sample all the same, which its verdict makes void. allowed [tokens, words]: the mask,
// lowest bit first; null: all tokens are allowed. Rows behind the last kept sample of a span are not masked.
INFD_KERNEL(keep)
(const DecoderMemory* memory, const DecoderStep* step, int64_t vocabulary, const uint32_t* allowed, int64_t words) {
  for (int64_t i = 0, first = 0; i < step->spans; first += step->counts[i++]) {
    int32_t* row = memory->tokens + step->span_row[i] * memory->tokens_stride;
    int64_t kept = 0;
    for (int64_t t = first; t < first + step->counts[i]; t++, kept++) {
      if (kept && step->token[t - 1] != row[step->end[t] - 1]) break;
      const uint32_t* mask = allowed + t * words;
      if (allowed != nullptr && may_change(step->token[t], step->verdict[t], mask, words))
        choose_allowed(vocabulary, *step, t, mask, words);
      if (step->verdict[t] != SOUND) break;
    }
    const int64_t last = first + (kept ? kept - 1 : 0);
    step->kept[i] = kept;
    row[step->end[last]] = static_cast<int32_t>(step->token[last]);
    memory->length[step->span_row[i]] = step->end[last] + 1;
  }
}

// Compute a step, unless the pulse is stopped meanwhile. half: activations are bfloat16, else float.
INFD_KERNEL(decoder)(int64_t half, const Decoder* decoder, const DecoderMemory* memory, const DecoderStep* step) {
  (half ? compute<bf16> : compute<float>)(*decoder, *memory, *step);
}
