// Single-token steps of decoders, called through ctypes (library.py has the same structures).

#include <tuple>

#include "attention.h"

namespace {

// ---- steps

struct Norm {
    const float *weight, *bias;  // [D]; RMSNorm: no bias
    double eps;
    int64_t root;  // RMSNorm
};

struct Layer {
    Norm norms[3];  // before attention, cross-attention, feed-forward
    Linear qkv, out, query, cross_out, gate, up, down;  // without a gate: no outputs
    double scale, cross_scale;
};

struct Decoder {
    const Layer *layers;
    Norm norm;  // after the layers; none: no weight
    Linear head;
    int64_t count, width, heads, kv_heads, head_width, cross_heads, cross_width, activation;  // cross_heads 0: none
};

struct Step {  // of `rows` rows, `length` cached positions before
    const float *x;                               // [rows width]
    float *logits;                                // [rows vocabulary]
    float *const *keys, *const *values;           // [rows kv_heads capacity head_width] of each layer
    const void *const *source_keys, *const *source_values;  // [sources cross_heads source_length cross_width]
    const int64_t *starts;                        // first position of each row; null: 0
    const float *bias;                            // [heads capacity], the last for distance 0; or null
    const float *cos, *sin;                       // [rows or 1, head_width], or null
    const uint8_t *seen;                          // [sources source_length], or null: all
    const int64_t *capacities;                    // of each layer's keys
    int64_t rows, length, bias_capacity, turns, interleaved, sources, source_length;
    int64_t source_halves, threads;               // turns: rows of cos; source_halves: bfloat16
};

void normalize(const Norm &norm, const float *x, int64_t rows, int64_t width, float *y) {
    for (; rows--; x += width, y += width) {
        float mean = 0, square = 0;
        if (!norm.root) {
            Floats sum = {};
            int64_t i = 0;
            for (; i + LANES <= width; i += LANES) sum += load(x + i);
            for (; i < width; ++i) mean += x[i];
            mean = (mean + total(sum)) / width;
        }
        for (int64_t i = 0; i < width; ++i) y[i] = x[i] - mean;
        dot<1>(y, y, width, &square);
        float scale = 1 / std::sqrt(square / width + (float)norm.eps);
        for (int64_t i = 0; i < width; ++i) y[i] = y[i] * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
    }
}

template <class Number> struct Keys {  // that some queries see
    const Number *keys, *values;  // [count width]
    const float *bias;           // [queries, bias_between]
    const uint8_t *seen;
    int64_t count, width, bias_between;
    float scale;
};

constexpr int64_t LEAST_SHARED = 1 << 14;  // panels of products: about 20 µs
constexpr int64_t LEAST_NORMED = 1 << 17;  // numbers: about 20 µs
constexpr int64_t BLOCK = 32;  // positions whose keys or values stay in the first cache for all queries

template <class Number> inline void fetch(const Number *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / sizeof(Number)) __builtin_prefetch((const char *)(from + i) + AHEAD);
}

// Dot products of a query with `count` keys [count width].
template <class Number>
void dots(const float *query, const Number *keys, int64_t count, int64_t width, float *products, bool first) {
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        if (first) fetch(keys + k * width, 4 * width);
        dot<4>(query, keys + k * width, width, products + k);
    }
    for (; k < count; ++k) dot<1>(query, keys + k * width, width, products + k);
}

