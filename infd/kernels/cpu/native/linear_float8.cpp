// Products with a matrix of fp8 weights in panels; algorithm in products.h, layout in float8.h.
//
// Weights become bfloat16 or float32, exactly, and are multiplied with bfloat16 inputs. The products of one scale's
// inputs are accumulated in float32; their sum is multiplied by the scale and added to the row's sum.

#include "float8.h"
#include "products.h"
#include "scratch.h"

namespace {

// A Decoder turns words of four weights into PARTS vectors. NaN becomes 480: placing sets its row's scales to NaN.
#if defined(__AVX512BF16__)
// A part is pairs of bfloat16: of inputs 0 and 2, and of inputs 1 and 3.
constexpr int PARTS = 2;
using Part = __m512i;
using Input = uint32_t;

#if defined(__AVX512VBMI__)
// bfloat16 of bytes without their signs: the upper and the lower bytes.
struct Tables {
  uint8_t upper[128] = {}, lower[128] = {};

  constexpr Tables() {
    for (int byte = 1; byte < 128; byte++) {
      int exponent = byte >> 3, fraction = byte & 7;
      if (exponent == 0)
        for (exponent = 1; fraction < 8; fraction *= 2) exponent--;
      const int bits = (exponent + BIAS) << 7 | (fraction & 7) << 4;
      upper[byte] = bits >> 8, lower[byte] = bits & 255;
    }
  }
};
alignas(64) constexpr Tables TABLES;

class Decoder {
 public:
  Decoder() {
    for (int i = 0; i < 2; i++) {
      lower_[i] = _mm512_load_si512(TABLES.lower + 64 * i), upper_[i] = _mm512_load_si512(TABLES.upper + 64 * i);
      asm("" : "+v"(lower_[i]), "+v"(upper_[i]));  // stay in registers, else each word would read them again
    }
  }
  void split(const uint32_t* words, Part* parts) const {
    const __m512i four = _mm512_loadu_si512(words), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], four, lower_[1]);
    const __m512i upper = _mm512_permutex2var_epi8(upper_[0], four, upper_[1]) | (four & sign);
    constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
    parts[0] = _mm512_mask_blend_epi8(ODD, lower, _mm512_slli_epi16(upper, 8));
    parts[1] = _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16(lower, 8), upper);
  }

 private:
  __m512i lower_[2], upper_[2];
};
#else
// bfloat16 of bytes in the lower halves of 16-bit lanes, whatever the upper halves are.
inline __m512i widened(__m512i bytes) {
  const __m512i size = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi16(0x7f0));
  const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(BIAS << 7));
  // bfloat16 of 0 to 7 times SUBNORMAL, selected by the lower five bits of a byte, which are below 8 where it counts.
  const __m512i small = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0,
                                                                 0, 0, 0, 0, 0, 0, 0));
  const __mmask32 subnormal = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(1 << 7));
  const __m512i number = _mm512_mask_permutexvar_epi16(normal, subnormal, bytes, small);
  // number | (bytes << 8 & 0x8000)
  return _mm512_ternarylogic_epi32(number, _mm512_slli_epi16(bytes, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);
}
struct Decoder {
  static void split(const uint32_t* words, Part* parts) {
    const __m512i four = _mm512_loadu_si512(words);
    parts[0] = widened(four), parts[1] = widened(_mm512_srli_epi16(four, 8));
  }
};
#endif
inline Part load_part(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void store_part(uint32_t* p, Part part) { _mm512_storeu_si512(p, part); }
inline Vec add(Vec sums, Part weights, Input pair) {
  return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)));
}
#else
// A part is floats of one input.
constexpr int PARTS = 4;
using Part = Vec;
using Input = float;

// A byte's exponent and fraction become a float's, whose exponent has another bias: the float is subnormal where the
// byte is. Multiplication by 2^BIAS corrects it.
struct Decoder {
  static void split(const uint32_t* words, Part* parts) {
    const Vec power = set(0x1p120f);
    static_assert(BIAS == 120);
#if defined(__AVX512BW__)
    const __m512i four = _mm512_loadu_si512(words), kept = _mm512_set1_epi32(static_cast<int>(0x87f00000));
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(four, 8), 4), odd = _mm512_srai_epi16(four, 4);
    const auto number = [&](__m512i upper) { return _mm512_castsi512_ps(_mm512_and_si512(upper, kept)) * power; };
    parts[0] = number(_mm512_slli_epi32(even, 16)), parts[1] = number(_mm512_slli_epi32(odd, 16));
#else
    const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
    const __m256i kept = _mm256_set1_epi32(static_cast<int>(0x87f00000));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 4), odd = _mm256_srai_epi16(four, 4);
    const auto number = [&](__m256i upper) { return _mm256_castsi256_ps(_mm256_and_si256(upper, kept)) * power; };
    parts[0] = number(_mm256_slli_epi32(even, 16)), parts[1] = number(_mm256_slli_epi32(odd, 16));
