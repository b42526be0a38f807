// Products with a matrix of int4 weights in panels; algorithm in products.h, layout in nibbles.h.
//
// The rows of x are quantized to int8 first, in groups of 32 with one scale each, which loses about as much precision
// as rounding to bfloat16. Sums over a group are exact integers; the groups' sums are accumulated in float32. Weights
// are stored and multiplied with 8 added; to compensate, each integer sum starts at -8 times the sum of the group's
// inputs.

#include "nibbles.h"
#include "products.h"
#include "quantized.h"
#include "scratch.h"

namespace {

// Multiply unsigned bytes (weights) with signed bytes (inputs), and add four products to each lane of the sums.
#if defined(__AVX512BW__)
inline Ints ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints words_at(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Ints lower(Ints words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
inline Ints upper(Ints words) { return lower(_mm512_srli_epi16(words, 4)); }
inline Vec floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints add_products(Ints sums, Ints weights, Ints inputs) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sums, weights, inputs);
#else
  // The sum of two products of a 4-bit with an 8-bit integer fits 16 bits.
  const Ints pairs = _mm512_maddubs_epi16(weights, inputs);
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
#else
inline Ints ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints words_at(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints lower(Ints words) { return _mm256_and_si256(words, _mm256_set1_epi8(15)); }
inline Ints upper(Ints words) { return lower(_mm256_srli_epi16(words, 4)); }
inline Vec floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints add_products(Ints sums, Ints weights, Ints inputs) {
  const Ints pairs = _mm256_maddubs_epi16(weights, inputs);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

// A group of a row's inputs, quantized, for the product with one step of a panel.
struct Inputs {
  uint8_t numbers[GROUP];
  float scale;
  int32_t start;  // initial value of the sum of products

  int32_t quad(int64_t i) const {
    int32_t quad;
    memcpy(&quad, numbers + 4 * i, sizeof quad);
    return quad;
  }

  template <class Number>
  void fill(const Number* x, int64_t count) {
    memset(numbers, 0, sizeof numbers);
    scale = scale_of(x, count);
    start = -ZERO * quantize(x, count, scale, numbers, 0);
  }
};

struct Nibbles {
  static constexpr int64_t HEADER = 0, STEP = ::STEP;

  const Inputs* inputs;
  int64_t stride;  // between rows

  Nibbles from(int64_t row, int64_t at) const { return {inputs + row * stride + at, stride}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }
};

template <int ROWS>
struct Group<Nibbles, ROWS> {
  static void multiply(const Nibbles& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    constexpr int VECTORS = ROWS > 4 ? 2 : 4;  // weights and sums together fit the vector registers
    for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
      for (int64_t at = 0; at < stretch.steps; at++) {
        if (first == 0) ahead.fetch();
        const uint32_t* step = stretch.words + at * STEP;
        const uint32_t* lines = step + SCALES + first;
        const Inputs* inputs = x.inputs + at;
        Ints sum[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = ints(inputs[i * x.stride].start);
        for (int64_t line = 0; line < LINES; line++) {
          Ints w[VECTORS];
          const auto add = [&](int64_t quad) {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
              const Ints input = ints(inputs[i * x.stride].quad(quad));
#pragma GCC unroll 8
              for (int j = 0; j < VECTORS; j++) sum[i][j] = add_products(sum[i][j], w[j], input);
            }
          };
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) w[j] = lower(words_at(lines + line * PANEL + j * WIDTH));
          add(2 * line);
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) w[j] = upper(words_at(lines + line * PANEL + j * WIDTH));
          add(2 * line + 1);
        }
        const bool begins = stretch.header != nullptr && at == 0;
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
          const Vec scale = load(reinterpret_cast<const bf16*>(step) + first + j * WIDTH);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++) {
            float* own = sums + i * PANEL + first + j * WIDTH;
            const Vec before = begins ? set(0.0f) : load(own);
            store(own, fma(floats(sum[i][j]), scale * set(inputs[i * x.stride].scale), before));
          }
        }
      }
    }
  }
};

thread_local Scratch scratch;

template <class Number>
void multiply(const Number* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
              const Number* bias, void* out, int64_t out_stride, int64_t wide) {
  const int64_t groups = groups_of(inputs);
  Inputs* own = reinterpret_cast<Inputs*>(scratch.at_least(rows * groups * sizeof(Inputs)));
  const Product<Nibbles> product = {{own, groups}, rows, weights, outputs, groups, false, bias, out, out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs);
  Division<Nibbles> division(product, shared);
#pragma omp parallel if (shared)
  {
#pragma omp for
    for (int64_t i = 0; i < rows; i++)
      for (int64_t group = 0; group < groups; group++) {
        const int64_t left = inputs - group * GROUP;
        own[i * groups + group].fill(x + i * x_stride + group * GROUP, left < GROUP ? left : GROUP);
      }
    division.compute_share();
  }
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] times int4 weights, transposed, plus bias.
INFD_KERNEL(multiply_int4_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide);
}

INFD_KERNEL(multiply_int4_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide);
}