// Adds `chances` [count] times C vectors of values [count width] to `sum`, one position after the other.
template <int C, class Number>
inline void mix_some(const float *chances, const Number *values, int64_t count, int64_t width, float *sum, bool first) {
    Floats sums[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[c] = load(sum + c * LANES);
    for (int64_t s = 0; s < count; ++s, values += width) {
        if (first) fetch(values, C * LANES);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[c] += chances[s] * load(values + c * LANES);
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sum + c * LANES, sums[c]);
}

template <class Number>
void mix(const float *chances, const Number *values, int64_t count, int64_t width, float *sum, bool first) {
    int64_t e = 0;
    for (; e + 8 * LANES <= width; e += 8 * LANES) mix_some<8>(chances, values + e, count, width, sum + e, first);
    for (; e + 4 * LANES <= width; e += 4 * LANES) mix_some<4>(chances, values + e, count, width, sum + e, first);
    for (; e + LANES <= width; e += LANES) mix_some<1>(chances, values + e, count, width, sum + e, first);
    for (; e < width; ++e)
        for (int64_t s = 0; s < count; ++s) sum[e] += chances[s] * single(values[s * width + e]);
}

// Calls `body` with `count` keys or values, of bfloat16 as floats where many queries read them, and whether to fetch
// the next ones.
template <class Number, class Body> void reading(const Number *from, int64_t count, bool many, const Body &body) {
    static thread_local std::vector<float> room;
    if (!many || sizeof(Number) == 4) return body(from, true);
    fetch(from, count), room.resize(count);
    for (int64_t i = 0; i < count; ++i) room[i] = single(from[i]);
    body(room.data(), false);
}

// Turns the scores [size], a multiple of LANES, into chances; returns their sum, by which they are not divided.
float soften(float *scores, int64_t size) {
    Floats peaks = load(scores), sum = {};
    for (int64_t s = LANES; s < size; s += LANES) peaks = most(peaks, load(scores + s));
    float peak = peaks[0];
    for (int i = 1; i < LANES; ++i) peak = std::max(peak, peaks[i]);
    for (int64_t s = 0; s < size; s += LANES) {
        Floats chance = exponential<false>(load(scores + s) - peak);
        store(scores + s, chance), sum += chance;
    }
    return total(sum);
}

// Attention of queries [count width], `between` apart; the result takes their places.
template <class Number> void attend(const Keys<Number> &own, float *queries, int64_t count, int64_t between) {
    static thread_local std::vector<float> scores, sums;
    const int64_t width = own.width, size = (own.count + LANES - 1) / LANES * LANES;
    scores.assign(count * size, -INFINITY), sums.resize(count);
    for (int64_t i = 0; i < count; ++i)
        for (int64_t e = 0; e < width; ++e) queries[i * between + e] *= own.scale;
    for (int64_t s = 0; s < own.count; s += BLOCK) {
        const int64_t some = std::min(BLOCK, own.count - s);
        reading(own.keys + s * width, some * width, count > 1, [&](auto keys, bool ahead) {
            for (int64_t i = 0; i < count; ++i)
                dots(queries + i * between, keys, some, width, scores.data() + i * size + s, ahead && !i);
        });
    }
    for (int64_t i = 0; i < count; ++i) {
        float *row = scores.data() + i * size;
        for (int64_t s = 0; own.bias && s < own.count; ++s) row[s] += own.bias[i * own.bias_between + s];
        for (int64_t s = 0; own.seen && s < own.count; ++s) row[s] = own.seen[s] ? row[s] : -INFINITY;
        sums[i] = soften(row, size);
        memset(queries + i * between, 0, 4 * width);
    }
    for (int64_t s = 0; s < own.count; s += BLOCK) {
        const int64_t some = std::min(BLOCK, own.count - s);
        reading(own.values + s * width, some * width, count > 1, [&](auto values, bool ahead) {
            for (int64_t i = 0; i < count; ++i)
                mix(scores.data() + i * size + s, values, some, width, queries + i * between, ahead && !i);
        });
    }
    for (int64_t i = 0; i < count; ++i)
        for (int64_t e = 0; e < width; ++e) queries[i * between + e] /= sums[i];
}

void rotate(float *x, int64_t width, const float *cos, const float *sin, bool interleaved) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; ++i) {
        int64_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : i + half;
        float first = x[a], second = x[b];
        x[a] = first * cos[a] + second * sin[a], x[b] = second * cos[b] + first * sin[b];
    }
}

// One step's buffers and the parts of a layer.
class Run {
  public:
    Run(const Decoder &decoder, const Step &step, Team &team) : model(decoder), step(step), team(team) {
        int64_t hidden = 0;
        for (int64_t i = 0; i < model.count; ++i) hidden = std::max(hidden, model.layers[i].up.outputs);
        x.assign(step.x, step.x + step.rows * model.width);
        normed.resize(step.rows * model.width);
        int64_t qkv = (model.heads + 2 * model.kv_heads) * model.head_width;
        wide.resize(step.rows * std::max({hidden, qkv, model.cross_heads * model.cross_width}));
        mixed.resize(step.rows * model.heads * model.head_width);
    }

    void all() {
        for (int64_t at = 0; at < model.count; ++at) {
            const Layer &layer = model.layers[at];
            normalize(layer.norms[0], x.data(), step.rows, model.width, normed.data());
            map(layer.qkv, normed.data(), model.width, wide.data(), REPLACE);
            attend_self(layer, at);
            map(layer.out, mixed.data(), model.heads * model.head_width, x.data(), ADD);
            if (model.cross_heads) {
                normalize(layer.norms[1], x.data(), step.rows, model.width, normed.data());
                map(layer.query, normed.data(), model.width, wide.data(), REPLACE);
                step.source_halves ? attend_source<uint16_t>(layer, at) : attend_source<float>(layer, at);
                map(layer.cross_out, wide.data(), model.cross_heads * model.cross_width, x.data(), ADD);
            }
            normalize(layer.norms[2], x.data(), step.rows, model.width, normed.data());
            feed(layer);
            map(layer.down, wide.data(), layer.up.outputs, x.data(), ADD);
        }
        if (model.norm.weight) normalize(model.norm, x.data(), step.rows, model.width, x.data());
        map(model.head, x.data(), model.width, step.logits, REPLACE);
    }

