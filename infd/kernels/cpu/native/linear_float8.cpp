// Products with a matrix of fp8 weights in panels; algorithm in products.h, layout in float8.h.
//
// Weights become bfloat16 or float32, exactly, and are multiplied with bfloat16 inputs. The products of one scale's
// inputs are accumulated in float32; their sum is multiplied by the scale and added to the row's sum.

#include "amx.h"
#include "float8.h"
#include "packing.h"
#include "pairs.h"
#include "products.h"
#include "scratch.h"

namespace {

constexpr int64_t LOOK = 1 << 9;  // words between two prefetches

// What panels store for bytes of E4M3, and for their scales.
#if defined(__AVX512VBMI__)
// Codes of which two tables of 64 bytes, indexed by the lower six bits, and the other two bits make a bfloat16 of 2^RAISED times
// the number. Bit 7 is the sign. Bit 6 inverts the upper bit of the bfloat16's fraction; the lower six bits are the exponent and
// the rest of the fraction. The numbers below the exponent 1 are pairs that differ by no more than that bit,
//
//   0, 1    2, 3    4, 6    5, 7    times SUBNORMAL
//
// except the first one. All numbers above 0 have the upper bit of the bfloat16's exponent, which bit 6 sets: it tells 1 from 0, a
// subnormal bfloat16, which products take for 0.
struct Code {
  static constexpr int RAISED = 10;             // exponents become 128 and more
  static constexpr float LOWERED = 0x1p-10f;  // by which scales are multiplied
  static constexpr uint8_t SMALL[8] = {0x00, 0x40, 0x01, 0x41, 0x02, 0x03, 0x42, 0x43};

  static constexpr uint8_t of(uint8_t byte) {
    const uint8_t sign = byte & 0x80, number = byte & 0x7f;
    return sign | (number < 8 ? SMALL[number] : (number >> 3 << 2 | (number & 3) | (number & 4) << 4));
  }
  static constexpr uint8_t byte_of(uint8_t code) {
    const uint8_t sign = code & 0x80, number = code & 0x7f;
    for (uint8_t small = 0; small < 8; small++)
      if (SMALL[small] == number) return sign | small;
    return sign | (number >> 2 & 15) << 3 | (number & 3) | (number >> 4 & 4);
  }
  // The bfloat16 of a code without its sign.
  static constexpr int bits_of(int code) {
    constexpr int small[4] = {0x0040, 0x4080, 0x4100, 0x4120};
    const int index = code & 63;
    const int bits = index < 4 ? small[index] : ((index >> 2) + BIAS + RAISED) << 7 | (index & 3) << 4;
    return code < 64 ? bits : (bits ^ 0x40) | 0x4000;
  }
};
#else
struct Code {
  static constexpr float LOWERED = 1;
  static uint8_t of(uint8_t byte) { return byte; }
  static uint8_t byte_of(uint8_t code) { return code; }
};
#endif

// A Decoder turns words of four weights into PARTS vectors. NaN becomes 480: placing sets its row's scales to NaN.
#if defined(__AVX512BF16__)
// A part is pairs of bfloat16: of inputs 0 and 2, and of inputs 1 and 3.
constexpr int PARTS = 2;
using Part = __m512i;
using Input = uint32_t;

#if defined(__AVX512VBMI__)
// By code without its sign: the upper and the lower bytes of the bfloat16. By byte of E4M3: the codes.
struct Tables {
  uint8_t upper[128] = {}, lower[128] = {}, codes[128] = {};

