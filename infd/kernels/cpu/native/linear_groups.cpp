// Products with a matrix of weights in groups, in panels; algorithm in products.h, layout in groups.h.

#include "grouped_many.h"
#include "grouped_shared.h"
#include "scratch.h"

namespace {

template <Stored STORED, int PARTS, int ROWS>
struct Group<Grouped<STORED, PARTS>, ROWS> {
  using Kind = Grouped<STORED, PARTS>;

  static void multiply(const Kind& x, const Stretch& stretch, float* sums, Prefetch ahead) {
    if constexpr (!SPLITS && PARTS == 1) {
      if (x.layout.shares()) {
        return SharedScales<Kind, ROWS, (ROWS > 4 ? 2 : 4)>::multiply(x, stretch, sums, ahead);
      }
    }
    if constexpr (SUMS_STAY<ROWS>) {
      // A single group of rows reads lines of bytes in order, which the hardware prefetcher predicts. With two parts it prefetches.
      if (x.rows > MOST_ROWS || PARTS == 2 || STORED != BYTES) return ManyRows<Kind, ROWS>::multiply(x, stretch, sums, ahead);
    }
    constexpr bool WHOLE = ROWS > 4 && !SPLITS;  // the sums of six rows and four vectors fill the registers
    constexpr int VECTORS = ROWS > 4 && !WHOLE ? 2 : WIDTH == 8 && ROWS == 1 ? 8 : 4;  // weights and sums together fit the vector registers
    constexpr bool NARROW = is_narrow(STORED);
    constexpr int64_t QUADS = GROUP / 4 / PARTS, TOGETHER = QUADS < quads_together(STORED) ? QUADS : quads_together(STORED);
    constexpr int64_t TURN = Kind::TURN, TURNS = TOGETHER < TURN ? TURN : TOGETHER;
    const Layout layout = x.layout;
    const int64_t length = x.step();
    for (int64_t at = 0; at < stretch.steps; at++) {
      const uint32_t* step = stretch.words + at * length;
      for (int64_t group = 0; group < layout.groups; group++) {
        ahead.fetch();
        const typename Kind::GroupInputs* inputs = x.inputs + (at * layout.groups + group) * x.rows;
        const uint32_t* lines = x.lines(step, group);
        const float *scales[PARTS], *minima[PARTS];
        float room[2 * PARTS][PANEL];
        for (int part = 0; part < PARTS; part++) {
          scales[part] = x.scales(step, group, part, room[part]);
          minima[part] = layout.minima ? x.minima(step, group, part, room[PARTS + part]) : nullptr;
        }
        for (int64_t first = 0; first < PANEL; first += VECTORS * WIDTH) {
          for (int64_t part = 0; part < PARTS; part++) {
            Ints sum[ROWS][VECTORS];
            start<false>(x, step, group, part, first, inputs, sum);
#pragma GCC unroll 2
            for (int64_t begin = QUADS * part; begin < QUADS * (part + 1); begin += TURNS) {
              Ints pairs[ROWS][VECTORS];
              auto& in = [&]() -> Ints(&)[ROWS][VECTORS] {
                if constexpr (NARROW)
                  return pairs;
                else
                  return sum;
              }();
              const auto clear = [&] {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) pairs[i][j] = no_ints();
              };
              const auto add_pairs = [&] {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
                  for (int j = 0; j < VECTORS; j++) sum[i][j] = plus(sum[i][j], pairs_of_words(pairs[i][j], ones()));
              };
              if constexpr (NARROW) clear();
              const auto add_turn = [&](int64_t pair) __attribute__((always_inline)) {
                add_quad<0>(x, lines, pair, first, inputs, in);
                if (ROWS > 1) settle(in);
                add_quad<1>(x, lines, pair, first, inputs, in);
                if constexpr (TURN == 4) {
                  if constexpr (NARROW && TOGETHER == 2) add_pairs(), clear();
                  if (ROWS > 1) settle(in);
                  add_quad<2>(x, lines, pair, first, inputs, in);
                  if (ROWS > 1) settle(in);
                  add_quad<3>(x, lines, pair, first, inputs, in);
                }
              };
              if constexpr (WHOLE) {
#pragma GCC unroll 4  // in a loop, sums would be spilled
                for (int64_t pair = begin / 2; pair < (begin + TURNS) / 2; pair += TURN / 2) {
                  settle(in);
                  add_turn(pair);
                }
                settle(in);
              } else {
#pragma GCC unroll 1  // unrolled, its loads would move ahead and spill sums
                for (int64_t pair = begin / 2; pair < (begin + TURNS) / 2; pair += TURN / 2) add_turn(pair);
              }
              if constexpr (NARROW) add_pairs();
            }
            const bool begins = stretch.header != nullptr && at == 0 && group == 0 && part == 0;
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) {
              const Vec scale = load(scales[part] + first + j * WIDTH);
              const Vec minimum = layout.minima ? load(minima[part] + first + j * WIDTH) : set(0.0f);
#pragma GCC unroll 8
              for (int i = 0; i < ROWS; i++) {
                float* own = sums + i * PANEL + first + j * WIDTH;
                Vec before = begins ? set(0.0f) : load(own);
                if (layout.minima) before = fma(minimum, set(inputs[i].scaled_totals[part]), before);
                store(own, fma(floats(sum[i][j]), scale * set(inputs[i].scale), before));
              }
            }
          }
        }
      }
    }
  }
};

