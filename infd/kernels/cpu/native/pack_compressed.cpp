// Packing bfloat16 matrices into panels of compressed weights, and unpacking rows; layout in compressed.h.

#if defined(__AVX512BF16__)

#include "compressed.h"
#include "pack_pairs.h"
#include "scratch.h"

namespace {

thread_local Scratch scratch;

// The exponents of a step's table: consecutive ones, all 16 or 15 and that of zeros.
class Table {
 public:
  Table() = default;

  // The table that leaves the fewest exceptions of lines of pairs, by every fourth line.
  Table(const uint32_t* pairs, int64_t lines) {
    int32_t weights[256] = {};
    for (int64_t line = 0; line < lines; line += 4)
      for (int64_t i = line * PANEL; i < (line + 1) * PANEL; i++) weights[pairs[i] >> 7 & 255]++, weights[pairs[i] >> 23 & 255]++;
    int32_t most = -1;
    for (int count = EXPONENTS; count >= EXPONENTS - 1; count--) {
      const int begin = count < EXPONENTS;  // zeros are not counted twice
      int32_t covered = begin ? weights[0] : 0;
      for (int i = begin; i < begin + count; i++) covered += weights[i];
      for (int first = begin;; first++) {
        if (covered > most) most = covered, first_ = first, count_ = count;
        if (first + count > 255) break;
        covered += weights[first + count] - weights[first];
      }
    }
  }

  void write(uint8_t* exponents) const {
    for (int i = 0; i < EXPONENTS; i++) exponents[i] = static_cast<uint8_t>(i < count_ ? first_ + i : 0);
  }

  // Find the indices of a vector of weights, and return the weights whose exponents have none.
  __mmask32 find(__m512i weights, __m512i& indices) const {
    const __m512i exponents = _mm512_and_si512(_mm512_srli_epi16(weights, 7), _mm512_set1_epi16(255));
    indices = _mm512_sub_epi16(exponents, _mm512_set1_epi16(static_cast<int16_t>(first_)));
    const __mmask32 missing = _mm512_cmpge_epu16_mask(indices, _mm512_set1_epi16(static_cast<int16_t>(count_)));
    const __mmask32 zeros = count_ < EXPONENTS ? _mm512_testn_epi16_mask(exponents, exponents) : 0;
    indices = _mm512_mask_mov_epi16(indices, missing, _mm512_set1_epi16(EXPONENTS - 1));
    return missing & ~zeros;
  }

 private:
  int first_ = 0, count_ = EXPONENTS;
};

// Store lines of pairs in a step, and the weights that the table lacks in `exceptions`; return their number.
int64_t store_lines(const uint32_t* pairs, int64_t lines, const Table& table, Step& step, Exception* exceptions) {
  table.write(step.exponents);
  int64_t count = 0;
  for (int64_t i = 0; i < lines; i++) {
    const uint32_t* line = pairs + i * PANEL;
    __m512i weights[4], indices = _mm512_setzero_si512();
    for (int j = 0; j < 4; j++) {
      weights[j] = _mm512_loadu_si512(line + j * WIDTH);
      __m512i found;
      uint32_t missing = table.find(weights[j], found);
      indices = _mm512_or_si512(indices, _mm512_slli_epi16(found, 4 * j));
      for (; missing != 0; missing &= missing - 1) {
        const int at = __builtin_ctz(missing), weight = 2 * WIDTH * j + at;
        const uint32_t exponent = line[weight / 2] >> (weight % 2 * 16 + 7) & 255;
        exceptions[count++] = {static_cast<uint8_t>(i), static_cast<uint8_t>(weight), static_cast<uint8_t>(exponent)};
      }
    }
    _mm512_storeu_si512(step.lines[i].indices, indices);
    for (int j = 0; j < 2; j++) _mm512_storeu_si512(step.lines[i].numbers[j], joined(weights[2 * j], weights[2 * j + 1]));
  }
  return count;
}

// A panel of a matrix, and its rest.
class Slot {
 public:
  Slot(const void* matrix, int64_t outputs, int64_t inputs, int64_t panel)
      : inputs_(inputs),
        begin_(static_cast<char*>(const_cast<void*>(matrix)) + panel * panel_bytes(inputs)),
        rest_(begin_ + (panels_of(outputs) - panel) * panel_bytes(inputs) + panel * rest_bytes(inputs)) {}

  // Store the lines of pairs that lines_of(begin, end) returns.
  template <class LinesOf>
  void store(const LinesOf& lines_of) {
    header().rest = rest_ - begin_;
    header().stored = compress(lines_of) ? PanelHeader::STEPS : PanelHeader::PAIRS;
    if (header().stored == PanelHeader::PAIRS)
      each([&](int64_t begin, int64_t end) { memcpy(line(begin), lines_of(begin, end), bytes_of(begin, end)); });
  }

  // Call take(begin, end, pairs) with all lines of pairs, some at a time.
  template <class Take>
  void read(const Take& take) const {
    alignas(64) __m512i pairs[LINES * 4];
    each([&](int64_t begin, int64_t end) {
      if (header().stored == PanelHeader::PAIRS) return take(begin, end, line(begin));
      Unpacker unpacker(steps()[begin / LINES]);
      for (int64_t i = 0; i < end - begin; i++) unpacker.unpack(i, pairs + i * 4);
      take(begin, end, reinterpret_cast<const uint32_t*>(pairs));
    });
  }

