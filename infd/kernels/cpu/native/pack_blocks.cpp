// Packing rows of GGUF's blocks into panels of groups, with their integers and scales unchanged.
//
// encodings/blocks.py reads the same blocks in Python; it is the reference for this file.

#include "groups.h"

namespace {

// The numbers of a block, as a panel stores them.
struct Numbers {
  uint8_t integers[256];  // with 8, 32 or 128 added, as groups.h has them; or indices
  uint16_t shared[2];     // float16
  uint16_t halves[2];     // a scale of two bytes, and a minimum
  uint8_t scales[16], minima[16];  // scales and minima of one byte
};

// Unpack fields of BITS bits: for each SIZE of `bytes` bytes, first the lowest field of every byte, then the next.
template <int BITS, int64_t SIZE>
void fields(const uint8_t* from, int64_t bytes, uint8_t* to) {
  for (int64_t at = 0; at < bytes; at += SIZE)
    for (int shift = 0; shift < 8; shift += BITS)
      for (int64_t i = 0; i < SIZE; i++) *to++ = from[at + i] >> shift & ((1 << BITS) - 1);
}

// Add the fields that `fields` unpacks, times 2^LEFT, to numbers that do not have these bits.
template <int BITS, int64_t SIZE, int LEFT>
void add_fields(const uint8_t* from, int64_t bytes, uint8_t* to) {
  for (int64_t at = 0; at < bytes; at += SIZE)
    for (int shift = 0; shift < 8; shift += BITS)
      for (int64_t i = 0; i < SIZE; i++) *to++ |= (from[at + i] >> shift & ((1 << BITS) - 1)) << LEFT;
}

void add(uint8_t* numbers, int64_t count, int addend) {
  for (int64_t i = 0; i < count; i++) numbers[i] = static_cast<uint8_t>(numbers[i] + addend);
}

uint16_t half(const uint8_t* from) {
  uint16_t found;
  memcpy(&found, from, sizeof found);
  return found;
}

// A factor of minima, which blocks subtract and panels add.
uint16_t negated(const uint8_t* from) { return half(from) ^ 0x8000; }

constexpr int64_t layout_of(int64_t scales, int64_t table, bool sixteen, bool minima) {
  return scales | table << 4 | sixteen << 7 | minima << 8 | (scales == Layout::INT8 ? 7 : 0) << 9;
}
// Of blocks of 32: a scale of two bytes. Of blocks of 256: scales of one byte.
constexpr int64_t small(int64_t table, bool minima = false) { return layout_of(Layout::FLOAT16, table, false, minima); }
constexpr int64_t large(int64_t table, bool sixteen, bool minima) {
  return layout_of(Layout::INT8, table, sixteen, minima);
}
constexpr int64_t FP4 = 1, IQ4 = 2;  // of TABLES

struct Q4_0 {
  static constexpr int64_t BYTES = 18, LAYOUT = small(0);
  static void read(const uint8_t* block, Numbers& to) {
    to.halves[0] = half(block);
    fields<4, 16>(block + 2, 16, to.integers);
  }
};

struct IQ4_NL : Q4_0 {
  static constexpr int64_t LAYOUT = small(IQ4);
};

struct Q4_1 {
  static constexpr int64_t BYTES = 20, LAYOUT = small(0, true);
  static void read(const uint8_t* block, Numbers& to) {
    to.halves[0] = half(block), to.halves[1] = half(block + 2);
    fields<4, 16>(block + 4, 16, to.integers);
  }
};

// Numbers of five bits: four bytes contain the highest bits, the next 16 bytes the others.
void with_fifth_bits(const uint8_t* from, uint8_t* to, int addend) {
  fields<4, 16>(from + 4, 16, to);
  for (int64_t i = 0; i < 32; i++) to[i] |= (from[i / 8] >> i % 8 & 1) << 4;
  add(to, 32, addend);
}

struct Q5_0 {
  static constexpr int64_t BYTES = 22, LAYOUT = small(Layout::SIXES);
  static void read(const uint8_t* block, Numbers& to) {
    to.halves[0] = half(block);
    with_fifth_bits(block + 2, to.integers, 32 - 16);
  }
};

struct Q5_1 {
  static constexpr int64_t BYTES = 24, LAYOUT = small(Layout::SIXES, true);
  static void read(const uint8_t* block, Numbers& to) {
    to.halves[0] = half(block), to.halves[1] = half(block + 2);
    with_fifth_bits(block + 4, to.integers, 32);
  }
};

struct Q8_0 {
  static constexpr int64_t BYTES = 34, LAYOUT = small(Layout::BYTES);
  static void read(const uint8_t* block, Numbers& to) {
    to.halves[0] = half(block);
    memcpy(to.integers, block + 2, 32);
    add(to.integers, 32, 128);
  }
};

struct MXFP4 {
  static constexpr int64_t BYTES = 17, LAYOUT = layout_of(Layout::BFLOAT16, FP4, false, false);
  static void read(const uint8_t* block, Numbers& to) {
    // The table contains fp4's numbers doubled: the scale is 2^(e - 128), a bfloat16, denormal if e is 0 or 1.
    const int exponent = block[0];
    to.halves[0] = static_cast<uint16_t>(exponent > 1 ? (exponent - 1) << 7 : exponent == 1 ? 0x40 : 0x20);
    fields<4, 16>(block + 1, 16, to.integers);
  }
};

struct Q2_K {
  static constexpr int64_t BYTES = 84, LAYOUT = large(0, true, true);
  static void read(const uint8_t* block, Numbers& to) {
    for (int64_t i = 0; i < 16; i++) to.scales[i] = block[i] & 15, to.minima[i] = block[i] >> 4;
    fields<2, 32>(block + 16, 64, to.integers);
    to.shared[0] = half(block + 80), to.shared[1] = negated(block + 82);
  }
};

struct Q3_K {
  static constexpr int64_t BYTES = 110, LAYOUT = large(0, true, false);
  static void read(const uint8_t* block, Numbers& to) {
    fields<2, 32>(block + 32, 64, to.integers);
    add_fields<1, 32, 2>(block, 32, to.integers);
    add(to.integers, 256, 8 - 4);
    fields<4, 8>(block + 96, 8, to.scales);
    add_fields<2, 4, 4>(block + 104, 4, to.scales);
    add(to.scales, 16, -32);
    to.shared[0] = half(block + 108);
  }
};

// The eight scales and eight minima of Q4_K and Q5_K, of six bits each.
void k_scales(const uint8_t* block, Numbers& to) {
  to.shared[0] = half(block), to.shared[1] = negated(block + 2);
  const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
  for (int64_t i = 0; i < 4; i++) {
    to.scales[i] = first[i] & 63, to.minima[i] = second[i] & 63;
    to.scales[i + 4] = (third[i] & 15) | first[i] >> 6 << 4;
    to.minima[i + 4] = third[i] >> 4 | second[i] >> 6 << 4;
  }
}

struct Q4_K {
  static constexpr int64_t BYTES = 144, LAYOUT = large(0, false, true);
  static void read(const uint8_t* block, Numbers& to) {
    k_scales(block, to);
    fields<4, 32>(block + 16, 128, to.integers);
  }
};

struct Q5_K {
  static constexpr int64_t BYTES = 176, LAYOUT = large(Layout::SIXES, false, true);
  static void read(const uint8_t* block, Numbers& to) {
    k_scales(block, to);
    fields<4, 32>(block + 48, 128, to.integers);
    add_fields<1, 32, 4>(block + 16, 32, to.integers);
    add(to.integers, 256, 32);
  }
};

struct Q6_K {
  static constexpr int64_t BYTES = 210, LAYOUT = large(Layout::SIXES, true, false);
  static void read(const uint8_t* block, Numbers& to) {
    fields<4, 64>(block, 128, to.integers);
    add_fields<2, 32, 4>(block + 128, 64, to.integers);
    memcpy(to.scales, block + 192, 16);
    to.shared[0] = half(block + 208);
  }
};

struct IQ4_XS {
  static constexpr int64_t BYTES = 136, LAYOUT = large(IQ4, false, false);
  static void read(const uint8_t* block, Numbers& to) {
    to.shared[0] = half(block);
    fields<4, 1>(block + 4, 4, to.scales);
    add_fields<2, 1, 4>(block + 2, 2, to.scales);
    add(to.scales, 8, -32);
    fields<4, 16>(block + 8, 128, to.integers);
  }
};

// Store a block's numbers as those of an output in a step of a panel.
template <int64_t LAYOUT>
void put(const Numbers& numbers, uint32_t* step, int64_t column) {
  constexpr Layout layout(LAYOUT);
  if (layout.scales == Layout::INT8) {
    for (int64_t i = 0; i <= layout.minima; i++)
      reinterpret_cast<uint16_t*>(step + i * PANEL / 2)[column] = numbers.shared[i];
    for (int64_t set = 0; set < layout.sets(); set++) {
      reinterpret_cast<uint8_t*>(step + layout.to_scales() + set * layout.set())[column] = numbers.scales[set];
      if (layout.minima)
        reinterpret_cast<uint8_t*>(step + layout.to_minima() + set * layout.set())[column] = numbers.minima[set];
    }
  } else {
    reinterpret_cast<uint16_t*>(step + layout.to_scales())[column] = numbers.halves[0];
    if (layout.minima) reinterpret_cast<uint16_t*>(step + layout.to_minima())[column] = numbers.halves[1];
  }
  uint32_t* words = step + layout.to_lines() + column;
  const auto four = [&](int64_t quad) {
    uint32_t word;
    memcpy(&word, numbers.integers + 4 * quad, sizeof word);
    return word;
  };
  if (layout.table == Layout::SIXES) {
    for (int64_t quad = 0; quad < layout.groups * GROUP / 4; quad += 4, words += 3 * PANEL) {
      const uint32_t a = four(quad), b = four(quad + 1), c = four(quad + 2), d = four(quad + 3);
      constexpr uint32_t UPPER = 0x30303030, LOWER = 0x0f0f0f0f;
      words[0] = (a & UPPER) >> 4 | (b & UPPER) >> 2 | (c & UPPER) | (d & UPPER) << 2;
      words[PANEL] = (a & LOWER) | (b & LOWER) << 4;
      words[2 * PANEL] = (c & LOWER) | (d & LOWER) << 4;
    }
    return;
  }
  for (int64_t line = 0; line < layout.groups * layout.lines(); line++)
    words[line * PANEL] = layout.table == Layout::BYTES ? four(line) : four(2 * line) | four(2 * line + 1) << 4;
}

template <class Block>
void pack(uint32_t* weights, int64_t inputs, const uint8_t* rows, int64_t first, int64_t count) {
  constexpr Layout layout(Block::LAYOUT);
  const int64_t steps = inputs / (layout.groups * GROUP);
  for (int64_t output = first; output < first + count; output++) {
    uint32_t* step = weights + output / PANEL * steps * layout.step();
    for (int64_t at = 0; at < steps; at++, step += layout.step(), rows += Block::BYTES) {
      Numbers numbers;
      Block::read(rows, numbers);
      put<Block::LAYOUT>(numbers, step, output % PANEL);
    }
  }
}

}  // namespace

// Store rows [count, inputs] of blocks of a type as the outputs from `first` on. `inputs` is a multiple of a block's.
#define INFD_PACK_BLOCKS(type)                                                                              \
  INFD_KERNEL(pack_blocks_##type)                                                                           \
  (uint32_t* weights, int64_t, int64_t inputs, const uint8_t* rows, int64_t first, int64_t count) {         \
    pack<type>(weights, inputs, rows, first, count);                                                        \
  }
INFD_PACK_BLOCKS(Q4_0)
INFD_PACK_BLOCKS(Q4_1)
INFD_PACK_BLOCKS(Q5_0)
INFD_PACK_BLOCKS(Q5_1)
INFD_PACK_BLOCKS(Q8_0)
INFD_PACK_BLOCKS(Q2_K)
INFD_PACK_BLOCKS(Q3_K)
INFD_PACK_BLOCKS(Q4_K)
INFD_PACK_BLOCKS(Q5_K)
INFD_PACK_BLOCKS(Q6_K)
INFD_PACK_BLOCKS(IQ4_NL)
INFD_PACK_BLOCKS(IQ4_XS)
INFD_PACK_BLOCKS(MXFP4)