#endif
    parts[2] = number(even), parts[3] = number(odd);
  }
};
inline Part load_part(const uint32_t* p) { return load(reinterpret_cast<const float*>(p)); }
inline void store_part(uint32_t* p, Part part) { store(reinterpret_cast<float*>(p), part); }
inline Vec add(Vec sums, Part weights, Input x) { return fma(weights, set(x), sums); }
#endif

#if defined(__AVX512VBMI__)
// The registers that the other instructions take to decode are left for the sums of six rows and four vectors, but none
// for an input, which GCC would load into a register.
constexpr bool INPUTS_IN_MEMORY = true;
inline Vec add_from(Vec sums, Part weights, const Input* input) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*input));
  return sums;
}
#else
constexpr bool INPUTS_IN_MEMORY = false;
inline Vec add_from(Vec sums, Part weights, const Input* input) { return add(sums, weights, *input); }
#endif

struct Four {
  Input part[PARTS];
};

// OPENED: weights are already parts, the vectors of each word one after another. OPENING: products store them so.
enum Stage { CLOSED, OPENING, OPENED };

template <Stage STAGE>
struct Bytes {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = STAGE == CLOSED, FIRST_OPENS = true;
  using Opening = Bytes<OPENING>;
  using Opened = Bytes<OPENED>;

  const Four* inputs;
  int64_t stride;  // between rows
  Float8Layout layout;
  uint32_t* to = nullptr;  // where to store parts

  int64_t step() const { return STAGE == OPENED ? PANEL + layout.lines() * PARTS * PANEL : layout.step(); }
  bool prefetches() const { return false; }
  int64_t look() const { return LOOK; }
  Bytes from(int64_t row, int64_t at) const { return {inputs + row * stride + at * layout.lines(), stride, layout}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }

  Opening opening(uint32_t* to) const { return {inputs, stride, layout, to}; }
  Opened opened() const { return {inputs, stride, layout}; }
};

template <Stage STAGE, int ROWS>
struct Group<Bytes<STAGE>, ROWS> {
  // Prefetch the line that is read LOOK words after this one, into L1: a single group of rows computes so long that the
  // hardware prefetcher does not keep up.
  static void fetch_near(const uint32_t* line) {
#pragma GCC unroll 4
    for (int64_t at = LOOK; at < LOOK + PANEL; at += CACHE_LINE) _mm_prefetch(reinterpret_cast<const char*>(line + at), _MM_HINT_T0);
  }

  static void multiply(const Bytes<STAGE>& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    // Decoder, parts and sums together fit the vector registers.
    constexpr int VECTORS = STAGE != OPENED && ROWS > 4 && !INPUTS_IN_MEMORY ? 2 : ABREAST<ROWS>;
    constexpr int SPLIT = INPUTS_IN_MEMORY && ROWS <= 4 ? VECTORS : 1;  // vectors of words that are parts at a time
    constexpr int64_t LINES = LOOK / PANEL;                             // between two prefetches
    const int64_t lines = x.layout.lines(), length = x.step(), opened_length = x.opened().step();
    const Decoder decoder;
    for (int64_t at = 0; at < stretch.steps; at++) {
      const uint32_t* step = stretch.words + at * length;
      const Four* inputs = x.inputs + at * lines;
      uint32_t* to = x.to + at * opened_length;
      if constexpr (STAGE == OPENING) memcpy(to, step, PANEL * sizeof *to);
      for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
        const uint32_t* words = step + PANEL + first;
        Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = set(0.0f);
        for (int64_t line = 0; line < lines; line++) {
          if (first == 0 && line % LINES == 0) ahead.fetch();
          if (STAGE == CLOSED && ROWS > 2 && first == 0 && ahead.lines == 0) fetch_near(words + line * PANEL);
          if constexpr (STAGE == OPENED) {
#pragma GCC unroll 4
            for (int k = 0; k < PARTS; k++) {
              Part part[VECTORS];
#pragma GCC unroll 8
              for (int j = 0; j < VECTORS; j++) part[j] = load_part(words + (line * PARTS + k) * PANEL + j * WIDTH);
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                const Input input = inputs[i * x.stride + line].part[k];
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) sum[i][j] = add(sum[i][j], part[j], input);
              }
            }
          } else {
#pragma GCC unroll 8
            for (int first_split = 0; first_split < VECTORS; first_split += SPLIT) {
              Part parts[SPLIT][PARTS];
#pragma GCC unroll 8
              for (int j = 0; j < SPLIT; j++) {
                const int64_t column = (first_split + j) * WIDTH;
                decoder.split(words + line * PANEL + column, parts[j]);
                if constexpr (STAGE == OPENING)
#pragma GCC unroll 4
                  for (int k = 0; k < PARTS; k++)
                    store_part(to + (1 + line * PARTS + k) * PANEL + first + column, parts[j][k]);
              }
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
                for (int k = 0; k < PARTS; k++) {
                  const Input* input = inputs[i * x.stride + line].part + k;
#pragma GCC unroll 8
                  for (int j = 0; j < SPLIT; j++) {
                    Vec& own = sum[i][first_split + j];
                    own = SPLIT == 1 ? add_from(own, parts[j][k], input) : add(own, parts[j][k], *input);
                  }
                }
            }
          }
        }
        const bool begins = stretch.header != nullptr && at == 0;
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
          const Vec scale = load(reinterpret_cast<const float*>(step) + first + j * WIDTH);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++) {
            float* own = sums + i * PANEL + first + j * WIDTH;
            store(own, fma(sum[i][j], scale, begins ? set(0.0f) : load(own)));
          }
        }
      }
    }
  }
};