thread_local Scratch scratch;

// Quantize a group of a row: `count` numbers from x[first] on, or, if `order` is given, the numbers that it names; zeros
// follow.
template <class Group, class Number>
void fill(Group& group, const Number* x, const int32_t* order, int64_t first, int64_t count) {
  if (order == nullptr && count == GROUP) return group.fill(x + first);
  Number chosen[GROUP] = {};
  for (int64_t i = 0; i < count; i++) chosen[i] = x[order ? order[first + i] : first + i];
  group.fill(chosen);
}

template <Stored KIND, int COUNT>
struct Chosen {
  static constexpr Stored STORED = KIND;
  static constexpr int PARTS = COUNT;
  using Group = Inputs<is_wide(KIND), COUNT>;
};

// Call use(Chosen) for what the lines of a layout store.
template <class Use>
void with_stored(const Layout& layout, const Use& use) {
  const auto with_parts = [&](auto one, auto two) { layout.parts == 1 ? use(one) : use(two); };
  if (layout.table == 0) return with_parts(Chosen<NIBBLES, 1>(), Chosen<NIBBLES, 2>());
  if (layout.table == Layout::SIXES) return with_parts(Chosen<SIXES, 1>(), Chosen<SIXES, 2>());
  if (layout.table == Layout::BYTES) return with_parts(Chosen<BYTES, 1>(), Chosen<BYTES, 2>());
  if (layout.least() < -12) return with_parts(Chosen<WIDE_TABLE, 1>(), Chosen<WIDE_TABLE, 2>());
  with_parts(Chosen<TABLE, 1>(), Chosen<TABLE, 2>());
}

// A matrix and the results of a product; see `multiply_groups_bf16`.
struct Matrix {
  Layout layout;
  const uint32_t* weights;
  int64_t outputs, inputs;
  Bias bias;
  void* out;
  int64_t out_stride, wide;

  int64_t groups() const { return layout.steps_of(inputs) * layout.groups; }
  // Call use(first, count) for blocks of rows, whose inputs stay in L2 if HOLDS_WEIGHTS.
  template <class Use>
  static void each_block(int64_t rows, const Use& use) {
    const int64_t blocks = HOLDS_WEIGHTS ? (rows + BLOCK_ROWS - 1) / BLOCK_ROWS : 1;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t from = rows * block / blocks;
      use(from, rows * (block + 1) / blocks - from);
    }
  }
  // The product with rows [from, from + rows), whose inputs are own [groups, rows].
  template <class Kind>
  Product<Grouped<Kind::STORED, Kind::PARTS>> product(Kind, const typename Kind::Group* own, int64_t from, int64_t rows) const {
    char* to = static_cast<char*>(out) + from * out_stride * (wide ? sizeof(float) : sizeof(bf16));
    return {{own, rows, layout}, rows, layout.panels(weights, inputs), outputs, layout.steps_of(inputs), false, bias, to, out_stride, wide != 0};
  }
};

template <class Group, class Number>
void fill_group(Group& group, const Number* x, const int32_t* order, int64_t number, int64_t inputs) {
  const int64_t first = number * GROUP < inputs ? number * GROUP : inputs, left = inputs - first;
  fill(group, x, order, first, left < GROUP ? left : GROUP);
}