  constexpr Tables() {
    for (int i = 0; i < 128; i++) upper[i] = Code::bits_of(i) >> 8, lower[i] = Code::bits_of(i) & 255, codes[i] = Code::of(i);
  }
};
alignas(64) constexpr Tables TABLES;

inline __m512i entries(const uint8_t* table) {
  __m512i entries = _mm512_load_si512(table);
  asm("" : "+v"(entries));  // stay in a register, else each word would read them again
  return entries;
}

// Parts of words whose lower and upper bytes are known.
inline void combine(__m512i lower, __m512i upper, Part* parts) {
  constexpr __mmask64 ODD = 0xaaaaaaaaaaaaaaaa;
  parts[0] = _mm512_mask_blend_epi8(ODD, lower, _mm512_slli_epi16(upper, 8));
  parts[1] = _mm512_mask_blend_epi8(ODD, _mm512_srli_epi16(lower, 8), upper);
}

// MANY: beside products of so many rows that products bound the time. Instructions of three operands (vpermi2b, vpternlog)
// compete with them, others hardly do, so GCC is kept from merging two into one. Beside fewer rows the fewest are best.
template <bool MANY>
class Decoder {
 public:
  void split(const uint32_t* words, Part* parts) const {
    const __m512i four = _mm512_loadu_si512(words), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i lower = _mm512_permutex2var_epi8(lower_[0], four, lower_[1]);
    combine(lower, _mm512_permutex2var_epi8(upper_[0], four, upper_[1]) | (four & sign), parts);
  }

 private:
  __m512i lower_[2] = {entries(TABLES.lower), entries(TABLES.lower + 64)}, upper_[2] = {entries(TABLES.upper), entries(TABLES.upper + 64)};
};
template <>
class Decoder<true> {
 public:
  void split(const uint32_t* words, Part* parts) const {
    __m512i four = _mm512_loadu_si512(words);
    asm("" : "+v"(four));
    __m512i above = four & _mm512_set1_epi8(static_cast<char>(0xc0)), middle = four & _mm512_set1_epi8(0x40);
    asm("" : "+v"(above), "+v"(middle));
    combine(_mm512_permutexvar_epi8(four, lower_) ^ middle, _mm512_permutexvar_epi8(four, upper_) | above, parts);
  }

 private:
  __m512i lower_ = entries(TABLES.lower), upper_ = entries(TABLES.upper);
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
template <bool>
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
template <bool>
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

#if defined(__AMX_BF16__)
// Tiles multiply the inputs of one scale.
struct Bytes {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = false, HALVES = false;

  const Four* inputs;
  int64_t stride;  // between rows
  Float8Layout layout;

