// Paged attention, directly from the cache, for spans of any length; and attention without a cache.
//
// A piece is some queries of one span and a range of their keys; a task computes one piece for one key head. A task has
// a row for each of the piece's queries and each query head of the key head. Keys are processed in blocks: scores,
// online softmax, weighted sums of values. Tasks with many rows transpose a block's keys, and interleave its values, in
// scratch memory, so that both products load whole vectors. Tasks with few rows, as in decoding, read the cache itself.
// Tasks of several queries in bfloat16 are computed in tiles (tiles.h), if the CPU multiplies bfloat16.
//
// int8 caches are not dequantized: scores are multiplied by the keys' scales, softmax weights by the values' scales.
//
// How a span is cut into pieces depends on the span alone, so results are bitwise independent of other spans and of the
// number of threads. Queries of a short span read whole blocks of keys together, but the last keys of each alone, so that
// the result of a query is that of a span of one token: a token verified among drafts has the bits of a token decoded alone.

#include "few_queries.h"
#include "many_queries.h"
#include "pieces.h"
#include "scratch.h"
#include "sharing.h"
#include "softmax.h"
#include "tiles_amx.h"
#include "tiles_vectors.h"

namespace {

constexpr int64_t ROWS = 64;  // most rows of a task without tiles, unless a single query has more
constexpr int64_t FEW = 8;    // rows up to which transposing a block costs more than it saves
constexpr int64_t TOGETHER = 4;  // most queries of a short span that read keys together

// The scratch memory of one thread.
template <class Form>
struct Workspace {
  Units queries, keys, values, weights;
  Matrix<float> scores, sums, spare;
  SoftmaxState* seen;