  // Whether a panel was stored here. Memory may contain a part of an earlier matrix instead.
  bool stored() const {
    if (header().stored != PanelHeader::STEPS) return header().stored == PanelHeader::PAIRS;
    bool sound = true;
    each([&](int64_t begin, int64_t) {
      const Step& step = steps()[begin / LINES];
      int64_t last = -1;
      const char* const inside = reinterpret_cast<const char*>(step.inside);
      for (const char* at = step.list(); sound && last < LINES; at += sizeof(Exception)) {
        sound = (at >= inside && at + sizeof(Exception) <= inside + sizeof step.inside) || (at >= rest_ && at + sizeof(Exception) <= end());
        if (!sound) break;
        const Exception& next = *reinterpret_cast<const Exception*>(at);
        sound = next.line >= last && next.line <= LINES && next.weight < 2 * PANEL;
        last = next.line;
      }
    });
    return sound;
  }

 private:
  int64_t inputs_;
  char *begin_, *rest_;

  PanelHeader& header() const { return *reinterpret_cast<PanelHeader*>(begin_); }
  Step* steps() const { return reinterpret_cast<Step*>(begin_ + sizeof(PanelHeader)); }
  char* end() const { return rest_ + rest_bytes(inputs_); }
  // A line of pairs, which those of the same step follow.
  uint32_t* line(int64_t number) const {
    const int64_t fitting = fitting_steps(inputs_) * LINES;
    char* from = number < fitting ? begin_ + sizeof(PanelHeader) : rest_;
    return reinterpret_cast<uint32_t*>(from) + (number < fitting ? number : number - fitting) * PANEL;
  }
  static int64_t bytes_of(int64_t begin, int64_t end) { return (end - begin) * PANEL * sizeof(uint32_t); }

  template <class Act>
  void each(const Act& act) const {
    for (int64_t at = 0; at < pairs_of(inputs_); at += LINES)
      act(at, at + LINES < pairs_of(inputs_) ? at + LINES : pairs_of(inputs_));
  }

  // Store steps, and return true, if that saves time: not if more than one weight of 64 is an exception.
  template <class LinesOf>
  bool compress(const LinesOf& lines_of) {
    char* list = rest_;
    int64_t left = inputs_;
    bool stored = true;
    Table table;
    each([&](int64_t begin, int64_t last) {
      if (!stored) return;
      const uint32_t* pairs = lines_of(begin, last);
      Step& step = steps()[begin / LINES];
      Exception exceptions[2 * LINES * PANEL + 1];
      // The table of the step before is good enough for most steps.
      int64_t count = begin == 0 ? sizeof exceptions : store_lines(pairs, last - begin, table, step, exceptions);
      if (count > Step::MOST_INSIDE) {
        table = Table(pairs, last - begin);
        count = store_lines(pairs, last - begin, table, step, exceptions);
      }
      exceptions[count++] = Step::END;
      const int64_t bytes = count * sizeof(Exception);
      const bool inside = count <= Step::MOST_INSIDE + 1;
      left -= count - 1;
      stored = left >= 0 && (inside || list + bytes <= end());
      if (!stored) return;
      char* to = inside ? reinterpret_cast<char*>(step.inside) : list;
      memcpy(to, exceptions, bytes);
      step.exceptions = static_cast<uint32_t>((to - reinterpret_cast<char*>(&step)) / sizeof step.exceptions);
      if (!inside) list += (bytes + 3) / 4 * 4;
    });
    return stored;
  }
};

}  // namespace

// The bytes of a panel and of its rest, in a matrix of so many inputs.
INFD_KERNEL(compressed_bytes)(int64_t inputs, int64_t* panel, int64_t* rest) { *panel = panel_bytes(inputs), *rest = rest_bytes(inputs); }

// Store rows [count, inputs] as the outputs from `first` on.
INFD_KERNEL(pack_compressed_bf16)
(uint32_t* weights, int64_t outputs, int64_t inputs, const uint16_t* rows, int64_t first, int64_t count) {
  const int64_t pairs = pairs_of(inputs);
  each_panel(first, count, [&](int64_t from, int64_t to) {
    Slot slot(weights, outputs, inputs, from / PANEL);
    if (to - from == PANEL) {
      alignas(64) uint32_t lines[LINES * PANEL];
      slot.store([&](int64_t begin, int64_t end) {
        place_lines(lines, rows + (from - first) * inputs, inputs, begin, end);
        return lines;
      });
      return;
    }
    uint32_t* lines = reinterpret_cast<uint32_t*>(scratch.at_least(pairs * PANEL * sizeof(uint32_t)));
    // Other rows of the panel may be stored by another thread.
#pragma omp critical(infd_pack_compressed)
    {
      if (slot.stored())
        slot.read([&](int64_t begin, int64_t end, const uint32_t* stored) {
          memcpy(lines + begin * PANEL, stored, (end - begin) * PANEL * sizeof *lines);
        });
      else
        memset(lines, 0, pairs * PANEL * sizeof *lines);
      for (int64_t i = from; i < to; i++) place(lines + i % PANEL, rows + (i - first) * inputs, inputs, 0);
      slot.store([&](int64_t begin, int64_t) { return lines + begin * PANEL; });
    }
  });
}

// out [count, inputs] = the matrix's rows with indices `rows` [count]; NaN for an index out of range.
INFD_KERNEL(unpack_compressed_bf16)
(uint16_t* out, const uint32_t* weights, int64_t outputs, int64_t inputs, const int64_t* rows, int64_t count, int64_t) {
  each_row(out, inputs, outputs, rows, count, [&](int64_t output, uint16_t* row) {
    Slot(weights, outputs, inputs, output / PANEL).read([&](int64_t begin, int64_t end, const uint32_t* pairs) {
      for (int64_t at = begin; at < end; at++) {
        const int64_t left = inputs - 2 * at;
        memcpy(row + 2 * at, pairs + (at - begin) * PANEL + output % PANEL, left > 1 ? 4 : 2);
      }
    });
  });
}

#endif
