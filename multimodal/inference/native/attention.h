// Attention of many queries on a CPU.
//
// In the first product a vector's lanes are queries, which meet one key after the other: a query's greatest score and
// its sum stay in its lane. In the second one they are a value's dimensions. Sums run key by key, so a query has the
// same bits in any batch.

#pragma once

#include "linear.h"

namespace {

struct Attention {  // strides in numbers; a head's own numbers are contiguous
    const float *query, *key, *value;  // [batch heads queries width], [batch kv_heads keys width]
    const void *mask;                  // [batch heads queries keys] of floats, which are added, or of bytes, 0: not seen
    float *mixed;                      // [batch queries heads width]
    int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[4];
    int64_t batch, heads, kv_heads, queries, keys, width, bytes, causal;  // bytes: the mask's kind; causal: as PyTorch's
    double scale;
};

constexpr int64_t PANEL = LANES * Float::VECTORS;  // queries, or dimensions of a value

// `count` numbers, uninitialized, aligned for vectors.
class Room {
  public:
    explicit Room(int64_t count) : lines(new Line[(count + 15) / 16]) {}
    operator float *() const { return lines[0].numbers; }

  private:
    struct alignas(64) Line {
        float numbers[16];
    };
    std::unique_ptr<Line[]> lines;
};

// Writes rows [count width], `between` apart, times `scale` as columns [width PANEL].
inline void transpose(const float *from, int64_t between, int64_t count, int64_t width, float scale, float *to) {
    int64_t e = 0;
#if defined(__AVX2__)
    for (; count == PANEL && e + 8 <= width; e += 8)
        for (int64_t q = 0; q < PANEL; q += 8) {
            __m256 rows[8], two[8];
            for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + (q + i) * between + e) * scale;
            for (int i = 0; i < 8; i += 2) {
                two[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]), two[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
            }
            for (int i = 0; i < 8; ++i) {  // columns i % 4 and i % 4 + 4 of the first or the last four rows
                const int at = i / 4 * 4 + i % 4 / 2;
                rows[i] = i % 2 ? _mm256_shuffle_ps(two[at], two[at + 2], 0xee) : _mm256_shuffle_ps(two[at], two[at + 2], 0x44);
            }
            for (int i = 0; i < 4; ++i) {
                _mm256_storeu_ps(to + (e + i) * PANEL + q, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20));
                _mm256_storeu_ps(to + (e + i + 4) * PANEL + q, _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31));
            }
        }
#endif
    for (; e < width; ++e)
        for (int64_t q = 0; q < PANEL; ++q) to[e * PANEL + q] = q < count ? from[q * between + e] * scale : 0;
}

class Head {  // copies its keys and values, which lie far apart
  public:
    Head(const Attention &all, int64_t batch, int64_t head)
        : all(all), keys(all.keys * all.width), values((all.width + PANEL - 1) / PANEL * PANEL * all.keys),
          panel(all.width * PANEL), scores(all.keys * PANEL) {
        const int64_t group = head / (all.heads / all.kv_heads), width = all.width;
        query = all.query + batch * all.query_strides[0] + head * all.query_strides[1];
        const float *key = all.key + batch * all.key_strides[0] + group * all.key_strides[1];
        const float *value = all.value + batch * all.value_strides[0] + group * all.value_strides[1];
        mask_at = batch * all.mask_strides[0] + head * all.mask_strides[1];
        mixed = all.mixed + (batch * all.queries * all.heads + head) * width;
        for (int64_t k = 0; k < all.keys; ++k) {
            memcpy(keys + k * width, key + k * all.key_strides[2], 4 * width);
            const float *from = value + k * all.value_strides[2];
            for (int64_t e = 0; e < width; e += PANEL) {
                float *to = values + e * all.keys + k * PANEL;
                if (e + PANEL <= width) memcpy(to, from + e, 4 * PANEL);
                else for (int64_t i = 0; i < PANEL; ++i) to[i] = e + i < width ? from[e + i] : 0;
            }
        }
    }

