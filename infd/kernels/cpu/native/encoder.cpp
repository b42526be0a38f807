// The layers of an encoder in one call, without returning to Python.
//
// The call computes the same operations as the layers of models/encoder.py. Additions to the residual stream are fused
// with the norms that follow them, row by row, so that a row stays in the CPU's cache.

#include "encoder.h"

#include "layers.h"
#include "scratch.h"
#include "sharing.h"
#include "tokens.h"

namespace {

// erf(x), with an absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Vec error_function(Vec x) {
  const Vec size = absolute(x), t = set(1.0f) / fma(size, set(0.3275911f), set(1.0f));
  Vec p = set(1.061405429f);
  p = fma(p, t, set(-1.453152027f));
  p = fma(p, t, set(1.421413741f));
  p = fma(p, t, set(-0.284496736f));
  p = fma(p, t, set(0.254829592f));
  const Vec value = set(1.0f) - p * t * exponential(set(0) - size * size);
  return choose_below(max(set(0), x), 1e-30f, set(0) - value, value);  // for x <= 0 the first
}

// x * P(X <= x) for a normal variable X.
template <class Number>
struct ExactGelu {
  Vec operator()(Vec x) const { return x * set(0.5f) * (set(1) + error_function(x * set(0.70710678f))); }
};

// For results in bfloat16: with an absolute error below 2e-5, and a relative one below 1e-4 for |x| < 1, a twentieth of
// bfloat16's. It is max(0, x) - t * P(X > t), where t = |x|; the probability is (4.5 - t) times the best polynomial, 0 from
// 4.5 on.
template <>
struct ExactGelu<bf16> {
  Vec operator()(Vec x) const {
    const Vec t = min(set(4.5f), absolute(x));
    Vec p = set(1.3317721e-5f);
    p = fma(p, t, set(-2.551670e-4f));
    p = fma(p, t, set(1.9242000e-3f));
    p = fma(p, t, set(-6.8109440e-3f));
    p = fma(p, t, set(8.8936590e-3f));
    p = fma(p, t, set(7.4198716e-3f));
    p = fma(p, t, set(-1.2838615e-2f));
    p = fma(p, t, set(-6.4133580e-2f));
    p = fma(p, t, set(1.1111456e-1f));
    return max(set(0), x) - t * (set(4.5f) - t) * p;
  }
};
struct Relu {
  Vec operator()(Vec x) const { return max(set(0), x); }
};

enum Activation { EXACT_GELU, TANH_GELU, RELU, SILU };

// out = activation(x); out may be x.
template <class Function, class Number>
void apply(const Number* x, Number* out, int64_t size) {
  const Function function;
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(out + i, function(load(x + i)));
  if (i < size) {
    Number last[WIDTH];
    store(last, function(load_first(x + i, size - i)));
    memcpy(out + i, last, (size - i) * sizeof(Number));
  }
}

// Rows x [tokens, size or 2 * size] to out [tokens, size], which may be x unless gated. enough: see enough_elements.
template <class Function, class Number>
void activate_rows(const Number* x, Number* out, int64_t tokens, int64_t size, int64_t gated, int64_t enough) {
  const int64_t stride = gated ? 2 * size : size;
#pragma omp parallel for if (tokens * size > enough)
  for (int64_t t = 0; t < tokens; t++) {
    const Number* row = x + t * stride;
    if (gated)
      gate<Function>(gated == 1 ? row : row + size, gated == 1 ? row + size : row, out + t * size, size);
    else
      apply<Function>(row, out + t * size, size);
  }
}

template <class Number>
void activate(int64_t activation, const Number* x, Number* out, int64_t tokens, int64_t size, int64_t gated,
              int64_t enough) {
  switch (activation) {
    case EXACT_GELU: return activate_rows<ExactGelu<Number>>(x, out, tokens, size, gated, enough);
    case TANH_GELU: return activate_rows<Gelu>(x, out, tokens, size, gated, enough);
    case RELU: return activate_rows<Relu>(x, out, tokens, size, gated, enough);
    case SILU: return activate_rows<Silu>(x, out, tokens, size, gated, enough);
  }
}

// LayerNorm or RMSNorm of a row; x may be out.
template <class Number>
void norm_row(const EncoderNorm& norm, const Number* x, Number* out, int64_t size) {
  const Number *weight = typed<Number>(norm.weight), *bias = typed<Number>(norm.bias);
  if (norm.centered)
    LayerNorm<Number>{weight, bias, norm.eps}(x, out, size);
  else
    Norm<Number>{weight, norm.eps, 0}(x, out, size);
}

