// Mixtures of experts: products of the tokens' rows with the matrices of the experts that they choose (routers.cpp).
//
// The rows of a step are sorted by expert. If the step chooses many experts for each thread, a thread computes an expert's
// rows from its inputs to its outputs, so that intermediate results stay in the thread's L2. Else, and if adapters change
// the experts, the work is divided into tiles: all rows of one expert, and some panels of one matrix. Either way a
// product is an ordinary one, computed by the kernel of the matrices' form on one thread. If the form quantizes inputs,
// those of a token are quantized once for all its experts. A result of a product does not depend on the number of rows,
// so a token's result depends neither on the other tokens nor on the division. A token's outputs are summed in float, in
// the order in which its experts were chosen.

#include "experts.h"

#include <stdlib.h>

#include "panels.h"
#include "scratch.h"
#include "tokens.h"

namespace {

constexpr int64_t ENOUGH = 1 << 14;      // with more elements than this, waking other threads saves time
constexpr int64_t MOST_ROWS = 1 << 13;   // of a pass through all experts: bounds scratch memory
constexpr int64_t FEW_ROWS = 8;          // a product of fewer rows takes as long: it waits for weights
constexpr int64_t TILES = 4;             // for each thread
constexpr int64_t MOST_TOGETHER = 240;   // rows of a thread that computes an expert from inputs to outputs
constexpr int64_t HEAD_LINES = 32;        // of a matrix, which are fetched while other work is done
constexpr int64_t LEAST_TOGETHER = 32;   // fewer rows of an expert are not divided: each part reads all its weights

thread_local Scratch scratch, own_scratch;

// Some panels of an expert's matrix.
struct Tile {
  int64_t expert, first, panels;
};

// Some rows of an expert.
struct Task {
  int64_t expert, row, rows;
};

// The rows of a pass, sorted by expert.
struct Sorted {
  const int64_t* offsets;  // [experts + 1]
  const int64_t* choices;  // of each row: token * chosen + slot
  const int64_t* tokens;   // of each row
  int64_t experts, chosen;
};

// The inputs of products: rows of numbers, or quantized rows, of which each product takes those in `chosen`.
template <class Number>
struct Rows {
  const Number* numbers;
  const char* quantized = nullptr;
  const int64_t* chosen = nullptr;
};

// Multiply rows [row, row + count) with some panels of an expert's matrix, on the calling thread.
template <class Number, class Result>
void multiply_some(const ExpertProducts& products, const Tile& tile, const Rows<Number>& x, int64_t row, int64_t count,
                   Result* out) {
  const StackProduct& first = products.first;
  const int64_t output = tile.first * PANEL, left = first.outputs - output;
  const int64_t outputs = left < tile.panels * PANEL ? left : tile.panels * PANEL;
  const char* weights = static_cast<const char*>(first.weights) + tile.expert * products.stride + tile.first * products.panel;
  const Number* bias = static_cast<const Number*>(first.bias);
  if (bias) bias += tile.expert * first.outputs + output;
  constexpr bool WIDE = sizeof(Result) == sizeof(float);
  out += row * first.outputs + output;
  if (x.quantized)
    first.multiply_quantized(x.quantized, x.chosen + row, count, weights, outputs, first.inputs, bias,
                             sizeof(Number) != sizeof(float), out, first.outputs, WIDE, first.layout);
  else
    first.multiply(x.numbers + row * first.inputs, first.inputs, count, weights, outputs, first.inputs, bias, out,
                   first.outputs, WIDE, first.layout, nullptr);
}

// Multiply the rows x of each expert with the expert's matrix.
template <class Number, class Result>
void multiply_each(const ExpertProducts& products, const Sorted& sorted, const Rows<Number>& x, Result* out) {
  const int64_t panels = panels_of(products.first.outputs), threads = omp_get_max_threads();
  const auto work = [&](int64_t expert) {
    const int64_t rows = sorted.offsets[expert + 1] - sorted.offsets[expert];
    return rows == 0 ? 0 : rows < FEW_ROWS ? FEW_ROWS : rows;
  };
  int64_t total = 0;
  for (int64_t e = 0; e < sorted.experts; e++) total += work(e);
  const int64_t share = total / (TILES * threads) + 1;
  const auto tiles_of = [&](int64_t expert) {
    const int64_t wanted = (work(expert) + share - 1) / share;
    return wanted < panels ? wanted : panels;
  };
  int64_t count = 0;
  for (int64_t e = 0; e < sorted.experts; e++) count += tiles_of(e);
  Tile* tiles = reinterpret_cast<Tile*>(own_scratch.at_least(count * sizeof(Tile)));
  for (int64_t e = 0, at = 0; e < sorted.experts; e++) {
    const int64_t parts = tiles_of(e);
    for (int64_t part = 0; part < parts; part++) {
      const int64_t begin = panels * part / parts;
      tiles[at++] = {e, begin, panels * (part + 1) / parts - begin};
    }
  }
#pragma omp parallel for schedule(dynamic)
  for (int64_t i = 0; i < count; i++) {
    const Tile& tile = tiles[i];
    const int64_t row = sorted.offsets[tile.expert], rows = sorted.offsets[tile.expert + 1] - row;
    multiply_some(products, tile, x, row, rows, out);
  }
}

// Add to y, sorted as x, the low-rank products of the tokens' adapters with each expert's rows.
//
// from: the step's token that is the first of the pass; tokens: number of tokens of the pass
template <class Number, class Result>
void change_each(const LoraGroup* groups, int64_t count, const Sorted& sorted, int64_t from, int64_t tokens,
                 const Number* x, int64_t inputs, Result* y, int64_t outputs) {
  static thread_local Scratch members;
  const int64_t rows = sorted.offsets[sorted.experts];
  for (const LoraGroup* group = groups; group < groups + count; group++) {
    Carver sizes(nullptr);
    sizes.take<bool>(tokens), sizes.take<int64_t>(rows);
    Carver carver(members.at_least(sizes.used));
    bool* member = carver.take<bool>(tokens);
    int64_t* chosen = carver.take<int64_t>(rows);  // the adapter's rows of each expert, at the expert's offset
    memset(member, 0, tokens);
    for (int64_t i = 0; i < group->count; i++)
      if (group->rows[i] >= from && group->rows[i] < from + tokens) member[group->rows[i] - from] = true;
#pragma omp parallel for schedule(dynamic)
    for (int64_t e = 0; e < sorted.experts; e++) {
      static thread_local Scratch parts_of_expert;
      LoraGroup part = *group;
      part.rows = chosen + sorted.offsets[e], part.count = 0;
      for (int64_t row = sorted.offsets[e]; row < sorted.offsets[e + 1]; row++)
        if (member[sorted.choices[row] / sorted.chosen]) chosen[sorted.offsets[e] + part.count++] = row;
      if (part.count == 0) continue;
      LoraPart* parts = reinterpret_cast<LoraPart*>(parts_of_expert.at_least(part.part_count * sizeof(LoraPart)));
      part.a = static_cast<const Number*>(group->a) + e * group->ranks * inputs;
      for (int64_t i = 0; i < part.part_count; i++) {
        parts[i] = group->parts[i];
        parts[i].b = static_cast<const Number*>(parts[i].b) + e * parts[i].outputs * parts[i].ranks;
      }
      part.parts = parts;
      const bool half = sizeof(Number) != sizeof(float), wide = sizeof(Result) == sizeof(float);
      INFD_HERE(lora)(half, wide, y, outputs, x, inputs, inputs, nullptr, &part, 1);
    }
  }
}

// out = activation(gated) * (up + offset), with limits.
template <class Number>
void gate_row(const Experts& layer, const Number* gated, const Number* up, Number* out, int64_t size) {
  if (layer.alpha == 1 && layer.offset == 0 && layer.limit == INFINITY)
    return layer.gelu ? gate<Gelu>(gated, up, out, size) : gate<Silu>(gated, up, out, size);
  const Vec most = set(layer.limit), least = set(-layer.limit);
  const auto compute = [&](Vec x, Vec y) {
    x = min(most, x), y = min(most, max(least, y));
    const Vec activated = layer.gelu ? Gelu()(x) : x / (set(1) + exponential(set(0) - x * set(layer.alpha)));
    return activated * (y + set(layer.offset));
  };
  int64_t i = 0;
  for (; i + WIDTH <= size; i += WIDTH) store(out + i, compute(load(gated + i), load(up + i)));
  if (i < size) {
    Number last[WIDTH];
    store(last, compute(load_first(gated + i, size - i), load_first(up + i, size - i)));
    memcpy(out + i, last, (size - i) * sizeof(Number));
  }
}

// Whether and how threads compute experts from inputs to outputs.
class Whole {
 public:
  // Return the number of tasks; 0: too few for each thread.
  static int64_t count_of(const int64_t* offsets, int64_t experts) {
    const Whole whole(offsets, experts);
    const int64_t count = whole.each(offsets, experts, [](const Task&) {});
    return count < TILES * omp_get_max_threads() ? 0 : count;
  }

