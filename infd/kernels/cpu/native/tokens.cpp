// The elementwise kernels: norms, rope, activations. half: tensors are bfloat16, else float.

#include "tokens.h"

namespace {

constexpr int64_t ENOUGH = 1 << 14;  // with more elements than this, waking other threads saves time

template <class Number>
void norm_rows(const void* x, int64_t stride, void* out, int64_t tokens, int64_t heads, int64_t size, const void* weight,
               float eps, float offset) {
  const Norm<Number> norm{typed<Number>(weight), eps, offset};
#pragma omp parallel for if (tokens * heads * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t head = 0; head < heads; head++)
      norm(typed<Number>(x) + t * stride + head * size, typed<Number>(out) + (t * heads + head) * size, size);
}

template <class Number>
void add_norm_rows(const void* x, const void* residual, void* stream, void* out, int64_t tokens, int64_t size,
                   const void* weight, float eps, float offset) {
  const Norm<Number> norm{typed<Number>(weight), eps, offset};
#pragma omp parallel for if (tokens * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++) {
    Number* sum = typed<Number>(stream) + t * size;
    add(typed<Number>(x) + t * size, typed<Number>(residual) + t * size, sum, size);
    norm(sum, typed<Number>(out) + t * size, size);
  }
}

template <class Number>
void center_rows(const void* x, void* out, int64_t tokens, int64_t size, const void* weight, const void* bias, float eps) {
  const LayerNorm<Number> norm{typed<Number>(weight), typed<Number>(bias), eps};
#pragma omp parallel for if (tokens * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++) norm(typed<Number>(x) + t * size, typed<Number>(out) + t * size, size);
}

template <class Number>
void rotate_rows(const void* x, int64_t stride, void* out, int64_t tokens, int64_t heads, int64_t size,
                 const int64_t* positions, const float* table, const Rotation& rotation) {
#pragma omp parallel for if (tokens * heads * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t head = 0; head < heads; head++)
      rotation(typed<Number>(x) + t * stride + head * size, table + positions[t] * rotation.turned,
               typed<Number>(out) + (t * heads + head) * size, size);
}

template <class Activation, class Number>
void gate_rows(const void* x, int64_t stride, void* out, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++) {
    const Number* row = typed<Number>(x) + t * stride;
    gate<Activation>(row, row + size, typed<Number>(out) + t * size, size);
  }
}

}  // namespace

// out [tokens, heads, size] = RMSNorm of x [tokens, heads, size], which has `stride` elements between tokens.
INFD_KERNEL(rms_norm)
(int64_t half, const void* x, int64_t stride, void* out, int64_t tokens, int64_t heads, int64_t size, const void* weight,
 float eps, float offset) {
  (half ? norm_rows<bf16> : norm_rows<float>)(x, stride, out, tokens, heads, size, weight, eps, offset);
}

// stream = x + residual; out = RMSNorm of stream; all [tokens, size]. Any two may be the same memory, except stream
// and out.
INFD_KERNEL(add_rms_norm)
(int64_t half, const void* x, const void* residual, void* stream, void* out, int64_t tokens, int64_t size,
 const void* weight, float eps, float offset) {
  (half ? add_norm_rows<bf16> : add_norm_rows<float>)(x, residual, stream, out, tokens, size, weight, eps, offset);
}

// out [tokens, size] = LayerNorm of x [tokens, size]. bias: or null.
INFD_KERNEL(layer_norm)
(int64_t half, const void* x, void* out, int64_t tokens, int64_t size, const void* weight, const void* bias, float eps) {
  (half ? center_rows<bf16> : center_rows<float>)(x, out, tokens, size, weight, bias, eps);
}

// out [tokens, heads, size] = x, which has `stride` elements between tokens, with the first `turned` elements of every
// head rotated by the angles in the rows of table [max_len, turned] at positions [tokens].
INFD_KERNEL(rope)
(int64_t half, const void* x, int64_t stride, void* out, int64_t tokens, int64_t heads, int64_t size,
 const int64_t* positions, const float* table, int64_t turned, int64_t interleaved) {
  const Rotation rotation{turned, interleaved != 0};
  (half ? rotate_rows<bf16> : rotate_rows<float>)(x, stride, out, tokens, heads, size, positions, table, rotation);
}

// out [tokens, size] = silu(x[:, :size]) * x[:, size:] for x [tokens, 2 * size], `stride` elements between rows.
INFD_KERNEL(silu_mul)(int64_t half, const void* x, int64_t stride, void* out, int64_t tokens, int64_t size) {
  (half ? gate_rows<Silu, bf16> : gate_rows<Silu, float>)(x, stride, out, tokens, size);
}

// Like silu_mul, with the tanh approximation of gelu.
INFD_KERNEL(gelu_tanh_mul)(int64_t half, const void* x, int64_t stride, void* out, int64_t tokens, int64_t size) {
  (half ? gate_rows<Gelu, bf16> : gate_rows<Gelu, float>)(x, stride, out, tokens, size);
}
