// Several decoder layers in one call, without returning to Python.
//
// The call computes the same operations in the same order as the layers of models/layers, so results are bitwise equal.
// Only the norms and rotations of heads and the writes to the key-value cache are fused, token by token, so that a
// token's heads stay in the CPU's cache.

#include "stack.h"

#include "layers.h"
#include "row.h"
#include "scratch.h"
#include "sharing.h"
#include "tokens.h"

INFD_KERNEL(route)
(int64_t half, const Router* router, const void* x, int64_t tokens, int64_t* experts, float* weights);
INFD_KERNEL(experts)
(int64_t half, const Experts* layer, const void* x, int64_t tokens, const int64_t* chosen, const float* weights,
 const ExpertChanges* changes, void* out);
INFD_KERNEL(add_shared)
(int64_t half, void* y, const void* shared, const void* gate, int64_t tokens, int64_t size);

namespace {

// The intermediate results of a layer, in scratch memory.
template <class Number>
struct Workspace {
  Number *normed, *rounded, *qkv, *attended, *gate_up, *gated;
  Number *shared, *shared_gate;  // results of shared experts
  int64_t* chosen;             // experts of the tokens
  float* weights;

  Workspace(Carver& carver, const StackLayer* layers, int64_t count, const StackStep& step) {
    int64_t qkv_size = 0, attended_size = 0, gate_up_size = 0, gated_size = 0, most_chosen = 0;
    for (const StackLayer* layer = layers; layer < layers + count; layer++) {
      qkv_size = larger(qkv_size, layer->qkv.outputs);
      attended_size = larger(attended_size, layer->output.inputs);
      gate_up_size = larger(gate_up_size, layer->gate_up.outputs);
      gated_size = larger(gated_size, layer->down.inputs);
      if (layer->experts) most_chosen = larger(most_chosen, layer->experts->router.chosen);
    }
    normed = carver.take<Number>(step.tokens * step.hidden);
    rounded = carver.take<Number>(step.tokens * step.hidden);
    qkv = carver.take<Number>(step.tokens * qkv_size);
    attended = carver.take<Number>(step.tokens * attended_size);
    gate_up = carver.take<Number>(step.tokens * gate_up_size);
    gated = carver.take<Number>(step.tokens * gated_size);
    shared = carver.take<Number>(most_chosen ? step.tokens * step.hidden : 0);
    shared_gate = carver.take<Number>(most_chosen ? step.tokens : 0);
    chosen = carver.take<int64_t>(step.tokens * most_chosen);
    weights = carver.take<float>(step.tokens * most_chosen);
  }
};

// Norm a row; x may be out.
template <class Number>
void norm_row(const StackNorm& norm, const Number* x, Number* out, int64_t size) {
  if (norm.centered)
    LayerNorm<Number>{typed<Number>(norm.weight), typed<Number>(norm.bias), norm.eps}(x, out, size);
  else
    Norm<Number>{typed<Number>(norm.weight), norm.eps, norm.offset}(x, out, size);
}

// Add x to `stream`, or copy x to `stream` if `starts`. Return the norm of `stream`, stored in `normed`; if `norm`
// has no weight, return `stream`. enough: the number of elements above which threads share the work, as below.
template <class Number>
const Number* enter(const StackNorm& norm, const Number* x, Number* stream, bool starts, Number* normed,
                    const StackStep& step, int64_t enough) {
  const int64_t tokens = step.tokens, size = step.hidden;
#pragma omp parallel for if (tokens * size > enough)
  for (int64_t t = 0; t < tokens; t++) {
    Number* sum = stream + t * size;
    if (starts)
      memcpy(sum, x + t * size, size * sizeof(Number));
    else
      add(x + t * size, sum, sum, size);
    if (norm.weight != nullptr) norm_row(norm, sum, normed + t * size, size);
  }
  return norm.weight == nullptr ? stream : normed;
}

template <class Number>
void finish(const StackTransform& transform, Number* x, const StackStep& step, int64_t enough) {
  const int64_t size = step.hidden;
  if (transform.norm.weight == nullptr && transform.factor == 1) return;
  const Norm<Number> apply{static_cast<const Number*>(transform.norm.weight), transform.norm.eps, transform.norm.offset};
#pragma omp parallel for if (step.tokens * size > enough)
  for (int64_t t = 0; t < step.tokens; t++) {
    if (transform.norm.weight != nullptr) apply(x + t * size, x + t * size, size);
    if (transform.factor != 1) scale(x + t * size, transform.factor, size);
  }
}

// Norm the `count` heads of a token in place: each head alone if the weight has `size` elements, else all together.
template <class Number>
void norm_heads(const StackNorm& norm, Number* heads, int64_t count, int64_t size) {
  if (norm.weight == nullptr) return;
  const Norm<Number> apply{static_cast<const Number*>(norm.weight), norm.eps, norm.offset};
  const int64_t width = norm.size == size ? size : count * size;
  for (Number* head = heads; head < heads + count * size; head += width) apply(head, head, width);
}

// Norm and rotate q and k in place, and write k and v to the cache.
template <class Cached, class Number>
void place_heads(const StackLayer& layer, const StackStep& step, Number* qkv, int64_t enough) {
  const int64_t size = layer.size, page_tokens = step.groups[layer.group]->page_tokens, width = row_size<Cached>(size);
  const int64_t* slots = step.slots[layer.group];
  const Rotation rotate{layer.turned, layer.interleaved != 0};
#pragma omp parallel for if (step.tokens * layer.qkv.outputs > enough)
  for (int64_t t = 0; t < step.tokens; t++) {
    Number* q = qkv + t * layer.qkv.outputs;
    Number* k = q + layer.heads * size;
    const Number* v = k + layer.kv_heads * size;
    const float* angles = layer.rope + step.positions[t] * layer.turned;
    norm_heads(layer.q_norm, q, layer.heads, size);
    norm_heads(layer.k_norm, k, layer.kv_heads, size);
    for (int64_t head = 0; head < layer.heads; head++) rotate(q + head * size, angles, q + head * size, size);
    if (layer.temperature) scale(q, layer.temperature[step.positions[t]], layer.heads * size);
    const int64_t page = slots[t] / page_tokens, offset = slots[t] % page_tokens;
    for (int64_t head = 0; head < layer.kv_heads; head++) {
      const int64_t at = ((page * layer.kv_heads + head) * page_tokens + offset) * width;
      rotate(k + head * size, angles, k + head * size, size);
      put_row(k + head * size, size, static_cast<Cached*>(layer.k) + at);
      put_row(v + head * size, size, static_cast<Cached*>(layer.v) + at);
    }
  }
}

// next: the product that follows `down`, or null
template <class Number>
void feed(const StackLayer& layer, const Number* input, Number* out, const Workspace<Number>& space,
          const StackStep& step, bool awake, const StackProduct* next) {
  multiply(layer.gate_up, input, space.rounded, space.gate_up, step.tokens, awake, &layer.down);
  const int64_t size = layer.gate_up.outputs / 2;
  const auto apply = layer.gelu ? gate<Gelu, Number> : gate<Silu, Number>;
#pragma omp parallel for if (step.tokens * size > enough_elements(awake))
  for (int64_t t = 0; t < step.tokens; t++) {
    const Number* row = space.gate_up + 2 * t * size;
    apply(row, row + size, space.gated + t * size, size);
  }
  multiply(layer.down, space.gated, space.gated, out, step.tokens, awake, next);
}

void report_routes(const Experts& layer, const int64_t* chosen, const StackStep& step) {
  const int64_t count = layer.router.chosen;
  for (int64_t t = 0; t < step.tokens; t++) {
    int16_t* row = step.routes + (t * step.routing_layers + layer.number) * count;
    for (int64_t slot = 0; slot < count; slot++) row[slot] = static_cast<int16_t>(chosen[t * count + slot]);
  }
}

template <class Number>
void mix(const StackLayer& layer, const Number* input, Number* out, const Workspace<Number>& space,
         const StackStep& step, bool awake) {
  INFD_HERE(route)(HALF<Number>, &layer.experts->router, input, step.tokens, space.chosen, space.weights);
  if (step.routes) report_routes(*layer.experts, space.chosen, step);
  INFD_HERE(experts)(HALF<Number>, layer.experts, input, step.tokens, space.chosen, space.weights, nullptr, out);
  if (layer.gate_up.multiply == nullptr) return;
  feed(layer, input, space.shared, space, step, awake, nullptr);
  const bool gated = layer.shared_gate.multiply != nullptr;
  if (gated) multiply(layer.shared_gate, input, space.rounded, space.shared_gate, step.tokens, awake);
  INFD_HERE(add_shared)(HALF<Number>, out, space.shared, gated ? space.shared_gate : nullptr, step.tokens, step.hidden);
}

// The weights that each token multiplies in a layer. Those of chosen experts do not count.
int64_t weights_of(const StackLayer& layer) {
  const auto count = [](const StackProduct& product) { return product.outputs * product.inputs; };
  return count(layer.qkv) + count(layer.output) + count(layer.gate_up) + count(layer.down);
}

// next: the layer that follows in this call, or null
template <class Number>
void compute(const StackLayer& layer, const StackLayer* next, const StackStep& all, const Workspace<Number>& space, Number* x,
             Number* stream, bool starts, bool ends) {
  const bool awake = worth_sharing(all.tokens, weights_of(layer), 1, false);
  const int64_t enough = enough_elements(awake);
  const Number* input = enter(layer.input_norm, x, stream, starts, space.normed, all, enough);
  multiply(layer.qkv, input, space.rounded, space.qkv, all.tokens, awake, &layer.output);
  (layer.quantized ? place_heads<int8_t, Number> : place_heads<Number, Number>)(layer, all, space.qkv, enough);
  StackStep step = all;
  const AttentionStep* attended = all.groups[layer.group];
  if (ends && all.sampled > 0) {
    keep_rows(space.qkv, layer.qkv.outputs, layer.heads * layer.size, all.sampled_tokens, all.sampled);
    keep_rows(stream, all.hidden, all.hidden, all.sampled_tokens, all.sampled);
    step.tokens = all.sampled, attended = all.sampled_attention;
  }
  const AttentionLayer attention{HALF<Number>, layer.quantized, layer.heads,    layer.kv_heads,
                                 layer.size,   space.qkv,       layer.qkv.outputs, layer.k,
                                 layer.v,      space.attended,  layer.scale,    layer.softcap,
                                 awake,        0,               nullptr,        0,
                                 layer.sinks};
  INFD_HERE(attention)(attended, &attention);
  multiply(layer.output, space.attended, space.attended, x, step.tokens, awake, layer.experts ? nullptr : &layer.gate_up);
  finish(layer.attention_transform, x, step, enough);

  input = enter(layer.post_norm, x, stream, false, space.normed, step, enough);
  if (layer.experts)
    mix(layer, input, x, space, step, awake);
  else
    feed(layer, input, x, space, step, awake, next ? &next->qkv : nullptr);
  finish(layer.mlp_transform, x, step, enough);
}

template <class Number>
void compute_all(const StackLayer* layers, int64_t count, const StackStep& step, Number* x, Number* stream, bool starts,
                 bool ends) {
  static thread_local Scratch scratch;
  Carver sizes(nullptr);
  Workspace<Number>(sizes, layers, count, step);
  Carver carver(scratch.at_least(sizes.used));
  const Workspace<Number> space(carver, layers, count, step);
  for (int64_t i = 0; i < count; i++)
    compute(layers[i], i < count - 1 ? layers + i + 1 : nullptr, step, space, x, stream, starts && i == 0, ends && i == count - 1);
}

}  // namespace

// Compute `count` layers. On entry and on return, x [tokens, hidden] is the pending addition to the residual stream.
// half: activations are bfloat16, else float. starts: the first layer copies x to `stream` instead of adding x. ends: if
// step->sampled > 0, the last layer computes outputs for the sampled tokens alone, which become the first rows of x and
// `stream`.
INFD_KERNEL(stack)
(int64_t half, const StackLayer* layers, int64_t count, const StackStep* step, void* x, void* stream, int64_t starts,
 int64_t ends) {
  if (half)
    compute_all(layers, count, *step, typed<bf16>(x), typed<bf16>(stream), starts, ends);
  else
    compute_all(layers, count, *step, typed<float>(x), typed<float>(stream), starts, ends);
}