  // Write the tasks, those with most rows first, so that the threads' last ones are short.
  static void divide(const int64_t* offsets, int64_t experts, Task* tasks) {
    const Whole whole(offsets, experts);
    Task* next = tasks;
    whole.each(offsets, experts, [&](const Task& task) { *next++ = task; });
    qsort(tasks, next - tasks, sizeof(Task), by_rows);
  }

 private:
  int64_t most;  // rows of a task

  Whole(const int64_t* offsets, int64_t experts) {
    const int64_t share = offsets[experts] / (TILES * omp_get_max_threads());
    most = share < LEAST_TOGETHER ? LEAST_TOGETHER : share > MOST_TOGETHER ? MOST_TOGETHER : share;
  }

  template <class Take>
  int64_t each(const int64_t* offsets, int64_t experts, const Take& take) const {
    int64_t count = 0;
    for (int64_t e = 0; e < experts; e++) {
      const int64_t rows = offsets[e + 1] - offsets[e], parts = (rows + most - 1) / most;
      for (int64_t part = 0; part < parts; part++) {
        const int64_t begin = rows * part / parts;
        take(Task{e, offsets[e] + begin, rows * (part + 1) / parts - begin});
      }
      count += parts;
    }
    return count;
  }

  static int by_rows(const void* a, const void* b) {
    const int64_t x = static_cast<const Task*>(a)->rows, y = static_cast<const Task*>(b)->rows;
    return (x < y) - (x > y);
  }
};

// The intermediate results of an expert's rows, in scratch memory.
template <class Number>
struct Between {
  Number *inputs, *gate_up, *gated;

