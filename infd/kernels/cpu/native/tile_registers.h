// The tile registers of AMX, the matrix unit of Intel's CPUs since Sapphire Rapids: eight registers of 16 rows of 64 bytes.
//
// A tile instruction contains the registers' numbers, hence they are template arguments.

#pragma once

#if defined(__AMX_BF16__)

#include "kernel.h"

namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_LINES = 16;  // rows of a register with weights, keys or values

// What LDTILECFG reads: the rows and the bytes of a row of each register.
struct TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Give registers [first, last) so many rows.
  void set(int first, int last, int64_t count) {
    for (int tile = first; tile < last; tile++) bytes[tile] = 64, rows[tile] = static_cast<uint8_t>(count);
  }
};
static_assert(sizeof(TileShapes) == 64);

// The registers while a thread uses them. As long as they are in use, each switch of threads saves 8 KiB more.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (used_) __asm__ volatile("tilerelease");
  }

  // Set the registers' shapes, unless they have them. Afterwards their contents are arbitrary.
  void shape(const TileShapes& shapes) {
    if (used_ && memcmp(&shapes, &shapes_, sizeof shapes) == 0) return;
    shapes_ = shapes;
    __asm__ volatile("ldtilecfg\t%0" ::"m"(shapes_));  // to GCC 12, _tile_loadconfig reads 8 bytes alone
    used_ = true;
  }

 private:
  TileShapes shapes_;
  bool used_ = false;
};

template <int TILE>
inline void zero_tile() {
  __asm__ volatile("tilezero\t%%tmm%c0" ::"i"(TILE));
}

// stride: bytes from a row to the next one. The compiler orders loads and stores of tiles among those of other numbers.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// sums += rows of bfloat16 times lines of pairs. The products of the pairs' first and second numbers are summed separately; both
// sums are added, then to `sums`.
template <int SUMS, int ROWS, int LINES>
inline void add_pairs() {
  __asm__ volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(LINES));
}
// sums += rows of unsigned bytes times lines of four signed bytes.
template <int SUMS, int ROWS, int LINES>
inline void add_quads() {
  __asm__ volatile("tdpbusd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(LINES));
}

}  // namespace

#endif