    void operator()(int64_t first) {  // the panel's first query
        count = std::min(PANEL, all.queries - first), top = first;
        seen = all.causal ? std::min(all.keys, top + count) : all.keys;
        for (int64_t q = 0; q < std::min(PANEL, all.queries - first - PANEL); ++q)  // the next panel
            for (int64_t e = 0; e < all.width; e += 16) __builtin_prefetch(row(PANEL + q) + e);
        transpose(row(0), all.query_strides[2], count, all.width, all.scale, panel);
        for (Floats &peak : peaks) peak = Floats{} - INFINITY;
        over(seen, [&](int64_t key, auto rows) { score<rows>(key); });
        soften();
        over(count, [&](int64_t q, auto rows) {
            for (int64_t e = 0; e < all.width; e += PANEL) mix<rows>(q, e);
        });
    }

  private:
    const Attention &all;
    const float *query;
    float *mixed;
    int64_t mask_at, top, count, seen;  // of the panel: its queries and the keys that the last one sees
    Floats peaks[Float::VECTORS], sums[Float::VECTORS];
    const Room keys, values, panel, scores;  // [keys width], [width/PANEL keys PANEL], [width PANEL], [keys PANEL]

    const float *row(int64_t q) const { return query + (top + q) * all.query_strides[2]; }

    template <int R> using Number = std::integral_constant<int, R>;
    template <class Body> static void over(int64_t count, const Body &body) {
        int64_t at = 0;
        for (; at + ROWS <= count; at += ROWS) body(at, Number<ROWS>{});
        rest(count - at, at, body, std::make_integer_sequence<int, ROWS - 1>{});
    }
    template <class Body, int... R>
    static void rest(int64_t count, int64_t at, const Body &body, std::integer_sequence<int, R...>) {
        ((count == R + 1 ? body(at, Number<R + 1>{}) : void()), ...);
    }

    template <int R> void score(int64_t key) {
        constexpr int V = Float::VECTORS;
        Floats made[R][V];
        add_up<Float, R, 1, false>((const char *)(panel + 0), 0, (const char *)(keys + key * all.width), all.width, made);
        if (all.mask) hide<R>(made, key);
        for (int64_t r = std::max<int64_t>(0, top - key + 1); all.causal && r < R; ++r)
            std::fill_n((float *)made[r], std::min(PANEL, key + r - top), -INFINITY);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) {
                store(scores + (key + r) * PANEL + v * LANES, made[r][v]);
                peaks[v] = most(peaks[v], made[r][v]);
            }
    }

    template <int R> void hide(Floats (&made)[R][Float::VECTORS], int64_t key) const {
        float *scores = (float *)made;
        for (int64_t q = 0; q < count; ++q)
            for (int64_t r = 0; r < R; ++r) {
                const int64_t at = mask_at + (top + q) * all.mask_strides[2] + (key + r) * all.mask_strides[3];
                float &own = scores[r * PANEL + q];
                if (all.bytes) own = ((const uint8_t *)all.mask)[at] ? own : -INFINITY;
                else own += ((const float *)all.mask)[at];
            }
    }

    void soften() {
        constexpr int V = Float::VECTORS;
        Floats own[V], total[V] = {};
        for (int v = 0; v < V; ++v) own[v] = choose(peaks[v] == Floats{} - INFINITY, Floats{}, peaks[v]);
        float *place = scores;
        for (int64_t k = 0; k < seen; ++k)
            for (int v = 0; v < V; ++v, place += LANES) {
                const Floats chance = exponential<false>(load(place) - own[v]);
                store(place, chance), total[v] += chance;
            }
        for (int v = 0; v < V; ++v) sums[v] = choose(total[v] == 0.0f, Floats{}, 1.0f / total[v]);  // 0 where all keys are hidden
    }

    template <int R> void mix(int64_t q, int64_t e) {
        constexpr int V = Float::VECTORS;
        Floats made[R][V];
        add_up<Float, R, 1, true, PANEL>((const char *)(values + e * all.keys), 0, (const char *)(scores + q), seen, made);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) {
                float *to = mixed + (top + q + r) * all.heads * all.width + e + v * LANES;
                const Floats own = made[r][v] * ((const float *)sums)[q + r];
                const int64_t some = std::min<int64_t>(LANES, all.width - e - v * LANES);
                if (some == LANES) store(to, own);
                else if (some > 0) memcpy(to, &own, 4 * some);
            }
    }
};

}  // namespace
