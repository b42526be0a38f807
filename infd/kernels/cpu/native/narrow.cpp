// Limits of a row of logits, in place: top-n-sigma, min-p, top-k, typical-p, top-p, XTC, dynamic temperature.
//
// The reference is reference/drawing/narrowing.py. Dropped tokens are -inf; after the first limits a row is usually -inf
// almost everywhere, so a pass skips whole vectors of -inf.

#include "limits.h"

namespace {

constexpr float NONE = -INFINITY;
constexpr float COLDEST = 1e-3f;  // as in the reference
constexpr int64_t STRETCH = 64 * WIDTH;  // numbers added up in float; their sums are added up in double

// The columns of a row's parameters.
struct Parameters {
  float largest, temperature, sigma, top_p, min_p, typical_p, xtc_threshold, range, exponent, late;
};

struct Deviation {
  float value, mass;
};

int ascending(const void* a, const void* b) {
  const float x = static_cast<const Deviation*>(a)->value, y = static_cast<const Deviation*>(b)->value;
  return (x > y) - (x < y);
}

class Row {
 public:
  Row(float* logits, int64_t vocabulary, Scratch& members) : x_(logits), vocabulary_(vocabulary), members_(members) {}

  // Limit the row; return its temperature.
  float narrow(const Parameters& p, int64_t top_k) {
    const bool late = p.late != 0;
    const float first = late ? 1 : p.temperature;
    for (int64_t i = 0; i < vocabulary_; i++) x_[i] = (x_[i] - p.largest) / first;

    float least = late ? NONE : logf(p.min_p);
    if (p.sigma > 0) least = larger(least, -p.sigma * deviation());
    keep(Limits(x_, vocabulary_, members_).smallest(least, top_k, late ? 1 : p.top_p));
    if (p.typical_p < 1) keep_typical(p.typical_p);
    if (late) {
      if (p.top_p < 1) keep(Limits(x_, vocabulary_, members_).smallest(NONE, 0, p.top_p));
      if (p.min_p > 0) keep(likeliest() + logf(p.min_p));
    }
    if (p.xtc_threshold <= 0.5f) drop_top_choices(p.xtc_threshold);

    const float temperature = late && p.range > 0 ? dynamic(p) : p.temperature;
    if (late)
      for (int64_t i = 0; i < vocabulary_; i++) x_[i] /= temperature;
    return temperature;
  }

 private:
  float* x_;
  int64_t vocabulary_;
  Scratch& members_;

  // Sums over the kept tokens.
  struct Totals {
    int64_t count = 0;
    double mass = 0, weighted = 0;  // of e^x; of x e^x

    double log_mass() const { return log(mass); }
    double entropy() const { return log_mass() - weighted / mass; }
  };

  Vec vector(int64_t i) const {
    if (vocabulary_ - i >= WIDTH) return load(x_ + i);
    float numbers[WIDTH];
    for (int64_t lane = 0; lane < WIDTH; lane++) numbers[lane] = i + lane < vocabulary_ ? x_[i + lane] : NONE;
    return load(numbers);
  }

  int64_t lanes(int64_t i) const { return vocabulary_ - i < WIDTH ? vocabulary_ - i : WIDTH; }

  Totals totals() const {
    Totals all;
    for (int64_t first = 0; first < vocabulary_; first += STRETCH) {
      const int64_t end = first + STRETCH < vocabulary_ ? first + STRETCH : vocabulary_;
      Vec mass = set(0), weighted = set(0);
      for (int64_t i = first; i < end; i += WIDTH) {
        const Vec x = vector(i);
        if (largest(x) == NONE) continue;
        const Vec weight = exponential(x);
        mass = mass + weight;
        weighted = fma(weight, max(x, set(-200)), weighted);  // not 0 * -inf
        for (int64_t lane = 0; lane < lanes(i); lane++) all.count += x_[i + lane] > NONE;
      }
      all.mass += sum(mass);
      all.weighted += sum(weighted);
    }
    return all;
  }

  float likeliest() const {
    Vec most = set(NONE);
    for (int64_t i = 0; i < vocabulary_; i += WIDTH) most = max(most, vector(i));
    return largest(most);
  }