template <class Number>
void multiply(const Matrix& matrix, const Number* x, int64_t x_stride, int64_t rows, const Neighbors* neighbors) {
  const int32_t* order = matrix.layout.order(matrix.weights);
  const int64_t groups = matrix.groups();
  with_stored(matrix.layout, [&](auto kind) {
    using Kind = decltype(kind);
    matrix.each_block(rows, [&](int64_t from, int64_t count) {
      typename Kind::Group* own = reinterpret_cast<typename Kind::Group*>(scratch.at_least(count * groups * sizeof *own));
      const auto product = matrix.product(kind, own, from, count);
      const bool shared = worth_sharing(count, matrix.outputs, matrix.inputs, neighbors);
      Division<Grouped<Kind::STORED, Kind::PARTS>> division(product, shared, neighbors);
#pragma omp parallel if (shared)
      {
#pragma omp for
        for (int64_t group = 0; group < groups; group++)
          for (int64_t i = 0; i < count; i++)
            fill_group(own[group * count + i], x + (from + i) * x_stride, order, group, matrix.inputs);
        division.compute_share();
      }
    });
  });
}

// The groups of each row follow one another.
template <class Number>
void quantize_rows(const Number* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t number) {
  const Layout layout(number);
  const int64_t groups = layout.steps_of(inputs) * layout.groups;
  with_stored(layout, [&](auto kind) {
    auto* to = static_cast<typename decltype(kind)::Group*>(quantized);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t group = 0; group < groups; group++) fill_group(*to++, x + i * x_stride, nullptr, group, inputs);
  });
}

void multiply_quantized(const Matrix& matrix, const void* quantized, const int64_t* chosen, int64_t rows) {
  const int64_t groups = matrix.groups();
  with_stored(matrix.layout, [&](auto kind) {
    using Kind = decltype(kind);
    const auto* all = static_cast<const typename Kind::Group*>(quantized);
    matrix.each_block(rows, [&](int64_t from, int64_t count) {
      const auto* own = all + chosen[from] * groups;
      if (count > 1) {
        auto* copied = reinterpret_cast<typename Kind::Group*>(scratch.at_least(count * groups * sizeof *own));
        for (int64_t i = 0; i < count; i++)
          for (int64_t group = 0; group < groups; group++)
            copied[group * count + i] = all[chosen[from + i] * groups + group];
        own = copied;
      }
      const auto product = matrix.product(kind, own, from, count);
      Division<Grouped<Kind::STORED, Kind::PARTS>>(product, false).compute_share();
    });
  });
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] times weights in a layout, transposed, plus bias.
INFD_KERNEL(multiply_groups_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const bf16* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, const Neighbors* neighbors) {
  multiply({Layout(layout), weights, outputs, inputs, bias, out, out_stride, wide}, x, x_stride, rows, neighbors);
}

INFD_KERNEL(multiply_groups_float)
(const float* x, int64_t x_stride, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const float* bias, void* out, int64_t out_stride, int64_t wide, int64_t layout, const Neighbors* neighbors) {
  multiply({Layout(layout), weights, outputs, inputs, bias, out, out_stride, wide}, x, x_stride, rows, neighbors);
}

// See StackProduct; weights whose inputs are reordered are not supported.
INFD_KERNEL(quantize_groups_bf16)
(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(quantize_groups_float)
(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, void* quantized, int64_t layout) {
  quantize_rows(x, x_stride, rows, inputs, quantized, layout);
}

INFD_KERNEL(multiply_quantized_groups)
(const void* quantized, const int64_t* chosen, int64_t rows, const uint32_t* weights, int64_t outputs, int64_t inputs,
 const void* bias, int64_t half, void* out, int64_t out_stride, int64_t wide, int64_t layout) {
  multiply_quantized({Layout(layout), weights, outputs, inputs, Bias(bias, half != 0), out, out_stride, wide}, quantized, chosen, rows);
}

// *bytes = the size of a quantized row.
INFD_KERNEL(quantized_bytes_groups)(int64_t inputs, int64_t number, int64_t* bytes) {
  const Layout layout(number);
  with_stored(layout, [&](auto kind) { *bytes = layout.steps_of(inputs) * layout.groups * int64_t{sizeof(typename decltype(kind)::Group)}; });
}
