// The layers of an encoder in one call, without returning to Python.
//
// The call computes the same operations as the layers of models/encoder.py. Additions to the residual stream are fused
// with the norms that follow them, row by row, so that a row stays in the CPU's cache.
//
// If the step has enough tokens, a team of threads divides them: each thread computes all layers for its own tokens. So
// activations stay in its core's cache, and threads wait for each other twice a layer, around attention. Otherwise one
// thread goes from kernel to kernel, and others help in each: with a step of 32 tokens a quarter of the time was lost in
// passing activations from core to core where these are far apart.

#include "encoder.h"

#include "layers.h"
#include "scratch.h"
#include "sharing.h"
#include "tokens.h"

INFD_KERNEL(attention_of_team)(const AttentionStep* step, const AttentionLayer* layer, int64_t* taken);

namespace {

// Each thread of a team reads all weights, about at the same time as the others. With fewer tokens for each thread than
// this, reading takes longer than multiplying: if the weights fit a cache that threads share, and if they do not.
constexpr int64_t LEAST_TOKENS = 8, LEAST_TOKENS_OF_MANY_WEIGHTS = 16;
constexpr int64_t MANY_WEIGHTS = 1 << 24;
constexpr int64_t MOST_THREADS = 8;  // the cores of more seldom share a cache

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

// out = activation(x)
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

// Rows x [tokens, size or 2 * size] to out [tokens, size]. enough: see enough_elements.
template <class Function, class Number>
void activate_rows(const Number* x, Number* out, int64_t tokens, int64_t size, int64_t gated, int64_t enough) {
  const int64_t stride = gated ? 2 * size : size;
  for_each(tokens, tokens * size > enough, [=](int64_t t) {
    const Number* row = x + t * stride;
    if (gated)
      gate<Function>(gated == 1 ? row : row + size, gated == 1 ? row + size : row, out + t * size, size);
    else
      apply<Function>(row, out + t * size, size);
  });
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

// The tokens of a step that this thread computes: all of them, or its part of them as one of a team.
struct Part {
  int64_t first, tokens;
  const int64_t* positions;  // of its tokens
  bool in_team;

  // Wait until the whole team has come here.
  void meet() const {
#pragma omp barrier
  }
};

// stream += x, unless x is null; out = the norm of `stream`. If out is null, only add; out may be `stream`.
template <class Number>
void add_norm(const EncoderNorm& norm, const Number* x, Number* stream, Number* out, int64_t tokens, int64_t size,
              int64_t enough) {
  for_each(tokens, tokens * size > enough, [=, &norm](int64_t t) {
    Number* row = stream + t * size;
    if (x) add(x + t * size, row, row, size);
    if (out) norm_row(norm, row, out + t * size, size);
  });
}

struct Sizes {
  int64_t qkv = 0, attended = 0, up = 0, gated = 0;

  Sizes(const EncoderLayer* layers, int64_t count) {
    for (const EncoderLayer* layer = layers; layer < layers + count; layer++) {
      qkv = larger(qkv, layer->qkv.outputs);
      attended = larger(attended, layer->output.inputs);
      up = larger(up, layer->up.outputs);
      gated = larger(gated, layer->down.inputs);
    }
  }
};

// Attention's inputs and outputs, of all tokens; and, by layer, how many of its tasks a team has taken.
template <class Number>
struct Heads {
  Number *qkv, *attended;
  int64_t* taken;

  Heads(Carver& carver, const Sizes& sizes, int64_t layers, int64_t tokens)
      : qkv(carver.take<Number>(tokens * sizes.qkv)),
        attended(carver.take<Number>(tokens * sizes.attended)),
        taken(carver.take<int64_t>(layers)) {}
};

// The other intermediate results of a layer, of a part of the tokens.
template <class Number>
struct Workspace {
  Number *normed, *rounded, *up, *gated, *added;

  Workspace(Carver& carver, const Sizes& sizes, int64_t tokens, int64_t hidden)
      : normed(carver.take<Number>(tokens * hidden)),
        rounded(carver.take<Number>(tokens * hidden)),
        up(carver.take<Number>(tokens * sizes.up)),
        gated(carver.take<Number>(tokens * sizes.gated)),
        added(carver.take<Number>(tokens * hidden)) {}
};

// Rotate q and k in place.
template <class Number>
void rotate_heads(const EncoderLayer& layer, const Part& part, Number* qkv, int64_t enough) {
  const Rotation rotate{layer.turned, false};
  for_each(part.tokens, part.tokens * layer.qkv.outputs > enough, [=, &layer, &part](int64_t t) {
    Number* head = qkv + t * layer.qkv.outputs;
    const float* angles = layer.rope + part.positions[t] * layer.turned;
    for (int64_t i = 0; i < layer.heads + layer.kv_heads; i++, head += layer.size) rotate(head, angles, head, layer.size);
  });
}

// Attend the queries of all tokens. awake: see worth_sharing. taken: of the layer.
template <class Number>
void attend(const EncoderLayer& layer, const EncoderStep& step, const Heads<Number>& heads, const Part& part, bool awake,
            int64_t* taken) {
  const int64_t stride = layer.qkv.outputs, size = layer.size;
  const Number* k = heads.qkv + layer.heads * size;
  AttentionLayer attention = {};
  attention.half = HALF<Number>;
  attention.heads = layer.heads, attention.kv_heads = layer.kv_heads, attention.size = size;
  attention.q = heads.qkv, attention.q_stride = stride;
  attention.k = k, attention.v = k + layer.kv_heads * size, attention.kv_stride = stride;
  attention.out = heads.attended, attention.scale = layer.scale;
  attention.bias = layer.bias, attention.furthest = layer.furthest;
  attention.awake = awake;
  if (part.in_team)
    INFD_HERE(attention_of_team)(step.attention[layer.reach], &attention, taken);
  else
    INFD_HERE(attention)(step.attention[layer.reach], &attention);
}

// x: of the part's tokens. taken: of the layer.
template <class Number>
void compute(const EncoderLayer& layer, const EncoderStep& step, const Part& part, const Heads<Number>& heads,
             const Workspace<Number>& space, Number* x, int64_t* taken) {
  const int64_t tokens = part.tokens, hidden = step.hidden;
  const bool awake = worth_sharing(tokens, layer.qkv.outputs, layer.qkv.inputs, false);
  const int64_t enough = enough_elements(awake);
  Number* qkv = heads.qkv + part.first * layer.qkv.outputs;
  Number* attended = heads.attended + part.first * layer.output.inputs;
  const Number* input = x;
  if (layer.normed_first && layer.attention_norm.weight) {
    add_norm<Number>(layer.attention_norm, nullptr, x, space.normed, tokens, hidden, enough);
    input = space.normed;
  }
  multiply(layer.qkv, input, space.rounded, qkv, tokens, awake);
  if (layer.rope) rotate_heads(layer, part, qkv, enough);
  part.meet();
  attend(layer, step, heads, part, awake, taken);
  part.meet();
  multiply(layer.output, attended, attended, space.added, tokens, awake);

  add_norm(layer.normed_first ? layer.mlp_norm : layer.attention_norm, space.added, x, layer.normed_first ? space.normed : x,
           tokens, hidden, enough);
  input = layer.normed_first ? space.normed : x;
  multiply(layer.up, input, space.rounded, space.up, tokens, awake);
  activate(layer.activation, space.up, space.gated, tokens, layer.down.inputs, layer.gated, enough);
  multiply(layer.down, space.gated, space.gated, space.added, tokens, awake);
  add_norm<Number>(layer.mlp_norm, space.added, x, layer.normed_first ? nullptr : x, tokens, hidden, enough);
}

// x = the sum of a row of each table, each addition rounded; then its norm. x: of the part's tokens.
template <class Number>
void embed(const EncoderEmbeddings& embeddings, const Part& part, Number* x, int64_t size) {
  for_each(part.tokens, part.tokens * size > enough_elements(false), [=, &embeddings, &part](int64_t t) {
    Number* sum = x + t * size;
    for (int64_t i = 0; i < embeddings.count; i++) {
      const EncoderTable& table = embeddings.tables[i];
      const int64_t row = table.index ? table.index[part.first + t] : 0;
      if (row < 0 || row >= table.rows) {
        for (int64_t j = 0; j < size; j++) set(sum + j, NAN);
      } else if (const Number* numbers = typed<Number>(table.numbers) + row * size; i == 0) {
        memcpy(sum, numbers, size * sizeof(Number));
      } else {
        add(numbers, sum, sum, size);
      }
    }
    if (embeddings.norm.weight) norm_row(embeddings.norm, sum, sum, size);
  });
}

int64_t weights_of(const StackProduct& product) { return product.outputs * product.inputs; }

// Whether a team divides the tokens.
bool divides_tokens(const EncoderLayer* layers, int64_t count, int64_t tokens) {
  const int64_t threads = omp_get_max_threads();
  int64_t weights = 0;
  for (const EncoderLayer* layer = layers; layer < layers + count; layer++)
    weights += weights_of(layer->qkv) + weights_of(layer->output) + weights_of(layer->up) + weights_of(layer->down);
  const int64_t least = weights > MANY_WEIGHTS ? LEAST_TOKENS_OF_MANY_WEIGHTS : LEAST_TOKENS;
  return threads > 1 && threads <= MOST_THREADS && tokens >= threads * least && worth_sharing(tokens, weights, 1, false);
}

template <class Number>
void compute_part(const EncoderEmbeddings* embeddings, const EncoderLayer* layers, int64_t count, const EncoderStep& step,
                  const Sizes& sizes, const Part& part, const Heads<Number>& heads, Number* x) {
  static thread_local Scratch scratch;
  Carver bytes(nullptr);
  Workspace<Number>(bytes, sizes, part.tokens, step.hidden);
  Carver carver(scratch.at_least(bytes.used));
  const Workspace<Number> space(carver, sizes, part.tokens, step.hidden);
  x += part.first * step.hidden;
  if (embeddings) embed(*embeddings, part, x, step.hidden);
  for (int64_t i = 0; i < count; i++) compute(layers[i], step, part, heads, space, x, heads.taken + i);
}

template <class Number>
void compute_all(const EncoderEmbeddings* embeddings, const EncoderLayer* layers, int64_t count, const EncoderStep& step,
                 Number* x) {
  static thread_local Scratch scratch;
  const Sizes sizes(layers, count);
  Carver bytes(nullptr);
  Heads<Number>(bytes, sizes, count, step.tokens);
  Carver carver(scratch.at_least(bytes.used));
  const Heads<Number> heads(carver, sizes, count, step.tokens);
  memset(heads.taken, 0, count * sizeof *heads.taken);
  const bool divided = divides_tokens(layers, count, step.tokens);
  on_threads(divided, [&] {
    const int64_t threads = divided ? omp_get_num_threads() : 1, thread = divided ? omp_get_thread_num() : 0;
    const int64_t first = step.tokens * thread / threads, end = step.tokens * (thread + 1) / threads;
    const Part part{first, end - first, step.positions + first, threads > 1};
    compute_part(embeddings, layers, count, step, sizes, part, heads, x);
  });
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