  void keep(float least) {
    if (least == NONE) return;
    for (int64_t i = 0; i < vocabulary_; i++) x_[i] = x_[i] >= least ? x_[i] : NONE;
  }

  // The standard deviation of the finite logits.
  float deviation() const {
    int64_t count = 0;
    double total = 0, squares = 0;
    for (int64_t i = 0; i < vocabulary_; i++)
      if (x_[i] > NONE) count++, total += x_[i];
    const double mean = total / count;
    for (int64_t i = 0; i < vocabulary_; i++)
      if (x_[i] > NONE) squares += (x_[i] - mean) * (x_[i] - mean);
    return sqrt(squares / count);
  }

  // Keep the tokens whose surprisal is nearest to the entropy, with `share` of the mass.
  void keep_typical(float share) {
    const Totals all = totals();
    const float log_mass = all.log_mass(), entropy = all.entropy();
    int64_t counts[BUCKETS] = {};
    double masses[BUCKETS] = {};
    const auto each = [&](auto visit) {
      for (int64_t i = 0; i < vocabulary_; i += WIDTH) {
        const Vec x = vector(i);
        if (largest(x) == NONE) continue;
        float deviations[WIDTH], weights[WIDTH];
        store(deviations, absolute(set(log_mass) - x - set(entropy)));
        store(weights, exponential(x));
        for (int64_t lane = 0; lane < lanes(i); lane++)
          if (x_[i + lane] > NONE) visit(i + lane, deviations[lane], weights[lane]);
      }
    };
    each([&](int64_t, float deviation, float weight) {
      const int bucket = bucket_of(-deviation);
      counts[bucket]++;
      masses[bucket] += weight;
    });

    const double wanted = share * all.mass;
    double before = 0;
    int last = 0;
    while (last < BUCKETS - 1 && before + masses[last] < wanted) before += masses[last++];
    Deviation* found = reinterpret_cast<Deviation*>(members_.at_least((counts[last] + 1) * sizeof(Deviation)));
    int64_t count = 0;
    each([&](int64_t, float deviation, float weight) {
      if (bucket_of(-deviation) == last) found[count++] = {deviation, weight};
    });
    qsort(found, count, sizeof(Deviation), ascending);
    float farthest = INFINITY;
    for (int64_t i = 0; i < count; i++) {
      before += found[i].mass;
      if (before >= wanted) {
        farthest = found[i].value;
        break;
      }
    }
    each([&](int64_t token, float deviation, float) {
      if (deviation > farthest) x_[token] = NONE;
    });
  }

  // Drop the tokens with a probability of at least `threshold`, except the least likely of them.
  void drop_top_choices(float threshold) {
    const float top = logf(threshold * totals().mass);
    float least = INFINITY;
    for (int64_t i = 0; i < vocabulary_; i++)
      if (x_[i] >= top && x_[i] > NONE && x_[i] < least) least = x_[i];
    if (least == INFINITY) return;
    for (int64_t i = 0; i < vocabulary_; i++)
      if (x_[i] > least) x_[i] = NONE;
  }

  float dynamic(const Parameters& p) const {
    const Totals all = totals();
    double relative = all.count > 1 ? all.entropy() / log(static_cast<double>(all.count)) : 0;
    relative = relative < 0 ? 0 : relative > 1 ? 1 : relative;
    const float low = p.temperature > p.range ? p.temperature - p.range : 0, high = p.temperature + p.range;
    return larger(COLDEST, low + (high - low) * powf(relative, p.exponent));
  }
};

}  // namespace

// Limit the rows `which` [rows] of logits [.., vocabulary] in place; `stride` elements separate rows of logits. The
// parameters [rows, 10] and top_k [rows] are in the order of `which`; temperatures [rows] are the result. An
// xtc_threshold above 0.5 drops nothing.
INFD_KERNEL(narrow)
(float* logits, int64_t stride, int64_t vocabulary, const int64_t* which, int64_t rows, const float* parameters,
 const int32_t* top_k, float* temperatures) {
  static thread_local Scratch members;
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1)
  for (int64_t i = 0; i < rows; i++) {
    Parameters row;
    memcpy(&row, parameters + i * (sizeof row / sizeof(float)), sizeof row);
    temperatures[i] = Row(logits + which[i] * stride, vocabulary, members).narrow(row, top_k[i]);
  }
}