#if defined(__AVX512BF16__)
// With bfloat16, two vectors of outputs leave registers for the rows' sums over a stretch beside those over a step.
template <int ROWS>
struct Group<Bytes<OPENED>, ROWS> {
  static constexpr int VECTORS = 2;

  static void multiply(const Bytes<OPENED>& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    constexpr int64_t LINES = LOOK / PANEL;  // between two prefetches
    const int64_t lines = x.layout.lines(), length = x.step();
    for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
      Vec own[ROWS][VECTORS];
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
          own[i][j] = stretch.header != nullptr ? set(0.0f) : load(sums + i * PANEL + first + j * WIDTH);
      const Four* inputs = x.inputs;
      for (int64_t at = 0; at < stretch.steps; at++) {
        const uint32_t *step = stretch.words + at * length + first, *words = step + PANEL;
        Vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
          for (int j = 0; j < VECTORS; j++) sum[i][j] = set(0.0f);
        for (int64_t line = 0; line < lines; line++, words += PARTS * PANEL, inputs++) {
          if (first == 0 && line % LINES == 0) ahead.fetch();
#pragma GCC unroll 2
          for (int k = 0; k < PARTS; k++) {
            Part part[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) part[j] = load_part(words + k * PANEL + j * WIDTH);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; i++) {
              const Input input = inputs[i * x.stride].part[k];
#pragma GCC unroll 8
              for (int j = 0; j < VECTORS; j++) sum[i][j] = add(sum[i][j], part[j], input);
            }
          }
        }
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
          const Vec scale = load(reinterpret_cast<const float*>(step) + j * WIDTH);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; i++) own[i][j] = fma(sum[i][j], scale, own[i][j]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) store(sums + i * PANEL + first + j * WIDTH, own[i][j]);
    }
  }
};
#endif

thread_local Scratch scratch;

// Store a row, padded with zeros to `fours` times four inputs.
void fill(const uint16_t* x, int64_t inputs, Four* to, int64_t fours) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (int64_t at = 0; at < fours; at += 8) {
    const int64_t left = inputs - 4 * at;
    const __mmask32 some = left >= 32 ? 0xffffffff : left <= 0 ? 0 : (uint32_t{1} << left) - 1;
    const __m512i pairs = _mm512_shuffle_epi8(_mm512_maskz_loadu_epi16(some, x + 4 * at), order);
    _mm512_storeu_si512(to + at, pairs);
  }
#else
  convert(reinterpret_cast<const bf16*>(x), to->part, inputs);
  memset(to->part + inputs, 0, (fours * PARTS - inputs) * sizeof(float));
#endif
}
static_assert(sizeof(Four) == PARTS * sizeof(Input));

}  // namespace

// out [rows, outputs] = x [rows, inputs] times the fp8 weights, transposed, plus bias.
INFD_KERNEL(multiply_float8_bf16)
(const uint16_t* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t number, int64_t awake) {
  const Float8Layout layout{number};
  const int64_t steps = layout.steps_of(inputs), fours = steps * layout.lines();
  const int64_t stride = fours + 8;  // a stride of whole pages would map all rows to the same sets of the L1 cache
  Four* own = reinterpret_cast<Four*>(scratch.at_least(rows * stride * sizeof(Four)));
  const Product<Bytes<CLOSED>> product = {{own, stride, layout}, rows, weights, outputs, steps, false, bias, out, out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs, awake);
  Division<Bytes<CLOSED>> division(product, shared);
#pragma omp parallel if (shared)
  {
#pragma omp for
    for (int64_t i = 0; i < rows; i++) fill(x + i * x_stride, inputs, own + i * stride, fours);
    division.compute_share();
  }
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_float8_bf16)
(bf16* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t number) {
  const Float8Layout layout{number};
  const int64_t steps = layout.steps_of(inputs);
#pragma omp parallel for if (count > 8)
  for (int64_t i = 0; i < count; i++) {
    bf16* row = out + i * inputs;
    if (rows[i] < 0 || rows[i] >= outputs) {
      memset(row, 0xff, inputs * sizeof(bf16));
      continue;
    }
    const uint32_t* panel = weights + rows[i] / PANEL * steps * layout.step() + rows[i] % PANEL;
    for (int64_t k = 0; k < inputs; k++) {
      const uint32_t* step = panel + k / layout.inputs * layout.step();
      float scale;
      memcpy(&scale, step, sizeof scale);
      const uint32_t word = step[PANEL + k % layout.inputs / 4 * PANEL];
      set(row + k, value_of(static_cast<uint8_t>(word >> k % 4 * 8)) * scale);
    }
  }
}
