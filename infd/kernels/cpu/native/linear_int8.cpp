// Products with a matrix of int8 weights in panels; algorithm in products.h.
//
// The rows of x are quantized to int8 first, with one scale each, or with the scale and zero point that a checkpoint
// stores. Sums are exact integers: after the quantization, nothing is rounded until the sums are converted to float.

#include "amx.h"
#include "inputs.h"
#include "products.h"
#include "quantized.h"
#include "scratch.h"

namespace {

#if defined(__AVX512VNNI__)
using Word = uint32_t;
inline void spread(uint8_t*, int64_t) {}
#else
// The first and third, and the second and fourth, input, in 16 bits each: the instruction that adds two products of bytes
// would saturate its 16-bit sums.
struct Word {
  uint32_t even, odd;
};

// Replace `quads` quads of bytes at the end of a row of Words by the Words.
inline void spread(uint8_t* row, int64_t quads) {
  for (int64_t i = 0; i < quads; i++) {
    int8_t four[4];
    memcpy(four, row + quads * (sizeof(Word) - sizeof four) + i * sizeof four, sizeof four);
    const int16_t halves[4] = {four[0], four[2], four[1], four[3]};
    memcpy(row + i * sizeof(Word), halves, sizeof halves);
  }
}
#endif

// A word is four consecutive inputs.
struct Quads {
  static constexpr int64_t HEADER = ::HEADER;
  static constexpr bool ONE_LINE = true, TILES = false, OPENS = false, HALVES = false;

  const uint8_t* bytes;
  int64_t stride;
  int64_t to_scale;  // bytes from a row to its scale
  int32_t zero;      // the integer that represents 0 in all rows

  static constexpr int64_t step() { return PANEL; }
  Word word(int64_t row, int64_t at) const {
    Word word;
    memcpy(&word, bytes + row * stride + at * sizeof word, sizeof word);
    return word;
  }
  Quads from(int64_t row, int64_t at) const {
    return {bytes + row * stride + at * int64_t{sizeof(Word)}, stride, to_scale, zero};
  }
  Vec value(Vec sums, int64_t row, const uint32_t* header) const {
    if (zero != 0) sums = plus_offsets(sums, header + PANEL, zero);
    float scale;
    memcpy(&scale, bytes + row * stride + to_scale, sizeof scale);
    return to_floats(sums) * set(scale) * load(reinterpret_cast<const float*>(header));
  }

#if defined(__AMX_BF16__)
  const char* address(int64_t row) const { return reinterpret_cast<const char*>(bytes + row * stride); }
  static const uint32_t* start_line(const uint32_t* header) { return header + PANEL; }
  template <int SUMS, int ROWS, int LINES>
  static void add_tiles() {
    add_quads<SUMS, ROWS, LINES>();
  }
#endif

#if defined(__AVX512VNNI__)
  static constexpr uint8_t FLIP = OFFSET;
  using Weights = __m512i;
  using Input = __m512i;

  static Vec start(const uint32_t* header) { return load(reinterpret_cast<const float*>(header + PANEL)); }
  static Weights weights(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static Input input(uint32_t quad) { return _mm512_set1_epi32(static_cast<int>(quad)); }
  static Vec add(Vec sums, const Weights& w, const Input& x) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sums), x, w));
  }
#else
  static constexpr uint8_t FLIP = 0;
  static Vec start(const uint32_t*) { return set(0.0f); }
#if defined(__AVX512BW__)
  struct Weights {
    __m512i even, odd;
  };
  static Weights split(__m512i quads) {
    return {_mm512_srai_epi16(_mm512_slli_epi16(quads, 8), 8), _mm512_srai_epi16(quads, 8)};
  }
  static Weights weights(const uint32_t* p) { return split(_mm512_loadu_si512(p)); }
  static Weights input(Word x) { return {_mm512_set1_epi32(static_cast<int>(x.even)), _mm512_set1_epi32(static_cast<int>(x.odd))}; }
  static Vec add(Vec sums, const Weights& w, const Weights& x) {
    const __m512i products = _mm512_add_epi32(_mm512_madd_epi16(w.even, x.even), _mm512_madd_epi16(w.odd, x.odd));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(sums), products));
  }
#else
  struct Weights {
    __m256i even, odd;
  };
  static Weights split(__m256i quads) {
    return {_mm256_srai_epi16(_mm256_slli_epi16(quads, 8), 8), _mm256_srai_epi16(quads, 8)};
  }
  static Weights weights(const uint32_t* p) { return split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Weights input(Word x) { return {_mm256_set1_epi32(static_cast<int>(x.even)), _mm256_set1_epi32(static_cast<int>(x.odd))}; }
  static Vec add(Vec sums, const Weights& w, const Weights& x) {
    const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(w.even, x.even), _mm256_madd_epi16(w.odd, x.odd));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(sums), products));
  }