  private:
    const Decoder &model;
    const Step &step;
    Team &team;
    std::vector<float> x, normed, wide, mixed;
    Prepared prepared;

    template <class Body> void over_panels(const Linear &map, const Body &body) {
        const int64_t count = panels_of(map);
        team.share(count, team.part_of(count), body);
    }

    void map(const Linear &map, const float *from, int64_t inputs, float *to, Then then) {
        Rows rows = prepared(map, from, step.rows, inputs, inputs, team);
        Target target{to, map.outputs, then, IDENTITY};
        over_panels(map, [&](int64_t first, int64_t last) { product(map, rows, first, last, target); });
    }

    void feed(const Layer &layer) {
        const Linear &first = layer.gate.outputs ? layer.gate : layer.up;
        Rows rows = prepared(first, normed.data(), step.rows, model.width, model.width, team);
        Target target{wide.data(), first.outputs, REPLACE, model.activation};
        over_panels(first, [&](int64_t begin, int64_t end) {
            product(first, rows, begin, end, target);
            Target both{wide.data(), first.outputs, MULTIPLY, IDENTITY};
            if (layer.gate.outputs) product(layer.up, rows, begin, end, both);
        });
    }

    void turn(float *x, int64_t row) {
        const int64_t at = step.turns > 1 ? row * model.head_width : 0;
        if (step.cos) rotate(x, model.head_width, step.cos + at, step.sin + at, step.interleaved);
    }

    void attend_self(const Layer &layer, int64_t at) {
        const int64_t width = model.head_width, each = model.heads / model.kv_heads;
        team.share(step.rows * model.kv_heads, 1, [&](int64_t first, int64_t last) {
            for (; first < last; ++first) {
                int64_t row = first / model.kv_heads, head = first % model.kv_heads;
                float *from = wide.data() + row * (model.heads + 2 * model.kv_heads) * width;
                float *key = from + (model.heads + head) * width, *value = key + model.kv_heads * width;
                float *queries = mixed.data() + (row * model.heads + head * each) * width;
                memcpy(queries, from + head * each * width, 4 * each * width);
                for (int64_t i = 0; i < each; ++i) turn(queries + i * width, row);
                turn(key, row);
                int64_t base = first * step.capacities[at] * width, start = step.starts ? step.starts[row] : 0;
                float *keys = step.keys[at] + base, *values = step.values[at] + base;
                memcpy(keys + step.length * width, key, 4 * width);
                memcpy(values + step.length * width, value, 4 * width);
                Keys<float> own{keys + start * width, values + start * width, nullptr, nullptr,
                                step.length + 1 - start, width, step.bias_capacity, (float)layer.scale};
                if (step.bias) own.bias = step.bias + (head * each + 1) * step.bias_capacity - own.count;
                attend(own, queries, each, width);
            }
        });
    }

    template <class Number> void attend_source(const Layer &layer, int64_t at) {
        const int64_t width = model.cross_width, each = step.rows / step.sources, across = model.cross_heads * width;
        const Number *keys = (const Number *)step.source_keys[at], *values = (const Number *)step.source_values[at];
        team.share(step.sources * model.cross_heads, 1, [&](int64_t first, int64_t last) {
            for (; first < last; ++first) {
                int64_t source = first / model.cross_heads, base = first * step.source_length * width;
                const uint8_t *seen = step.seen ? step.seen + source * step.source_length : nullptr;
                float *queries = wide.data() + source * each * across + first % model.cross_heads * width;
                Keys<Number> own{keys + base, values + base, nullptr, seen,
                                 step.source_length, width, 0, (float)layer.cross_scale};
                attend(own, queries, each, across);
            }
        });
    }
};