// stream += x, unless x is null; out = the norm of `stream`. If out is null, only add; out may be `stream`.
template <class Number>
void add_norm(const EncoderNorm& norm, const Number* x, Number* stream, Number* out, const EncoderStep& step,
              int64_t enough) {
  const int64_t size = step.hidden;
#pragma omp parallel for if (step.tokens * size > enough)
  for (int64_t t = 0; t < step.tokens; t++) {
    Number* row = stream + t * size;
    if (x) add(x + t * size, row, row, size);
    if (out) norm_row(norm, row, out + t * size, size);
  }
}

// The intermediate results of a layer, in scratch memory.
template <class Number>
struct Workspace {
  Number *normed, *rounded, *qkv, *attended, *up, *gated, *added;

  Workspace(Carver& carver, const EncoderLayer* layers, int64_t count, const EncoderStep& step) {
    int64_t qkv_size = 0, attended_size = 0, up_size = 0, gated_size = 0;
    for (const EncoderLayer* layer = layers; layer < layers + count; layer++) {
      qkv_size = larger(qkv_size, layer->qkv.outputs);
      attended_size = larger(attended_size, layer->output.inputs);
      up_size = larger(up_size, layer->up.outputs);
      if (layer->gated) gated_size = larger(gated_size, layer->down.inputs);
    }
    normed = carver.take<Number>(step.tokens * step.hidden);
    rounded = carver.take<Number>(step.tokens * step.hidden);
    qkv = carver.take<Number>(step.tokens * qkv_size);
    attended = carver.take<Number>(step.tokens * attended_size);
    up = carver.take<Number>(step.tokens * up_size);
    gated = carver.take<Number>(step.tokens * gated_size);
    added = carver.take<Number>(step.tokens * step.hidden);
  }
};

// Rotate `count` heads of each token in place. tokens: [rows], whose positions the rows have; null: all tokens.
template <class Number>
void rotate_heads(const EncoderLayer& layer, const EncoderStep& step, Number* heads, int64_t count, const int64_t* tokens,
                  int64_t rows, int64_t enough) {
  const Rotation rotate{layer.turned, false};
#pragma omp parallel for if (rows * count * layer.size > enough)
  for (int64_t t = 0; t < rows; t++) {
    Number* head = heads + t * layer.qkv.outputs;
    const float* angles = layer.rope + step.positions[tokens ? tokens[t] : t] * layer.turned;
    for (int64_t i = 0; i < count; i++, head += layer.size) rotate(head, angles, head, layer.size);
  }
}

// Compute q, k and v of all tokens, rotated.
template <class Number>
void project(const EncoderLayer& layer, const EncoderStep& step, const Workspace<Number>& space, const Number* input,
             bool awake) {
  multiply(layer.qkv, input, space.rounded, space.qkv, step.tokens, awake, &layer.output);
  if (layer.rope)
    rotate_heads(layer, step, space.qkv, layer.heads + layer.kv_heads, nullptr, step.tokens, enough_elements(awake));
}

// The same, but q of the sampled tokens alone, in the first rows.
template <class Number>
void project_sampled(const EncoderLayer& layer, const EncoderStep& step, const Workspace<Number>& space, const Number* input,
                     bool awake) {
  const int64_t stride = layer.qkv.outputs, width = layer.heads * layer.size, enough = enough_elements(awake);
  Number* k = space.qkv + width;
  if (layer.q.multiply) {
    Number* chosen = space.added;
    for (int64_t i = 0; i < step.sampled; i++)
      memcpy(chosen + i * step.hidden, input + step.sampled_tokens[i] * step.hidden, step.hidden * sizeof(Number));
    multiply(layer.kv, input, space.rounded, k, stride, step.tokens, awake);
    multiply(layer.q, chosen, chosen, space.qkv, stride, step.sampled, awake);
  } else {
    multiply(layer.qkv, input, space.rounded, space.qkv, step.tokens, awake);
    keep_rows(space.qkv, stride, width, step.sampled_tokens, step.sampled);
  }
  if (layer.rope) {
    rotate_heads(layer, step, space.qkv, layer.heads, step.sampled_tokens, step.sampled, enough);
    rotate_heads(layer, step, k, layer.kv_heads, nullptr, step.tokens, enough);
  }
}