  Between(Carver& carver, const Experts& layer, int64_t rows) {
    inputs = carver.take<Number>(rows * layer.router.hidden);
    gate_up = carver.take<Number>(rows * layer.gate_up.first.outputs);
    gated = carver.take<Number>(rows * layer.down.first.inputs);
  }
};

// Copy a choice's row of x, multiplied by the choice's weight if the layer's router says so.
template <class Number>
void take_input(const Router& router, const Number* x, const float* weights, int64_t choice, Number* row) {
  memcpy(row, x + choice / router.chosen * router.hidden, router.hidden * sizeof(Number));
  if (router.on_input) scale(row, weights[choice], router.hidden);
}

template <class Number>
void gate_rows(const Experts& layer, const Between<Number>& rows, int64_t row) {
  const int64_t inner = layer.down.first.inputs;
  const Number* gated = rows.gate_up + row * layer.gate_up.first.outputs;
  gate_row(layer, gated, gated + inner, rows.gated + row * inner, inner);
}

// Fetch the first lines of an expert's matrix: the hardware prefetcher needs some reads to predict the others.
void fetch_head(const ExpertProducts& products, int64_t expert) {
  const char* weights = static_cast<const char*>(products.first.weights) + expert * products.stride;
  for (int64_t line = 0; line < HEAD_LINES; line++) _mm_prefetch(weights + line * 64, _MM_HINT_T1);
}

// Compute the outputs of experts, each task from inputs to outputs on one thread.
template <class Number>
void compute_whole(const Experts& layer, const Sorted& sorted, int64_t count, const Number* x, const char* quantized,
                   const float* weights, float* outputs) {
  static thread_local Scratch between;
  Task* tasks = reinterpret_cast<Task*>(own_scratch.at_least(count * sizeof(Task)));
  Whole::divide(sorted.offsets, sorted.experts, tasks);
  int64_t taken = 0;
#pragma omp parallel
  for (int64_t i; (i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < count;) {
    const Task& task = tasks[i];
    Carver sizes(nullptr);
    Between<Number>(sizes, layer, task.rows);
    Carver carver(between.at_least(sizes.used));
    const Between<Number> rows(carver, layer, task.rows);
    for (int64_t row = 0; row < task.rows && !quantized; row++)
      take_input(layer.router, x, weights, sorted.choices[task.row + row], rows.inputs + row * layer.router.hidden);
    const Tile gate_up = {task.expert, 0, panels_of(layer.gate_up.first.outputs)};
    const Tile down = {task.expert, 0, panels_of(layer.down.first.outputs)};
    const Rows<Number> inputs{rows.inputs, quantized, sorted.tokens + task.row};
    multiply_some(layer.gate_up, gate_up, inputs, 0, task.rows, rows.gate_up);
    if (task.rows <= FEW_ROWS) {
      const int64_t next = __atomic_load_n(&taken, __ATOMIC_RELAXED);
      fetch_head(layer.down, task.expert);
      if (next < count) fetch_head(layer.gate_up, tasks[next].expert);
    }
    for (int64_t row = 0; row < task.rows; row++) gate_rows(layer, rows, row);
    multiply_some(layer.down, down, Rows<Number>{rows.gated}, 0, task.rows, outputs + task.row * layer.router.hidden);
  }
}

// Compute the outputs of experts, all of them matrix by matrix.
template <class Number>
void compute_by_tiles(const Experts& layer, const Sorted& sorted, int64_t from, int64_t tokens, const Number* x,
                      const char* quantized, const float* weights, const ExpertChanges* changes, float* outputs) {
  static thread_local Scratch between;
  const int64_t count = sorted.offsets[sorted.experts], size = layer.router.hidden, inner = layer.down.first.inputs;
  Carver sizes(nullptr);
  Between<Number>(sizes, layer, count);
  Carver carver(between.at_least(sizes.used));
  const Between<Number> rows(carver, layer, count);
  if (changes || !quantized) {
#pragma omp parallel for if (count * size > ENOUGH)
    for (int64_t i = 0; i < count; i++) take_input(layer.router, x, weights, sorted.choices[i], rows.inputs + i * size);
  }
  multiply_each(layer.gate_up, sorted, Rows<Number>{rows.inputs, quantized, sorted.tokens}, rows.gate_up);
  if (changes)
    change_each(changes->gate_up, changes->gate_up_count, sorted, from, tokens, rows.inputs, size, rows.gate_up,
                layer.gate_up.first.outputs);
#pragma omp parallel for if (count * inner > ENOUGH)
  for (int64_t i = 0; i < count; i++) gate_rows(layer, rows, i);
  multiply_each(layer.down, sorted, Rows<Number>{rows.gated}, outputs);
  if (changes) change_each(changes->down, changes->down_count, sorted, from, tokens, rows.gated, inner, outputs, size);
}

// The order, the quantized inputs and the outputs of a pass, in scratch memory.
struct Pass {
  float* outputs;
  char* quantized;                              // null: the form does not quantize inputs, or the router changes them
  int64_t *place, *offsets, *choices, *tokens;  // the sorted row of each choice; see Sorted

  Pass(Carver& carver, const Experts& layer, int64_t tokens) {
    const int64_t count = tokens * layer.router.chosen;
    outputs = carver.take<float>(count * layer.router.hidden);
    const bool quantizes = layer.gate_up.first.quantize && !layer.router.on_input;
    quantized = quantizes ? carver.take<char>(tokens * layer.gate_up.first.quantized_bytes) : nullptr;
    place = carver.take<int64_t>(count);
    offsets = carver.take<int64_t>(layer.router.experts + 1);
    choices = carver.take<int64_t>(count);
    this->tokens = carver.take<int64_t>(count);
  }
};

template <class Number>
void compute(const Experts& layer, const Pass& pass, const Number* x, int64_t from, int64_t tokens,
             const int64_t* experts, const float* weights, const ExpertChanges* changes, Number* out) {
  const Router& router = layer.router;
  const int64_t chosen = router.chosen, size = router.hidden, count = tokens * chosen;
  memset(pass.offsets, 0, (router.experts + 1) * sizeof(int64_t));
  for (int64_t i = 0; i < count; i++) pass.offsets[experts[i] + 1]++;
  for (int64_t e = 0; e < router.experts; e++) pass.offsets[e + 1] += pass.offsets[e];
  for (int64_t i = 0; i < count; i++) {
    pass.place[i] = pass.offsets[experts[i]]++;
    pass.choices[pass.place[i]] = i, pass.tokens[pass.place[i]] = i / chosen;
  }
  for (int64_t e = router.experts; e > 0; e--) pass.offsets[e] = pass.offsets[e - 1];
  pass.offsets[0] = 0;

  if (pass.quantized) {
    const StackProduct& first = layer.gate_up.first;
#pragma omp parallel for if (tokens * size > ENOUGH)
    for (int64_t t = 0; t < tokens; t++)
      first.quantize(x + t * size, size, 1, size, pass.quantized + t * first.quantized_bytes, first.layout);
  }
  const Sorted sorted{pass.offsets, pass.choices, pass.tokens, router.experts, chosen};
  const int64_t tasks = changes ? 0 : Whole::count_of(pass.offsets, router.experts);
  if (tasks > 0)
    compute_whole(layer, sorted, tasks, x, pass.quantized, weights, pass.outputs);
  else
    compute_by_tiles(layer, sorted, from, tokens, x, pass.quantized, weights, changes, pass.outputs);
#pragma omp parallel for if (count * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++) {
    const auto row = [&](int64_t slot) { return pass.outputs + pass.place[t * chosen + slot] * size; };
    const auto weight = [&](int64_t slot) { return router.on_input ? 1 : weights[t * chosen + slot]; };
    const int64_t next = t + 1 < tokens ? chosen : 0;
    int64_t at = 0;
    for (; at + WIDTH <= size; at += WIDTH) {
      // The hardware prefetcher does not predict the rows of the next token.
      for (int64_t slot = 0; slot < next; slot++)
        _mm_prefetch(reinterpret_cast<const char*>(row(chosen + slot) + at), _MM_HINT_T1);
      Vec total = load(row(0) + at) * set(weight(0));
      for (int64_t slot = 1; slot < chosen; slot++) total = total + load(row(slot) + at) * set(weight(slot));
      store(out + t * size + at, total);
    }
    for (; at < size; at++) {
      float total = row(0)[at] * weight(0);
      for (int64_t slot = 1; slot < chosen; slot++) total = total + row(slot)[at] * weight(slot);
      set(out + t * size + at, total);
    }
  }
}

template <class Number>
void compute_all(const Experts& layer, const Number* x, int64_t tokens, const int64_t* chosen, const float* weights,
                 const ExpertChanges* changes, Number* out) {
  const int64_t k = layer.router.chosen, size = layer.router.hidden, most = MOST_ROWS / k;
  const int64_t passes = (tokens + most - 1) / most;
  for (int64_t i = 0; i < passes; i++) {
    const int64_t from = tokens * i / passes, count = tokens * (i + 1) / passes - from;
    Carver sizes(nullptr);
    Pass(sizes, layer, count);
    Carver carver(scratch.at_least(sizes.used));
    compute(layer, Pass(carver, layer, count), x + from * size, from, count, chosen + from * k, weights + from * k,
            changes, out + from * size);
  }
}

template <class Number>
void add_rows(Number* y, const Number* shared, const Number* gate, int64_t tokens, int64_t size) {
#pragma omp parallel for if (tokens * size > ENOUGH)
  for (int64_t t = 0; t < tokens; t++) {
    const float factor = gate ? 1 / (1 + expf(-to_float(gate[t]))) : 1;
    Number* sum = y + t * size;
    const Number* added = shared + t * size;
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) store(sum + i, fma(load(added + i), set(factor), load(sum + i)));
    for (; i < size; i++) set(sum + i, fmaf(to_float(added[i]), factor, to_float(sum[i])));
  }
}

}  // namespace

// out [tokens, hidden] = the weighted sums of the outputs of the experts chosen [tokens, k] for x [tokens, hidden].
// changes: of the experts' matrices by adapters, or null.
INFD_KERNEL(experts)
(int64_t half, const Experts* layer, const void* x, int64_t tokens, const int64_t* chosen, const float* weights,
 const ExpertChanges* changes, void* out) {
  if (half)
    compute_all(*layer, typed<bf16>(x), tokens, chosen, weights, changes, typed<bf16>(out));
  else
    compute_all(*layer, typed<float>(x), tokens, chosen, weights, changes, typed<float>(out));
}

// y += shared * sigmoid(gate); y and shared [tokens, size], gate [tokens], or null: y += shared.
INFD_KERNEL(add_shared)
(int64_t half, void* y, const void* shared, const void* gate, int64_t tokens, int64_t size) {
  if (half)
    add_rows(typed<bf16>(y), typed<bf16>(shared), typed<bf16>(gate), tokens, size);
  else
    add_rows(typed<float>(y), typed<float>(shared), typed<float>(gate), tokens, size);
}