// Place of the first of the greatest of `count` numbers, which is NaN where one is, and the logarithm of its share in
// the sum of their exponentials.
std::pair<int64_t, float> greatest(const float *x, int64_t count) {
    Floats peaks = Floats{} - INFINITY, sums = {};
    Ints at = {}, places = {};
    for (int i = 0; i < LANES; ++i) at[i] = i;
    int64_t i = 0, place = 0;
    for (; i + LANES <= count; i += LANES, at += LANES) {
        Ints more = load(x + i) > peaks;
        peaks = more ? load(x + i) : peaks, places = more ? at : places;
    }
    float peak = -INFINITY, sum = 0;
    for (int lane = 0; lane < LANES; ++lane)
        if (peaks[lane] > peak || (peaks[lane] == peak && places[lane] < place)) peak = peaks[lane], place = places[lane];
    for (; i < count; ++i)
        if (x[i] > peak) peak = x[i], place = i;
    for (i = 0; i + LANES <= count; i += LANES) sums += exponential<false>(load(x + i) - peak);
    for (; i < count; ++i) sum += std::exp(x[i] - peak);
    sum += total(sums);
    for (i = 0; std::isnan(sum) && i < count; ++i)
        if (std::isnan(x[i])) return {i, sum};
    return {place, -std::log(sum)};
}

}  // namespace

extern "C" {

int64_t panel(int64_t bytes) { return panel_of(bytes); }

// y = f(x Wᵀ + b) of `rows` rows [rows inputs], which begin `between` inputs apart.
void linear(
    const Linear *map, const float *x, int64_t rows, int64_t inputs, int64_t between, float *y, int64_t activation,
    int64_t threads) {
    const int64_t count = panels_of(*map), most = map->steps ? Byte::ROWS : Float::ROWS, tiles = (rows + most - 1) / most;
    const auto some = [&](Prepared &prepared, int64_t top, int64_t last, Team &team) {
        Rows own = prepared(*map, x + top * between, last - top, inputs, between, team);
        team.share(count, team.part_of(count), [&](int64_t first, int64_t end) {
            product(*map, own, first, end, {y + top * map->outputs, map->outputs, REPLACE, activation});
        });
    };
    Team::call(rows * count * inputs < LEAST_SHARED ? 1 : threads, [&](Team &team) {
        // rows whose packed copies stay in the third cache
        const int64_t cached = share_of(rows, PACKED / std::max<int64_t>(1, 4 * inputs) + 1, most);
        if (team.threads > 1 && tiles > count) {  // threads share what there is more of: rows, which each prepares, or panels
            const int64_t parts = std::max(std::min<int64_t>(tiles, 4 * team.threads), (rows + cached - 1) / cached);
            return team.share(parts, 1, [&](int64_t part, int64_t last) {
                static thread_local Prepared prepared;
                Team alone(1);
                for (; part < last; ++part)
                    some(prepared, tiles * part / parts * most, std::min(rows, tiles * (part + 1) / parts * most), alone);
            });
        }
        const int64_t each = map->steps || !Float::packs(between) ? std::max<int64_t>(rows, 1) : cached;
        Prepared prepared;
        for (int64_t top = 0; top < rows; top += each) some(prepared, top, std::min(top + each, rows), team);
    });
}

void norm(const Norm *norm, const float *x, int64_t rows, int64_t width, float *y, int64_t threads) {
    Team::call(rows * width < LEAST_NORMED ? 1 : threads, [&](Team &team) {
        team.share(rows, team.part_of(rows), [&](int64_t first, int64_t last) {
            normalize(*norm, x + first * width, last - first, width, y + first * width);
        });
    });
}

void attention(const Attention *all, int64_t threads) {
    const int64_t heads = all->batch * all->heads, panels = (all->queries + PANEL - 1) / PANEL;
    Team::call(heads * all->queries * all->keys < LEAST_SHARED ? 1 : threads, [&](Team &team) {
        // each share of a head copies its keys and values: none is split where all threads have as many heads
        const int64_t shares = heads % threads ? std::min(panels, 4 * threads / heads + 1) : 1;
        const int64_t each = (panels + shares - 1) / shares;
        team.share(heads * shares, 1, [&](int64_t at, int64_t last) {
            for (; at < last; ++at) {
                Head head(*all, at / shares / all->heads, at / shares % all->heads);
                const int64_t first = at % shares * each;
                for (int64_t panel = first; panel < std::min(first + each, panels); ++panel) head(panel * PANEL);
            }
        });
    });
}

void step(const Decoder *decoder, const Step *step) {
    Team::call(step->threads, [&](Team &team) { Run(*decoder, *step, team).all(); });
}

// The most probable of `count` logits in each row.
void best(const float *logits, int64_t rows, int64_t count, int64_t *tokens, float *logprobs) {
    for (; rows--; logits += count) std::tie(*tokens++, *logprobs++) = greatest(logits, count);
}
}
