// The layout of bfloat16 weights in 12 bits, without loss.
//
// The exponents of a matrix's weights have few frequent values. A weight is stored as a number, its sign and fraction of 8
// bits, and as an index of 4 bits into a table of exponents. Weights with other exponents are listed as exceptions.
//
// A matrix has about the bytes of one in lines of pairs (panels.h), and its products read three quarters of them: a panel is a
// header and steps of 32 lines, each with its own table. The rests of all panels follow the last panel, because reading slows
// down at each gap between panels. A panel's rest stores the lists that do not fit their steps. If there are too many
// exceptions, lines of pairs follow the header instead, and those that do not fit the panel are in the rest.

#pragma once

#include <stddef.h>

#include "panels.h"
#include "vector.h"

namespace {

constexpr int64_t LINES = 32;      // of a step
constexpr int64_t EXPONENTS = 16;  // of a table

struct PanelHeader {
  // Other values mean that nothing was stored yet: memory is arbitrary before.
  enum Stored : uint32_t { STEPS = 0x12b1f16a, PAIRS = 0x16b1f16a };
  uint32_t stored, unused;
  int64_t rest;  // bytes from here to the rest
  uint32_t padding[12];
};

// A line of pairs is four vectors of 32 weights.
struct Line {
  uint16_t indices[32];     // of weight i of each vector, from the lower bits on
  uint32_t numbers[2][16];  // of vectors 0 and 1, and of 2 and 3: see Unpacker
};

struct Exception {
  uint8_t line, weight, exponent;  // weight: of the line
};

struct Step {
  uint8_t exponents[EXPONENTS];
  uint32_t exceptions;   // words of 4 bytes from the step's begin to the list, in the order of lines; END follows
  Exception inside[14];  // the list, if it fits
  uint8_t unused[2];
  Line lines[LINES];

  static constexpr int64_t MOST_INSIDE = 13;
  static constexpr Exception END = {LINES, 0, 0};

  const char* list() const { return reinterpret_cast<const char*>(this) + exceptions * int64_t{sizeof exceptions}; }
};
static_assert(sizeof(PanelHeader) == 64 && offsetof(Step, inside) % sizeof(uint32_t) == 0 && sizeof(Line) == 192 && sizeof(Step) == 64 + LINES * sizeof(Line));

inline int64_t steps_of(int64_t inputs) { return (pairs_of(inputs) + LINES - 1) / LINES; }

// Bytes of a panel's steps; the last one may have fewer lines.
inline int64_t steps_bytes(int64_t inputs) {
  return steps_of(inputs) * static_cast<int64_t>(offsetof(Step, lines)) + pairs_of(inputs) * static_cast<int64_t>(sizeof(Line));
}

constexpr int64_t PAIRS_BYTES = LINES * PANEL * static_cast<int64_t>(sizeof(uint32_t));  // of a step, as lines of pairs

// Bytes from a panel to the next one.
inline int64_t panel_bytes(int64_t inputs) { return static_cast<int64_t>(sizeof(PanelHeader)) + steps_bytes(inputs); }

// Steps of lines of pairs that fit a panel.
inline int64_t fitting_steps(int64_t inputs) { return steps_bytes(inputs) / PAIRS_BYTES; }

// Bytes of a panel's rest.
inline int64_t rest_bytes(int64_t inputs) { return (steps_of(inputs) - fitting_steps(inputs)) * PAIRS_BYTES; }

#if defined(__AVX512BW__)

constexpr uint32_t NUMBER = 0x807f807f;  // sign and fraction of two weights

// The numbers of two vectors as one.
inline __m512i joined(__m512i first, __m512i second) {
  const __m512i number = _mm512_set1_epi32(static_cast<int>(NUMBER));
  return _mm512_or_si512(_mm512_and_si512(first, number), _mm512_ror_epi32(_mm512_and_si512(second, number), 8));
}

// Turns the lines of a step into lines of pairs, in their order.
class Unpacker {
 public:
  explicit Unpacker(const Step& step)
      : lines_(step.lines), next_(reinterpret_cast<const Exception*>(step.list())) {
    const __m128i exponents = _mm_loadu_si128(reinterpret_cast<const __m128i*>(step.exponents));
    // Twice, because the instruction that looks up reads five bits of an index.
    table_ = _mm512_broadcast_i64x4(_mm256_slli_epi16(_mm256_cvtepu8_epi16(exponents), 7));
  }

  void unpack(int64_t line, __m512i* pairs) {
    const __m512i indices = _mm512_loadu_si512(lines_[line].indices);
    const auto join = [&](__m512i numbers, __m512i indices) {
      const __m512i exponents = _mm512_permutexvar_epi16(indices, table_);
      // exponents | numbers & NUMBER
      return _mm512_ternarylogic_epi32(exponents, numbers, _mm512_set1_epi32(static_cast<int>(NUMBER)), 0xf8);
    };
    const __m512i first = _mm512_loadu_si512(lines_[line].numbers[0]), second = _mm512_loadu_si512(lines_[line].numbers[1]);
    pairs[0] = join(first, indices);
    pairs[1] = join(_mm512_rol_epi32(first, 8), _mm512_srli_epi16(indices, 4));
    pairs[2] = join(second, _mm512_srli_epi16(indices, 8));
    pairs[3] = join(_mm512_rol_epi32(second, 8), _mm512_srli_epi16(indices, 12));
    if (__builtin_expect(next_->line == line, false)) replace(pairs);
  }

 private:
  const Line* lines_;
  const Exception* next_;
  __m512i table_;  // exponents, in their bits

  // Replace the exponents of the next exceptions' line.
  void replace(__m512i* pairs) {
    alignas(64) uint16_t weights[2 * PANEL];
    for (int i = 0; i < 4; i++) _mm512_store_si512(weights + i * 32, pairs[i]);
    const int line = next_->line;
    for (; next_->line == line; next_++) {
      uint16_t& weight = weights[next_->weight];
      weight = static_cast<uint16_t>((weight & NUMBER) | next_->exponent << 7);
    }
    for (int i = 0; i < 4; i++) pairs[i] = _mm512_load_si512(weights + i * 32);
  }
};

#endif

}  // namespace
