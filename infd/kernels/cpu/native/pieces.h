// How the spans of a step are cut into pieces: some queries of a span, and a range of their keys. And how a task walks
// over the keys of its piece, block by block.

#pragma once

#include "key_block.h"

namespace {

constexpr int64_t SPLIT = 512;  // keys of a piece, in spans that are also cut along their keys
constexpr int64_t SHORT = 16;   // most tokens of a short span; longer spans have enough pieces without cuts along keys

// Some queries of a span, and the range of their keys that one task covers.
struct Piece {
  int32_t span, first_query, queries;
  int32_t parts;     // number of consecutive pieces with these queries, whose results are merged
  int32_t part;      // number of this one among them
  int64_t begin, end;
  int64_t partial;   // number of queries of earlier pieces in Partials
  int64_t row;       // of the first query in q and out
  int32_t whole;     // number of queries, if all tokens are queries: it decides how the piece is computed
};

inline bool is_short(const AttentionStep& step, const Piece& piece) {
  return !step.packed && step.offsets[piece.span + 1] - step.offsets[piece.span] <= SHORT;
}

// The largest number of queries of a piece, for tasks of at most `rows` rows unless a single query has more.
inline int64_t most_queries(int64_t rows, int64_t shared) { return shared < rows ? rows / shared : 1; }

// The number of queries of each piece but the last, so that all have about as many.
inline int64_t evenly(int64_t count, int64_t most) {
  const int64_t pieces = (count + most - 1) / most;
  return pieces > 1 ? (count + pieces - 1) / pieces : most;
}

// The piece of at most `most` queries of a span, from `query` on, of a packed step.
inline Piece piece_of(const AttentionStep& step, int64_t span, int64_t query, int64_t most) {
  const int64_t first = step.offsets[span], count = step.offsets[span + 1] - first;
  const int64_t queries = count - query < most ? count - query : most;
  const int64_t begin = step.before < 0 || query < step.before ? 0 : query - step.before;
  const int64_t last = query + queries + step.after, end = step.after < 0 || last > count ? count : last;
  return {int32_t(span), int32_t(query), int32_t(queries), 1, 0, begin, end, 0, first + query, int32_t(queries)};
}

// Call `visit` with a piece for each of a step's `queries`: the part of the piece that it would be in if all tokens were
// queries, with the keys of that piece. So its result has the same bits.
template <class Visit>
void cut_queries(const AttentionStep& step, int64_t limit, bool even, Visit visit) {
  int64_t span = 0;
  for (int64_t row = 0; row < step.tokens; row++) {
    while (step.offsets[span + 1] <= step.queries[row]) span++;
    const int64_t query = step.queries[row] - step.offsets[span], count = step.offsets[span + 1] - step.offsets[span];
    const int64_t most = even ? evenly(count, limit) : limit;
    Piece piece = piece_of(step, span, query / most * most, most);
    piece.first_query = int32_t(query), piece.queries = 1, piece.row = row;
    visit(piece);
  }
}

// The number of queries of a short span that are one piece, from `query` on: they see the keys of their sequence from the
// first on, and end in the same range of SPLIT keys, so that each has the parts that it has alone. Half of the span, so
// that two threads have as many.
inline int64_t together(const AttentionStep& step, int64_t span, int64_t query, int64_t limit) {
  const int64_t count = step.offsets[span + 1] - step.offsets[span], half = (count + 1) / 2;
  const int64_t most = half < limit ? half : limit, at = step.start[span] + query;
  int64_t queries = 1;
  while (queries < most && query + queries < count && (at + queries) / SPLIT == at / SPLIT &&
         (step.window == 0 || at + queries < step.window))
    queries++;
  return queries;
}

// Call `visit` with every piece of a step, in order of spans, queries, keys. limit: queries of a piece; limit_short: of one
// of a short span.
template <class Visit>
void cut(const AttentionStep& step, int64_t limit, int64_t limit_short, bool even, Visit visit) {
  if (step.queries) return cut_queries(step, limit, even, visit);
  int64_t partial = 0;
  for (int64_t span = 0; span < step.spans; span++) {
    const int64_t count = step.offsets[span + 1] - step.offsets[span];
    if (step.packed) {
      const int64_t most = even ? evenly(count, limit) : limit;
      for (int64_t query = 0; query < count; query += most) visit(piece_of(step, span, query, most));
      continue;
    }
    const int64_t start = step.start[span];
    const int64_t most = even ? evenly(count, limit) : limit;
    for (int64_t query = 0, queries; query < count; query += queries) {
      queries = count <= SHORT ? together(step, span, query, limit_short) : count - query < most ? count - query : most;
      const int64_t behind = step.window > 0 ? start + query - step.window + 1 : 0;
      const int64_t begin = behind > 0 ? behind : 0, end = start + query + queries;
      const int64_t parts = count <= SHORT ? (end - 1) / SPLIT - begin / SPLIT + 1 : 1;
      for (int64_t part = 0; part < parts; part++) {
        const int64_t from = part == 0 ? begin : (begin / SPLIT + part) * SPLIT;
        const int64_t to = part == parts - 1 ? end : (begin / SPLIT + part + 1) * SPLIT;
        visit(Piece{int32_t(span), int32_t(query), int32_t(queries), int32_t(parts), int32_t(part), from, to, partial,
                    step.offsets[span] + query, int32_t(queries)});
        if (parts > 1) partial += queries;
      }
    }
  }
}

// One thread's unit of work: a piece for one key head.
struct Task {
  const Piece* piece;
  int64_t head;
};

template <class Number>
Number* result(const AttentionLayer& layer, const Piece& piece, int64_t head, int64_t row) {
  const int64_t shared = layer.heads / layer.kv_heads;
  return static_cast<Number*>(layer.out) + ((piece.row + row / shared) * layer.heads + head * shared + row % shared) * layer.size;
}

// A row's result: its weighted sums, by the total of its weights.
template <class Number>
void divide(const float* sums, float total, Number* out, int64_t size) {
  int64_t d = 0;
  for (; d + WIDTH <= size; d += WIDTH) store(out + d, load(sums + d) / set(total));
  for (; d < size; d++) set(out + d, sums[d] / total);
}

// Which keys of a block the queries of a piece see.
struct Sight {
  int64_t position;     // of the piece's first query, in its sequence or, without a cache, in its span
  int64_t back, ahead;  // the most tokens between a query and the keys that it sees; -1: any number

