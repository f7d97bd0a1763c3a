// Linear maps on a CPU.
//
// A vector's lanes are outputs of a map, and each output is summed input by input. So a row has the same bits alone and
// among others, on any number of threads, whatever the compiler makes of the loops.

#pragma once

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define PAIRS  // products of bytes are made in 16 bits and added up by pairs
typedef int16_t Level;
#else
typedef uint8_t Level;
#endif
typedef Level Levels __attribute__((vector_size(LANES * sizeof(Level))));
constexpr int64_t CACHED = 1 << 18;  // bytes of rows
constexpr int64_t PACKED = 1 << 21;  // bytes of packed rows

struct Linear {  // weight [panels inputs panel] of float, or where `steps` is given [panels inputs/4 panel 4] of bytes
    const void *weight;
    const float *steps, *bias;   // [panels · panel]; no bias: null
    const int32_t *sums;         // of bytes: 128 times each output's weights
    int64_t outputs, inputs;     // inputs of bytes: a multiple of 4
};

struct Rows {  // inputs of a map: floats [count inputs], or levels from 0 to 255 whose steps these are
    const void *values;
    const float *steps;
    int64_t count;
    bool packed;  // `Kind::ROWS` at a time side by side, input by input
};

enum Then { REPLACE, ADD, MULTIPLY };

struct Target {  // [count width]
    float *values;
    int64_t width, then, activation;
};

// Stores a vector of outputs, of which there are `outputs` in a row.
inline void put(Floats y, const Target &to, int64_t row, int64_t output, int64_t outputs) {
    float *place = to.values + row * to.width + output, edge[LANES];
    const int64_t rest = outputs - output;
    if (rest <= 0) return;
    float *from = rest < LANES ? edge : place;
    if (rest < LANES) memcpy(edge, place, 4 * rest);
    store(from, to.then == ADD ? load(from) + y : to.then == MULTIPLY ? load(from) * y : y);
    if (rest < LANES) memcpy(place, edge, 4 * rest);
}

// Of a kind of maps: ROWS whose sums stay in registers beside a panel's, panels (WIDE) that a single row multiplies side
// by side, vectors of outputs in a panel, whose weights lie side by side.

struct Float {
    using Sum = Floats;
    using Input = float;
    static constexpr int ROWS = ::ROWS, WIDE = 4, VECTORS = 2;
    // Whether more than ROWS rows that begin `between` inputs apart are packed: they share few places of the first
    // cache. With AVX2 alone a fifth faster; with AVX-512 up to a fifth at multiples of 4 KiB, slower at others.
    static bool packs(int64_t between) { return LANES == 8 || (LANES == 16 && between % 1024 == 0); }
    static constexpr bool PACKS = LANES >= 8;
    static Sum add(Sum sum, const Input &x, const char *column) { return sum + x * *(const Floats *)column; }
    static Floats finish(Sum sum, const Linear &, const Rows &, int64_t, int64_t) { return sum; }
};

#if defined(PAIRS)
struct Byte {
    struct Sum {  // of outputs 0 to 3 and 4 to 7, each in two parts
        __m256i low, high;
    };
    using Input = int64_t;  // four levels
    static constexpr int ROWS = 6, WIDE = 4, VECTORS = 1;
    static constexpr bool PACKS = false;
    static Sum add(Sum sum, const Input &x, const char *column) {
        const __m128i *four = (const __m128i *)column;
        const __m256i first = _mm256_cvtepi8_epi16(four[0]), second = _mm256_cvtepi8_epi16(four[1]);
        __m256i levels, product;  // in this order all of it fits into the registers; GCC's own moves a third of the sums
        asm("vpbroadcastq %6, %2\n\tvpmaddwd %2, %4, %3\n\tvpmaddwd %2, %5, %2\n\tvpaddd %3, %0, %0\n\tvpaddd %2, %1, %1"
            : "+x"(sum.low), "+x"(sum.high), "=&x"(levels), "=&x"(product) : "x"(first), "x"(second), "m"(x));
        return sum;
    }
    static Ints whole(Sum sum) { return (Ints)_mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.low, sum.high), 0xd8); }
