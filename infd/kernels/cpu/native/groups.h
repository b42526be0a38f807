// The layout of weights in groups: for each group of an output's consecutive inputs, integers and a scale.
//
//   weight = (integer - zero point) * scale + minimum        zero points and minima are optional
//
// A group has 16 inputs or a multiple of 32. Integers have four bits, six or eight; integers of four bits are numbers from
// -8 to 7, from 0 to 15 if there are minima, or indices of a table of 16 integers. Scales and minima are floats, or int8 and
// multiplied by two float16, one for scales and one for minima, that 256 inputs share.
//
// A step of a panel stores the weights of one group, of two groups of 16, or of 256 inputs if scales are int8. It begins
// with these sets of one number for each of the 64 outputs: the two float16 (that for minima only if there are minima);
// the scales of each group; the minima of each group; the zero points of each group, as int8. Lines follow, four, six or
// eight for each 32 inputs. A word stores an output's weights: four integers of eight bits, with 128 added; or eight of
// four bits, with 8 added unless there are minima, or as indices: the first four in the lower halves of the word's four
// bytes, the other four in the upper halves. Integers of six bits, with 32 added, take three lines for 16 inputs: a word
// of the first line has the two upper bits of each integer, those of the first four integers in the lowest two bits of its
// bytes; two lines of the lower four bits follow. A panel of zero bytes is a matrix of zeros, because scales and minima
// are 0.
//
// If the inputs are reordered, a table of int32 precedes the panels: the index of the input that each column multiplies.

#pragma once

#include "panels.h"
#include "vector.h"

// A caller has its sums in memory while a function runs that is not inlined, and GCC does not inline large or frequent ones by
// itself. Where it inlines several loops into one function, each loop is slower.
#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))

namespace {

constexpr int64_t GROUP = 32;         // inputs of x are quantized in groups of this size
constexpr int64_t LINES = GROUP / 8;  // lines of 32 inputs, if integers have four bits
constexpr int ZERO = 8;               // the stored value of the integer 0 of four bits

inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// Tables of 16 integers, by number. fp4 E2M1, doubled; IQ4_NL of GGUF.
constexpr int8_t TABLES[][16] = {
    {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
};
constexpr int LEAST_ENTRY[] = {-8, -12, -127};

// A layout as a number, which groups.py computes: bits 0 and 1 are the scales' type, bit 2 says whether there are zero
// points, bit 3 whether inputs are reordered, bits 4 to 6 are the table, BYTES or SIXES, bit 7 says whether groups have 16
// inputs, bit 8 whether there are minima; the bits from 9 on are one less than the groups of 32 inputs in a step.
struct Layout {
  enum Scales { BFLOAT16, FLOAT16, FLOAT32, INT8 };
  static constexpr int64_t BYTES = 3, SIXES = 4;  // in place of a table: integers of eight bits, of six

  int64_t scales;  // the type
  bool zeros, reordered, minima;
  int64_t table;   // 0: integers of four bits
  int64_t parts;   // scales of 32 inputs: 1 or 2
  int64_t groups;  // of 32 inputs, in a step

  explicit constexpr Layout(int64_t number)
      : scales(number & 3),
        zeros((number & 4) != 0),
        reordered((number & 8) != 0),
        minima((number & 256) != 0),
        table(number >> 4 & 7),
        parts((number & 128) != 0 ? 2 : 1),
        groups((number >> 9) + 1) {}

  // Scales of an output in a step; the number of the scale of 32 inputs, or of a half of them.
  int64_t sets() const { return scales == INT8 ? groups * parts : parts; }
  int64_t set_of(int64_t group, int64_t part) const { return scales == INT8 ? group * parts + part : part; }
  // Whether several groups of 32 inputs share a scale.
  bool shares() const { return scales != INT8 && groups > 1; }
  // Words of one set of scales or minima; of one set of zero points.
  int64_t set() const { return scales == FLOAT32 ? PANEL : scales == INT8 ? PANEL / 4 : PANEL / 2; }
  static constexpr int64_t ZEROS = PANEL / 4;
  // Words from the beginning of a step to the scales, the minima, the zero points, the lines, the next step.
  int64_t to_scales() const { return scales == INT8 ? PANEL / 2 * (minima ? 2 : 1) : 0; }
  int64_t to_minima() const { return to_scales() + sets() * set(); }
  int64_t to_zeros() const { return to_minima() + (minima ? sets() * set() : 0); }
  int64_t to_lines() const { return to_zeros() + (zeros ? sets() * ZEROS : 0); }
  int64_t step() const { return to_lines() + groups * lines() * PANEL; }
  int64_t lines() const { return table == BYTES ? GROUP / 4 : table == SIXES ? GROUP * 6 / 32 : LINES; }  // of 32 inputs
  int64_t steps_of(int64_t inputs) const { return (groups_of(inputs) + groups - 1) / groups; }

  // The table of reordered inputs, or null.
  const int32_t* order(const uint32_t* weights) const {
    return reordered ? reinterpret_cast<const int32_t*>(weights) : nullptr;
  }
  const uint32_t* panels(const uint32_t* weights, int64_t inputs) const {
    return reordered ? weights + (inputs + 15) / 16 * 16 : weights;
  }

  // The least weight, before its zero point is subtracted; what is added to weights to store them as unsigned numbers.
  int least() const {
    return table == BYTES ? -128 : table == SIXES ? -32 : table == 0 && minima ? 0 : LEAST_ENTRY[table];
  }

  // The scales, or the minima, of WIDTH outputs from `column` on.
  INLINE Vec load_scales(const uint32_t* step, int64_t set, int64_t column) const {
    return load_set(step, step + to_scales() + set * this->set(), column);
  }
  INLINE Vec load_minima(const uint32_t* step, int64_t set, int64_t column) const {
    return load_set(step + PANEL / 2, step + to_minima() + set * this->set(), column);
  }
  // The scales, or the minima, of all outputs of a panel, stored in `room` unless they are floats in memory.
  INLINE const float* scales_of(const uint32_t* step, int64_t set, float* room) const {
    return floats_of(step, step + to_scales() + set * this->set(), room);
  }
  INLINE const float* minima_of(const uint32_t* step, int64_t set, float* room) const {
    return floats_of(step + PANEL / 2, step + to_minima() + set * this->set(), room);
  }
  // Zero points of a set.
  const int8_t* zero_points(const uint32_t* step, int64_t set) const {
    return reinterpret_cast<const int8_t*>(step + to_zeros() + set * ZEROS);
  }

 private:
  INLINE const float* floats_of(const uint32_t* shared, const uint32_t* numbers, float* room) const {
    if (scales == FLOAT32) return reinterpret_cast<const float*>(numbers);
    for (int64_t column = 0; column < PANEL; column += WIDTH) store(room + column, load_set(shared, numbers, column));
    return room;
  }

  // shared: the numbers by which int8 numbers are multiplied
  INLINE Vec load_set(const uint32_t* shared, const uint32_t* numbers, int64_t column) const {
    switch (scales) {
      case BFLOAT16:
        return load(reinterpret_cast<const bf16*>(numbers) + column);
      case FLOAT16:
        return load(reinterpret_cast<const fp16*>(numbers) + column);
      case FLOAT32:
        return load(reinterpret_cast<const float*>(numbers) + column);
      default:
        return load(reinterpret_cast<const fp16*>(shared) + column) * load(reinterpret_cast<const int8_t*>(numbers) + column);
    }
  }
};

}  // namespace