#endif
  using Input = Weights;
#endif
};

#if defined(__AMX_BF16__)
using Kind = Blocks<Quads>;
Kind kind_of(const Quads& x, int64_t quads) { return {x, quads * int64_t{sizeof(Word)}}; }
int64_t steps_of(int64_t quads) { return tile_steps(quads); }
#else
using Kind = Quads;
Kind kind_of(const Quads& x, int64_t) { return x; }
int64_t steps_of(int64_t quads) { return quads; }
#endif

// How rows of `inputs` numbers are quantized.
//
// layout: the address of an InputRounding, or 0
struct Rounding {
  const InputRounding* stored;
  float zero;
  int64_t inputs, quads;

  Rounding(int64_t layout, int64_t inputs)
      : stored(reinterpret_cast<const InputRounding*>(layout)),
        zero(stored != nullptr && stored->zero != nullptr ? *stored->zero : 0),
        inputs(inputs),
        quads(quads_of(inputs)) {}

  // Bytes of a quantized row: its words, then its scale, in padding. A stride of whole pages would map all rows to the same
  // sets of the L1 cache.
  int64_t to_scale() const { return quads * int64_t{sizeof(Word)}; }
  int64_t stride() const { return to_scale() + 64; }
  // The product of quantized rows.
  Product<Kind> product(const uint8_t* bytes, int64_t rows, const uint32_t* weights, int64_t outputs, Bias bias, void* out,
                        int64_t out_stride, int64_t wide) const {
    const Quads x = {bytes, stride(), to_scale(), static_cast<int32_t>(zero)};
    const int64_t panel = HEADER + quads * PANEL;
    return {kind_of(x, quads), rows, weights, outputs, steps_of(quads), false, bias, out, out_stride, wide != 0, panel};
  }

  template <class Number>
  void quantize_row(const Number* x, uint8_t* row) const {
    uint8_t* to = row + quads * (sizeof(Word) - 4);
    float scale = scale_of(x, inputs);
    if (stored != nullptr) {
      scale = *stored->scale + 0 * scale;  // NaN if an input is not finite
      quantize_stored(x, inputs, *stored->scale, zero, to, Quads::FLIP);
    } else {
      quantize(x, inputs, scale, to, Quads::FLIP);
    }
    spread(row, quads);
    memcpy(row + to_scale(), &scale, sizeof scale);
  }
};

thread_local Scratch scratch;

template <class Number>
void multiply(const Number* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
              const Number* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, const Neighbors* neighbors) {
  const Rounding rounding(layout, inputs);
  const int64_t stride = rounding.stride();
  uint8_t* bytes = reinterpret_cast<uint8_t*>(scratch.at_least(rows * stride));
  const Product<Kind> product = rounding.product(bytes, rows, weights, outputs, bias, out, out_stride, wide);
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Kind> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  {
#pragma omp for
    for (int64_t i = 0; i < rows; i++) rounding.quantize_row(x + i * x_stride, bytes + i * stride);
    division.compute_share();
  }
}

template <class Number>
void quantize_rows(const Number* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* quantized, int64_t layout) {
  const Rounding rounding(layout, inputs);
  for (int64_t i = 0; i < rows; i++) rounding.quantize_row(x + i * x_stride, quantized + i * rounding.stride());
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] times int8 weights, transposed, plus bias.
// layout: the address of an InputRounding with a stored scale; 0: each row has a scale of its own.
INFD_KERNEL(multiply_int8_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, const Neighbors* neighbors) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide, layout, neighbors);
}

INFD_KERNEL(multiply_int8_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, const Neighbors* neighbors) {
  multiply(x, x_stride, rows, weights, outputs, inputs, bias, out, out_stride, wide, layout, neighbors);
}

INFD_KERNEL(quantize_int8_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(quantize_int8_float)
(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(multiply_quantized_int8)
(const uint8_t* quantized, const int64_t* chosen, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const void* bias, int64_t half, void* out, int64_t out_stride, int64_t wide, int64_t layout) {
  const Rounding rounding(layout, inputs);
  const int64_t stride = rounding.stride();
  uint8_t* bytes = reinterpret_cast<uint8_t*>(scratch.at_least(rows * stride));
  for (int64_t i = 0; i < rows; i++) memcpy(bytes + i * stride, quantized + chosen[i] * stride, stride);
  const Product<Kind> product = rounding.product(bytes, rows, weights, outputs, Bias(bias, half != 0), out, out_stride, wide);
  Division<Kind>(product, false).compute_share();
}

// *bytes = the size of a quantized row.
INFD_KERNEL(quantized_bytes_int8)(int64_t inputs, int64_t layout, int64_t* bytes) { *bytes = Rounding(layout, inputs).stride(); }