  // `width` is the head size, padded to whole vectors of units. Padding of queries is zero; padding of sums is
  // arbitrary.
  Workspace(Carver& carver, int64_t rows, int64_t width)
      : queries{carver.take<uint32_t>(rows * width / Form::PER_UNIT), width / Form::PER_UNIT},
        keys{carver.take<uint32_t>(width / Form::PER_UNIT * BLOCK), BLOCK},
        values{carver.take<uint32_t>(BLOCK / Form::PER_UNIT * width), width},
        weights{carver.take<uint32_t>(rows * BLOCK / Form::PER_UNIT), BLOCK / Form::PER_UNIT},
        scores{carver.take<float>(rows * BLOCK), BLOCK},
        sums{carver.take<float>(rows * width), width},
        spare{carver.take<float>(WIDTH * width), width},
        seen(carver.take<SoftmaxState>(rows)) {}
};

// Attend the queries of a task's piece to the piece's keys. first_row: the first query's row of the scratch memory, where
// `attend` has placed the queries. few: the products of few rows.
template <class Number, class Cached, class Form>
void attend_keys(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after, bool few, Workspace<Form>& all,
                 int64_t first_row) {
  const Piece& piece = *task.piece;
  const int64_t head = task.head;
  const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
  Workspace<Form> workspace = all;
  workspace.queries = all.queries.from(first_row), workspace.weights = all.weights.from(first_row);
  workspace.scores = all.scores.from(first_row), workspace.sums = all.sums.from(first_row), workspace.seen += first_row;
  const int64_t width = workspace.sums.pitch;
  const Scores scores(layer);
  const Sight sight(step, piece);
  Scales k_scales, v_scales;
  Biases biases;
  const bool plain = !layer.quantized && !layer.bias && !(layer.softcap > 0);
  each_block<Cached>(step, layer, task, after, [&](const auto& block, int64_t begin, const auto& next) {
    const int64_t padded = block.padded();
    if (few) {
      by_groups(rows, [&](auto group, int64_t row) {
        const Prefetch<Cached> ahead{block.v, row == 0 ? block.count : 0, padded};
        score_rows<Cached, Form, group.value>(workspace.queries.from(row), block, ahead, size, workspace.scores.from(row));
      });
    } else {
      place_keys<Cached, Form>(block, next, size, workspace.keys, workspace.spare);
      multiply<Form, false>(workspace.queries, workspace.keys, workspace.scores, rows, padded, size / Form::PER_UNIT);
    }
    k_scales.read(block.k, padded);
    v_scales.read(block.v, padded);
    for (int64_t row = 0; row < rows; row++) {
      const auto [self, first, last] = sight.of(row / shared, begin, block.count);
      if (RowOfTile<Number, Cached, Form>::EXISTS && plain) {
        RowOfTile<Number, Cached, Form>::weigh(workspace.scores.row(row), first, last, scores.factor, workspace.seen[row],
                                               workspace.weights.row(row), workspace.sums.row(row), width);
        continue;
      }
      const float* bias = biases.read(layer, head * shared + row % shared, self, padded);
      auto* weights = reinterpret_cast<typename Form::Number*>(workspace.weights.row(row));
      if (plain && first == 0 && last == BLOCK)
        softmax_of_block<Form>(workspace.scores.row(row), scores.factor, workspace.seen[row], weights,
                               workspace.sums.row(row), width);
      else
        softmax<Form>(workspace.scores.row(row), padded, first, last, scores, k_scales, v_scales, workspace.seen[row],
                      weights, workspace.sums.row(row), width, bias);
    }
    if (few) {
      by_groups(rows, [&](auto group, int64_t row) {
        const Prefetch<Cached> ahead{next.k, row == 0 ? next.count : 0, block.count};
        weigh_rows<Cached, Form, group.value>(workspace.weights.from(row), block, ahead, size, workspace.sums.from(row));
      });
    } else {
      place_values<Cached, Form>(block, next, size, workspace.values);
      const int64_t steps = (block.count + Form::PER_UNIT - 1) / Form::PER_UNIT;
      multiply<Form, true>(workspace.weights, workspace.values, workspace.sums, rows, width, steps);
    }
  });
}

// Attend a piece's queries to its keys, for one key head; store sums and softmax states in the scratch memory, by row.
// `after`: this thread's next task, whose first keys are prefetched; without a piece if no task follows.
template <class Number, class Cached, class Form>
void attend(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after, Workspace<Form>& workspace) {
  const Piece& piece = *task.piece;
  const int64_t head = task.head;
  const int64_t shared = layer.heads / layer.kv_heads, size = layer.size, rows = piece.queries * shared;
  const int64_t width = workspace.sums.pitch;
  const Number* q = static_cast<const Number*>(layer.q) + piece.row * layer.q_stride + head * shared * size;
  for (int64_t row = 0; row < rows; row++) {
    auto* query = reinterpret_cast<typename Form::Number*>(workspace.queries.row(row));
    convert(q + row / shared * layer.q_stride + row % shared * size, query, size);
    memset(query + size, 0, (width - size) * sizeof *query);
    // Of several pieces with these queries, the first counts the sink.
    const bool sink = layer.sinks && piece.part == 0;
    workspace.seen[row] = sink ? SoftmaxState{layer.sinks[head * shared + row % shared] * LOG2_E, 1} : SoftmaxState{-INFINITY, 0};
  }
  memset(workspace.sums.at, 0, rows * width * sizeof(float));
  if (piece.queries == 1 || !is_short(step, piece))
    return attend_keys<Number, Cached, Form>(step, layer, task, after, piece.whole * shared <= FEW, workspace, 0);
  // Blocks that all queries see whole are read once. The keys that follow are read for each query, as for one alone.
  const int64_t start = step.start[piece.span] + piece.first_query + 1;
  Piece common = piece, own[TOGETHER];
  if (piece.part == piece.parts - 1) common.end = start / BLOCK * BLOCK;
  if (common.end == piece.end) return attend_keys<Number, Cached, Form>(step, layer, task, after, true, workspace, 0);
  for (int64_t query = 0; query < piece.queries; query++) {
    own[query] = piece;
    own[query].first_query += query, own[query].queries = 1, own[query].begin = common.end, own[query].end = start + query;
  }
  int64_t query = 0;
  while (query < piece.queries && own[query].begin == own[query].end) query++;
  const auto next = [&](int64_t query) { return query < piece.queries ? Task{own + query, head} : after; };
  if (common.begin < common.end)
    attend_keys<Number, Cached, Form>(step, layer, Task{&common, head}, next(query), true, workspace, 0);
  for (; query < piece.queries; query++)
    attend_keys<Number, Cached, Form>(step, layer, Task{own + query, head}, next(query + 1), true, workspace, query * shared);
}

// Results of pieces to be merged: for each row its sums, then its softmax state.
struct Partials {
  float* memory;
  int64_t kv_heads, shared, width;