#else
struct Byte {
    using Sum = Ints;
    using Input = int32_t;  // four levels
    static constexpr int ROWS = ::ROWS, WIDE = 4, VECTORS = 2;
    static constexpr bool PACKS = false;
    static Sum add(Sum sum, const Input &x, const char *column) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), *(const __m512i *)column);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(x), *(const __m256i *)column);
#else
        const int8_t *weights = (const int8_t *)column;
        int32_t sums[LANES];
        for (int i = 0; i < LANES; ++i) {
            sums[i] = 0;
            for (int j = 0; j < 4; ++j) sums[i] += (int32_t)(uint8_t)(x >> 8 * j) * weights[4 * i + j];
        }
        Sum more;
        memcpy(&more, sums, BYTES);
        return sum + more;
#endif
    }
    static Ints whole(Sum sum) { return sum; }
#endif
    static Floats finish(Sum sum, const Linear &map, const Rows &x, int64_t row, int64_t output) {
        Floats exact = __builtin_convertvector(whole(sum) - *(const Ints *)(map.sums + output), Floats);
        return exact * load(map.steps + output) * x.steps[row];
    }
};

// Adds up the products of R rows and C panels, `between` bytes apart. The rows have `count` inputs and lie one after the
// other, or, BESIDE, input by input with `EACH` rows packed together.
template <class Kind, int R, int C, bool BESIDE, int EACH = R>
void add_up(const char *weight, int64_t between, const char *rows, int64_t count,
            typename Kind::Sum (&made)[R][Kind::VECTORS * C]) {
    using Input = typename Kind::Input;
    constexpr int V = Kind::VECTORS;
    // of four rows each: with one for each row registers run out, and moving them back takes the ports of the products
    const char *own[(R + 3) / 4];
    const int64_t stride = (BESIDE ? 1 : count) * sizeof(Input), three = 3 * stride;
    constexpr int64_t next = (BESIDE ? EACH : 1) * sizeof(Input);
    for (int r = 0; r < R; r += 4) own[r / 4] = rows + r * stride;
    typename Kind::Sum sums[R][V * C] = {};
#if defined(__AVX2__) && !defined(__AVX512F__)
#pragma GCC unroll 4  // 6 % faster; not measured on others
#endif
    for (int64_t k = 0; k < count; ++k, weight += V * BYTES) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const char *column = weight + c * between;
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) __builtin_prefetch(column + AHEAD + v * BYTES);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Input &value = *(const Input *)(own[r / 4] + (r % 4 == 3 ? three : r % 4 * stride));
#pragma GCC unroll 2
                for (int v = 0; v < V; ++v)
                    sums[r][V * c + v] = Kind::add(sums[r][V * c + v], value, column + v * BYTES);
            }
        }
        for (const char *&four : own) four += next;
    }
#pragma GCC unroll 48
    for (int i = 0; i < R * V * C; ++i) made[i / (V * C)][i % (V * C)] = sums[i / (V * C)][i % (V * C)];
}

// R rows from `row` on, which lie at `rows`, by C panels from `panel` on.
template <class Kind, int R, int C, bool BESIDE>
void multiply(const Linear &map, const Rows &x, const char *rows, int64_t row, int64_t panel, const Target &to) {
    constexpr int V = Kind::VECTORS, PANEL = V * LANES;
    const int64_t count = map.inputs * (map.steps ? 1 : 4) / 4, between = count * PANEL * 4;
    typename Kind::Sum made[R][V * C];
    add_up<Kind, R, C, BESIDE>((const char *)map.weight + panel * between, between, rows, count, made);
    Floats y[R][V * C];
    for (int j = 0; j < V * C; ++j) {
        const int64_t output = panel * PANEL + j * LANES;
        const Floats bias = map.bias ? load(map.bias + output) : Floats{};
        for (int r = 0; r < R; ++r) y[r][j] = Kind::finish(made[r][j], map, x, row + r, output) + bias;
    }
    activate(y[0], R * V * C, to.activation);
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < V * C; ++j) put(y[r][j], to, row + r, panel * PANEL + j * LANES, map.outputs);
}