// next: the layer that follows in this call; null: none, and if tokens are sampled, this layer computes these alone.
template <class Number>
void compute(const EncoderLayer& layer, const EncoderLayer* next, const EncoderStep& all, const Workspace<Number>& space,
             Number* x) {
  const bool awake = worth_sharing(all.tokens, layer.qkv.outputs, layer.qkv.inputs, false);
  const int64_t enough = enough_elements(awake);
  const Number* input = x;
  if (layer.normed_first && layer.attention_norm.weight) {
    add_norm<Number>(layer.attention_norm, nullptr, x, space.normed, all, enough);
    input = space.normed;
  }
  EncoderStep step = all;
  if (!next && all.sampled > 0) {
    project_sampled(layer, all, space, input, awake);
    keep_rows(x, all.hidden, all.hidden, all.sampled_tokens, all.sampled);
    step.tokens = all.sampled, step.attention = all.sampled_attention;
  } else {
    project(layer, all, space, input, awake);
  }
  const int64_t stride = layer.qkv.outputs, size = layer.size;
  const Number* k = space.qkv + layer.heads * size;
  AttentionLayer attention = {};
  attention.half = HALF<Number>;
  attention.heads = layer.heads, attention.kv_heads = layer.kv_heads, attention.size = size;
  attention.q = space.qkv, attention.q_stride = stride;
  attention.k = k, attention.v = k + layer.kv_heads * size, attention.kv_stride = stride;
  attention.out = space.attended, attention.scale = layer.scale;
  attention.bias = layer.bias, attention.furthest = layer.furthest;
  attention.awake = awake;
  INFD_HERE(attention)(step.attention[layer.reach], &attention);
  multiply(layer.output, space.attended, space.attended, space.added, step.tokens, awake, &layer.up);

  add_norm(layer.normed_first ? layer.mlp_norm : layer.attention_norm, space.added, x, layer.normed_first ? space.normed : x,
           step, enough);
  input = layer.normed_first ? space.normed : x;
  multiply(layer.up, input, space.rounded, space.up, step.tokens, awake, &layer.down);
  Number* activated = layer.gated ? space.gated : space.up;
  activate(layer.activation, space.up, activated, step.tokens, layer.down.inputs, layer.gated, enough);
  multiply(layer.down, activated, activated, space.added, step.tokens, awake, next ? &next->qkv : nullptr);
  add_norm<Number>(layer.mlp_norm, space.added, x, layer.normed_first ? nullptr : x, step, enough);
}

// x = the sum of a row of each table, each addition rounded; then its norm.
template <class Number>
void embed(const EncoderEmbeddings& embeddings, const EncoderStep& step, Number* x) {
  const int64_t size = step.hidden;
#pragma omp parallel for if (step.tokens * size > enough_elements(false))
  for (int64_t t = 0; t < step.tokens; t++) {
    Number* sum = x + t * size;
    for (int64_t i = 0; i < embeddings.count; i++) {
      const EncoderTable& table = embeddings.tables[i];
      const int64_t row = table.index ? table.index[t] : 0;
      if (row < 0 || row >= table.rows) {
        for (int64_t j = 0; j < size; j++) set(sum + j, NAN);
      } else if (const Number* numbers = typed<Number>(table.numbers) + row * size; i == 0) {
        memcpy(sum, numbers, size * sizeof(Number));
      } else {
        add(numbers, sum, sum, size);
      }
    }
    if (embeddings.norm.weight) norm_row(embeddings.norm, sum, sum, size);
  }
}

template <class Number>
void compute_all(const EncoderEmbeddings* embeddings, const EncoderLayer* layers, int64_t count, const EncoderStep& step,
                 Number* x) {
  static thread_local Scratch scratch;
  Carver sizes(nullptr);
  Workspace<Number>(sizes, layers, count, step);
  Carver carver(scratch.at_least(sizes.used));
  const Workspace<Number> space(carver, layers, count, step);
  if (embeddings) embed(*embeddings, step, x);
  for (int64_t i = 0; i < count; i++) compute(layers[i], i < count - 1 ? layers + i + 1 : nullptr, step, space, x);
}

}  // namespace

// Compute `count` layers on x [tokens, hidden], in place. embeddings: computes x first, or null. half: activations are
// bfloat16, else float.
INFD_KERNEL(encoder)
(int64_t half, const EncoderEmbeddings* embeddings, const EncoderLayer* layers, int64_t count, const EncoderStep* step,
 void* x) {
  if (half)
    compute_all(embeddings, layers, count, *step, typed<bf16>(x));
  else
    compute_all(embeddings, layers, count, *step, typed<float>(x));
}