  int64_t pitch() const { return width + WIDTH; }
  float* row(const Piece& piece, int64_t head, int64_t row) const {
    return memory + ((piece.partial * kv_heads + head * piece.queries) * shared + row) * pitch();
  }
};

// Merge the results of all pieces with equal queries into the output. `piece` is the first of these pieces; its sums
// are overwritten.
template <class Number>
void merge(const AttentionLayer& layer, const Piece* piece, int64_t head, const Partials& partials) {
  const int64_t width = partials.width;
  for (int64_t row = 0; row < piece->queries * partials.shared; row++) {
    float most = -INFINITY, total = 0;
    for (int part = 0; part < piece->parts; part++) {
      const float seen = partials.row(piece[part], head, row)[width];
      most = seen > most ? seen : most;
    }
    float* sums = partials.row(piece[0], head, row);
    for (int part = 0; part < piece->parts; part++) {
      const float* more = partials.row(piece[part], head, row);
      const Vec share = power_of_two(set(more[width] - most));
      total += more[width + 1] * first_of(share);
      for (int64_t d = 0; d < width; d += WIDTH) {
        const Vec weighted = load(more + d) * share;
        store(sums + d, part == 0 ? weighted : load(sums + d) + weighted);
      }
    }
    divide(sums, total, result<Number>(layer, *piece, head, row), layer.size);
  }
}

template <class Number, class Cached, class Form>
void run(const AttentionStep& step, const AttentionLayer& layer) {
  static thread_local Scratch shared_scratch, own_scratch;
  const int64_t heads = layer.kv_heads, shared = layer.heads / heads, size = layer.size;
  const int64_t width = whole_vectors((size + Form::PER_UNIT - 1) / Form::PER_UNIT) * Form::PER_UNIT;
  int64_t count = 0, partial = 0, products = 0;
  using InTiles = Tiles<Number, Cached, Form>;
  const bool tiled = InTiles::ROWS > 0 && !layer.bias && !(layer.softcap > 0);
  const int64_t most = most_queries(tiled ? InTiles::ROWS : ROWS, shared);
  const int64_t most_short = shared <= FEW ? TOGETHER : 1;
  cut(step, most, most_short, tiled, [&](const Piece& piece) {
    count++;
    products += (piece.end - piece.begin) * piece.queries * layer.heads * size;
    if (piece.parts > 1) partial = piece.partial + piece.queries;
  });
  Partials partials{nullptr, heads, shared, width};
  const auto carve = [&](Carver carver, Piece** pieces) {
    *pieces = carver.take<Piece>(count);
    partials.memory = carver.take<float>(partial * heads * shared * partials.pitch());
    return carver.used;
  };
  Piece* pieces;
  carve(Carver(shared_scratch.at_least(carve(Carver(nullptr), &pieces))), &pieces);
  int64_t at = 0;
  cut(step, most, most_short, tiled, [&](const Piece& piece) { pieces[at++] = piece; });

  // Rows of a task in tiles, and of one without.
  const int64_t together = most_short * shared, few_rows = together > FEW ? together : FEW;
  const int64_t tiled_rows = tiled ? most * shared : 0, rows = tiled ? few_rows : most * shared;
  const int64_t used = step.queries ? step.tokens : step.offsets[step.spans], row = layer.heads * size;
  memset(static_cast<Number*>(layer.out) + used * row, 0, (step.tokens - used) * row * sizeof(Number));
  const int64_t tasks = count * heads;
  int64_t taken = 0;
#pragma omp parallel if (tasks > 1 && worth_sharing(products, layer.awake))
  {
    Carver sizes(nullptr);
    Workspace<Form>(sizes, rows, width), InTiles(sizes, tiled_rows, width);
    Carver carver(own_scratch.at_least(sizes.used));
    Workspace<Form> workspace(carver, rows, width);
    InTiles tiles(carver, tiled_rows, width);
    // Backwards, so that the longest tasks come first: prompts are packed last, and later queries attend to more keys.
    const auto take = [&] {
      const int64_t left = tasks - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
      return left < 0 ? Task{nullptr, 0} : Task{pieces + left / heads, left % heads};
    };
    // A thread takes its next task before it computes one, so that it can prefetch the next task's keys.
    for (Task task = take(), after; task.piece; task = after) {
      after = take();
      const Piece& piece = *task.piece;
      // The query of a piece of one is computed as in decoding.
      if (tiled && piece.whole > 1 && piece.whole * shared > FEW && !is_short(step, piece)) {
        tiles.attend(step, layer, task, after);
        continue;
      }
      attend<Number, Cached, Form>(step, layer, task, after, workspace);
      const int64_t head = task.head;
      for (int64_t row = 0; row < piece.queries * shared; row++) {
        const SoftmaxState seen = workspace.seen[row];
        if (piece.parts == 1) {
          divide(workspace.sums.row(row), seen.total, result<Number>(layer, piece, head, row), size);
        } else {
          float* kept = partials.row(piece, head, row);
          memcpy(kept, workspace.sums.row(row), width * sizeof(float));
          kept[width] = seen.largest;
          kept[width + 1] = seen.total;
        }
      }
    }
    if (partial > 0) {
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < tasks; i++) {
        const Piece* piece = pieces + i / heads;
        const bool first = i < heads || piece[-1].span != piece->span || piece[-1].first_query != piece->first_query;
        if (piece->parts > 1 && first) merge<Number>(layer, piece, i % heads, partials);
      }
    }
  }
}

template <class Number, class Form>
void run_on_cache(const AttentionStep& step, const AttentionLayer& layer) {
  layer.quantized ? run<Number, int8_t, Form>(step, layer) : run<Number, Number, Form>(step, layer);
}

}  // namespace

INFD_KERNEL(attention)(const AttentionStep* step, const AttentionLayer* layer) {
  if (!layer->half)
    run_on_cache<float, Singles>(*step, *layer);
  else if (layer->size % Best::PER_UNIT == 0)
    run_on_cache<bf16, Best>(*step, *layer);
  else
    run_on_cache<bf16, Singles>(*step, *layer);
}