  Sight(const AttentionStep& step, const Piece& piece)
      : position((step.packed ? 0 : step.start[piece.span]) + piece.first_query),
        back(step.packed ? step.before : step.window > 0 ? step.window - 1 : -1),
        ahead(step.packed ? step.after : 0) {}

  struct Keys {
    int64_t self, first, last;  // relative to the block: the query's own position, and the range that it sees
  };
  Keys of(int64_t query, int64_t begin, int64_t count) const {
    const int64_t self = position + query - begin;
    const int64_t behind = back < 0 ? 0 : self - back, beyond = ahead < 0 ? count : self + ahead + 1;
    return {self, behind < 0 ? 0 : behind < count ? behind : count, beyond < 0 ? 0 : beyond < count ? beyond : count};
  }
};

// Call `act` with every block of a task's keys, the position of its first key, and the block that follows, which may be
// the first one of `after`, the thread's next task; without keys if there is none.
template <class Cached, class Act>
void each_block(const AttentionStep& step, const AttentionLayer& layer, Task task, Task after, Act act) {
  const Piece& piece = *task.piece;
  KeyBlock<Cached> blocks[2];
  const auto find = [&](KeyBlock<Cached>& block, const Task& of, int64_t begin) {
    const int64_t next = (begin / BLOCK + 1) * BLOCK, end = next < of.piece->end ? next : of.piece->end;
    block.find(step, layer, of.piece->span, of.head, begin, end);
  };
  find(blocks[0], task, piece.begin);
  int turn = 0;
  for (int64_t begin = piece.begin; begin < piece.end; turn ^= 1) {
    const KeyBlock<Cached>& block = blocks[turn];
    KeyBlock<Cached>& next = blocks[turn ^ 1];
    if (begin + block.count < piece.end)
      find(next, task, begin + block.count);
    else if (after.piece)
      find(next, after, after.piece->begin);
    else
      next.count = 0;
    act(block, begin, next);
    begin += block.count;
  }
}

}  // namespace