using Multiply = void (*)(const Linear &, const Rows &, const char *, int64_t, int64_t, const Target &);
template <class Kind, bool BESIDE, int... R> Multiply chosen(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr Multiply every[] = {multiply<Kind, R + 1, 1, BESIDE>...};
    return every[rows - 1];
}

// Size of equal shares of `count`, near `size` and a multiple of `unit`: a few rows left over would read all weights again.
inline int64_t share_of(int64_t count, int64_t size, int64_t unit) {
    const int64_t shares = std::max<int64_t>(1, (count + size / 2) / size);
    return std::max<int64_t>(1, (count + shares * unit - 1) / (shares * unit)) * unit;
}

template <class Kind> void panels(const Linear &map, const Rows &x, int64_t first, int64_t last, const Target &to) {
    constexpr int wide = Kind::WIDE, most = Kind::ROWS;
    const char *values = (const char *)x.values;
    for (; x.count == 1 && first + wide <= last; first += wide)
        multiply<Kind, 1, wide, false>(map, x, values, 0, first, to);
    // rows that stay in the second cache for all panels
    const int64_t size = map.inputs * (map.steps ? 1 : 4) / 4 * sizeof(typename Kind::Input);
    const int64_t some = share_of(x.count, std::max<int64_t>(16, CACHED / std::max<int64_t>(1, size * most)) * most, most);
    for (int64_t top = 0; top < x.count; top += some)
        for (int64_t panel = first; panel < last; ++panel)
            for (int64_t row = top; row < std::min(top + some, x.count); row += most) {
                const auto sizes = std::make_integer_sequence<int, most>{};
                const int64_t rows = std::min<int64_t>(most, x.count - row);
                const Multiply call = x.packed ? chosen<Kind, Kind::PACKS>(rows, sizes) : chosen<Kind, false>(rows, sizes);
                call(map, x, values + row * size, row, panel, to);
            }
}

int64_t panel_of(bool bytes) { return LANES * (bytes ? Byte::VECTORS : Float::VECTORS); }

int64_t panels_of(const Linear &map) {
    const int64_t panel = panel_of(map.steps);
    return (map.outputs + panel - 1) / panel;
}

void product(const Linear &map, const Rows &x, int64_t first, int64_t last, const Target &to) {
    map.steps ? panels<Byte>(map, x, first, last, to) : panels<Float>(map, x, first, last, to);
}

// Rows [count inputs] as a map takes them: floats, packed where they are many, or levels around 128, 127 to each side.
struct Prepared {
    std::vector<Level> levels;
    std::vector<float> steps;
    std::unique_ptr<float[]> packed;
    int64_t room = 0;

    // Rows begin `between` inputs apart, and may overlap.
    Rows operator()(const Linear &map, const float *x, int64_t count, int64_t inputs, int64_t between, Team &team) {
        if (!map.steps && Float::packs(between) && count > Float::ROWS) return pack(x, count, inputs, between, team);
        if (!map.steps && between == inputs) return {x, nullptr, count, false};
        if (!map.steps) {
            need(count * inputs);
            team.share(count, team.part_of(count), [&](int64_t row, int64_t last) {
                for (; row < last; ++row) memcpy(packed.get() + row * inputs, x + row * between, 4 * inputs);
            });
            return {packed.get(), nullptr, count, false};
        }
        levels.resize(count * map.inputs), steps.resize(count);
        team.share(count, count < 64 ? count : 32, [&](int64_t row, int64_t last) {
            for (; row < last; ++row) steps[row] = levels_of(x + row * between, inputs, &levels[row * map.inputs], map.inputs);
        });
        return {levels.data(), steps.data(), count, false};
    }