  int64_t step() const { return layout.step(); }
  bool prefetches() const { return true; }
  int64_t look() const { return layout.step(); }
  Bytes from(int64_t row, int64_t at) const { return {inputs + row * stride + at * layout.lines(), stride, layout}; }
  Vec value(Vec sums, int64_t, const uint32_t*) const { return sums; }
};

template <>
constexpr bool BY_AMX<Bytes> = true;

template <>
struct RowByRow<Bytes> {
  static void multiply(const Bytes& x, const Stretch& stretch, int64_t rows, float* sums, Prefetch ahead) {
    alignas(64) uint32_t parts[LARGEST_STEP / 2 * PANEL];
    alignas(64) float products[MOST_TOGETHER * PANEL];
    const int64_t lines = x.layout.lines(), length = x.layout.step();
    const Decoder<true> decoder;  // vpermb takes a third of vpermi2b's operations on Intel's cores
    TileRegisters registers;
    Pace pace(ahead.next, ahead.lines ? stretch.steps * length / CACHE_LINE : 0, stretch.steps * lines), none(nullptr, 0, 0);
    for (int64_t at = 0; at < stretch.steps; at++) {
      const uint32_t *step = stretch.words + at * length, *words = step + PANEL;
      for (int64_t line = 0; line < lines; line++) {
        pace.fetch();
        for (int64_t column = 0; column < PANEL; column += WIDTH) {
          Part two[PARTS];
          decoder.split(words + line * PANEL + column, two);
          for (int k = 0; k < PARTS; k++) store_part(parts + (line * PARTS + k) * PANEL + column, two[k]);
        }
      }
      const char* inputs = reinterpret_cast<const char*>(x.inputs + at * lines);
      const TileSteps steps = {inputs, x.stride * int64_t{sizeof(Four)}, parts, lines * PARTS / TILE_LINES};
      add_products<Pairs>(registers, steps, rows, true, nullptr, products, none);
      const bool begins = stretch.header != nullptr && at == 0;
      for (int64_t column = 0; column < PANEL; column += WIDTH) {
        const Vec scale = load(reinterpret_cast<const float*>(step) + column);
        for (int64_t row = 0; row < rows; row++) {
          float* own = sums + row * PANEL + column;
          store(own, fma(load(products + row * PANEL + column), scale, begins ? set(0.0f) : load(own)));
        }
      }
    }
  }
};
using Kind = Bytes;
#else
// OPENED: weights are already parts, the vectors of each word one after another. OPENING: products store them so.
enum Stage { CLOSED, OPENING, OPENED };

template <Stage STAGE>
struct Bytes {
  static constexpr int64_t HEADER = 0;
  static constexpr bool ONE_LINE = false, TILES = false, OPENS = STAGE == CLOSED, FIRST_OPENS = true, SOME_OPENED = false;
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
    const Decoder<(ROWS > 5)> decoder;
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

using Kind = Bytes<CLOSED>;
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
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t number, const Neighbors* neighbors) {
  const Float8Layout layout{number};
  const int64_t steps = layout.steps_of(inputs), fours = steps * layout.lines();
  const int64_t stride = fours + 8;  // a stride of whole pages would map all rows to the same sets of the L1 cache
  Four* own = reinterpret_cast<Four*>(scratch.at_least(rows * stride * sizeof(Four)));
  const Product<Kind> product = {{own, stride, layout}, rows, weights, outputs, steps, false, bias, out, out_stride, wide != 0};
  const bool shared = worth_sharing(rows, outputs, inputs, neighbors);
  Division<Kind> division(product, shared, neighbors);
#pragma omp parallel if (shared)
  {
#pragma omp for
    for (int64_t i = 0; i < rows; i++) fill(x + i * x_stride, inputs, own + i * stride, fours);
    division.compute_share();
  }
}

// Replace bytes of E4M3 by the codes that panels store, and the scales by theirs.
INFD_KERNEL(encode_float8)(uint8_t* bytes, int64_t count, float* scales, int64_t scale_count) {
#if defined(__AVX512VBMI__)
  const __m512i first = entries(TABLES.codes), second = entries(TABLES.codes + 64), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t i = 0; i < count; i += 64) {
    const __mmask64 some = count - i >= 64 ? ~uint64_t{0} : (uint64_t{1} << (count - i)) - 1;
    const __m512i numbers = _mm512_maskz_loadu_epi8(some, bytes + i);
    _mm512_mask_storeu_epi8(bytes + i, some, _mm512_permutex2var_epi8(first, numbers, second) | (numbers & sign));
  }
  for (int64_t i = 0; i < scale_count; i++) scales[i] *= Code::LOWERED;
#else
  (void)bytes, (void)count, (void)scales, (void)scale_count;
#endif
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_float8_bf16)
(bf16* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t number) {
  const Float8Layout layout{number};
  const int64_t steps = layout.steps_of(inputs);
  each_row(out, inputs, outputs, rows, count, [&](int64_t output, bf16* row) {
    const uint32_t* panel = weights + output / PANEL * steps * layout.step() + output % PANEL;
    for (int64_t k = 0; k < inputs; k++) {
      const uint32_t* step = panel + k / layout.inputs * layout.step();
      float scale;
      memcpy(&scale, step, sizeof scale);
      const uint32_t word = step[PANEL + k % layout.inputs / 4 * PANEL];
      set(row + k, value_of(Code::byte_of(static_cast<uint8_t>(word >> k % 4 * 8))) * (scale / Code::LOWERED));
    }
  });
}
