// Vectors of floats and functions of their lanes.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // ROWS: whose sums stay in registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 8;
#endif
constexpr int BYTES = 4 * LANES;  // of a vector
constexpr int AHEAD = 4096;       // bytes of weights fetched before they are needed
typedef float Floats __attribute__((vector_size(BYTES), may_alias));
typedef int32_t Ints __attribute__((vector_size(BYTES), may_alias));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef float Anywhere __attribute__((vector_size(BYTES), may_alias, aligned(4)));

inline Floats load(const float *from) { return *(const Anywhere *)from; }
inline Floats load(const uint16_t *from) {  // bfloat16
    Halves few;
    memcpy(&few, from, sizeof few);
    return (Floats)(__builtin_convertvector(few, Ints) << 16);
}
inline float single(float x) { return x; }
inline float single(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void store(float *to, Floats value) { *(Anywhere *)to = value; }

inline Floats choose(Ints which, Floats yes, Floats no) { return which ? yes : no; }

// The greater of two; `x` where that is NaN.
inline Floats most(Floats bound, Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)bound, (__m512)x);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)bound, (__m256)x);
#else
    return choose(bound > x, bound, x);
#endif
}

// Within 2 units of the last place; 0 below -87. Not LARGE: of x up to 88.
template <bool LARGE = true> inline Floats exponential(Floats x) {
    Floats bounded = most(Floats{} - 87.0f, x);
    if (LARGE) bounded = choose(bounded > 88.0f, Floats{} + 88.0f, bounded);
    Floats whole = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounded
    Floats rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return choose(x < -87.0f, Floats{}, (sum * rest * rest + rest + 1.0f) * (Floats)power);
}

enum Activation { IDENTITY, GELU, GELU_TANH, QUICK_GELU, SILU, RELU };

template <int Kind> inline Floats activate(Floats x) {
    if (Kind == GELU) {  // erf: Abramowitz and Stegun, formula 7.1.26
        Floats size = choose(x < 0.0f, -x, x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * size);
        Floats sum = (1.061405429f * t - 1.453152027f) * t + 1.421413741f;
        sum = ((sum * t - 0.284496736f) * t + 0.254829592f) * t;
        Floats tail = sum * exponential<false>(-size * size);  // 1 - erf
        return 0.5f * x * choose(x < 0.0f, tail, 2.0f - tail);
    }
    if (Kind == GELU_TANH) return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
    if (Kind == QUICK_GELU) return x / (1.0f + exponential(-1.702f * x));
    if (Kind == SILU) return x / (1.0f + exponential(-x));
    return choose(x < 0.0f, Floats{}, x);  // RELU
}

template <int Kind> void activate(Floats *x, int count) {
    for (int i = 0; i < count; ++i) x[i] = activate<Kind>(x[i]);
}

void activate(Floats *x, int count, int64_t kind) {
    using Every = void (*)(Floats *, int);
    static constexpr Every every[] = {activate<GELU>, activate<GELU_TANH>, activate<QUICK_GELU>, activate<SILU>,
                                      activate<RELU>};
    if (kind != IDENTITY) every[kind - 1](x, count);
}

inline float total(Floats lanes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)lanes);
#elif defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)lanes), _mm256_extractf128_ps((__m256)lanes, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float parts[LANES];
    memcpy(parts, &lanes, BYTES);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
    return parts[0];
#endif
}

// Dot products of `a` and each of C rows of `b`.
template <int C, class Number> inline void dot(const float *a, const Number *b, int64_t size, float *products) {
    Floats sums[C] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Floats x = load(a + i);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sums[c] += x * load(b + c * size + i);
    }
    for (int c = 0; c < C; ++c) {
        float rest = 0;
        for (int64_t e = i; e < size; ++e) rest += a[e] * single(b[c * size + e]);
        products[c] = total(sums[c]) + rest;
    }
}

}  // namespace