    void need(int64_t floats) {
        if (room < floats) packed.reset(new float[room = floats]);
    }

    Rows pack(const float *x, int64_t count, int64_t inputs, int64_t between, Team &team) {
        need(count * inputs);
        constexpr int64_t most = Float::ROWS;
        const int64_t tiles = (count + most - 1) / most;
        team.share(tiles, team.part_of(tiles), [&](int64_t tile, int64_t last) {
            for (; tile < last; ++tile) {
                const int64_t top = tile * most, bottom = std::min(top + most, count);
                float *to = packed.get() + top * inputs;
                int64_t k = 0;
#if defined(__AVX2__)
                for (; Float::PACKS && top + most == bottom && k + 4 <= inputs; k += 4, to += 4 * most)
                    beside(x + top * between + k, between, to);
#endif
                for (; k < inputs; ++k)
                    for (int64_t row = top; row < bottom; ++row) *to++ = x[row * between + k];
            }
        });
        return {packed.get(), nullptr, count, true};
    }

#if defined(__AVX2__)
    // Four inputs of `Float::ROWS` rows.
    static void beside(const float *x, int64_t between, float *to) {
        constexpr int most = Float::ROWS;
        __m128 rows[4];
        for (int top = 0; top + 4 <= most; top += 4) {
            for (int i = 0; i < 4; ++i) rows[i] = _mm_loadu_ps(x + (top + i) * between);
            _MM_TRANSPOSE4_PS(rows[0], rows[1], rows[2], rows[3]);
            for (int i = 0; i < 4; ++i) _mm_storeu_ps(to + i * most + top, rows[i]);
        }
        if (most % 4 != 2) return;
        for (int i = 0; i < 2; ++i) rows[i] = _mm_loadu_ps(x + (most - 2 + i) * between);
        const __m128 first = _mm_unpacklo_ps(rows[0], rows[1]), last = _mm_unpackhi_ps(rows[0], rows[1]);
        to += most - 2;
        _mm_storel_pi((__m64 *)to, first), _mm_storeh_pi((__m64 *)(to + most), first);
        _mm_storel_pi((__m64 *)(to + 2 * most), last), _mm_storeh_pi((__m64 *)(to + 3 * most), last);
    }
#endif

    static float levels_of(const float *x, int64_t inputs, Level *to, int64_t size) {  // returns the step
        Floats peaks = Floats{} + 1e-30f, none = {};  // none: NaN for NaN or infinity
        int64_t i = 0;
        for (; i + LANES <= inputs; i += LANES) {
            Floats size = load(x + i);
            size = choose(size < 0.0f, -size, size), none += size * 0.0f, peaks = choose(size > peaks, size, peaks);
        }
        float peak = 0, broken = total(none);
        for (int j = 0; j < LANES; ++j) peak = std::max(peak, peaks[j]);
        for (; i < inputs; ++i) peak = std::max(peak, std::fabs(x[i])), broken += x[i] * 0.0f;
        const float step = peak * (1.0f / 127), even = 12582912.0f;  // even: rounds what is added and subtracted
        std::fill(to + inputs, to + size, Level(128));
        if (broken != 0) std::fill(to, to + inputs, Level(128));
        else for (i = 0; i + LANES <= inputs; i += LANES) {
            Levels some = __builtin_convertvector(__builtin_convertvector((load(x + i) / step + even) - even, Ints) + 128, Levels);
            memcpy(to + i, &some, sizeof some);
        }
        for (; broken == 0 && i < inputs; ++i) to[i] = (Level)(int32_t)((x[i] / step + even) - even + 128);
        return step + broken;
    }
};

}  // namespace
