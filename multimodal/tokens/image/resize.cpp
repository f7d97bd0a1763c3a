// Pillow's resampling of RGB images to the bit, called through ctypes (exact_resize.py).
//
// Pillow multiplies levels by weights of 22 bits, adds them up in 32 and cuts off the rest, first along one axis, then
// along the other. Here the axis is always the outer one, so that a vector holds neighbouring levels: columns are
// resampled in the transposed image.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int BITS = 22;
constexpr int64_t PART = 512;  // levels whose sums stay in the first cache
constexpr int64_t STRIP = 64;  // rows that are transposed at a time, so that memory and the caches suffice

struct Axis {  // output i is the sum of `counts[i]` inputs from `firsts[i]` on, times its row of `weights`
    const int32_t *firsts, *counts, *weights;
    int64_t taps;         // of a row of `weights`
    int64_t begin, end;   // outputs that are needed
};

typedef std::vector<uint8_t> Levels;

// Rows `axis.begin` to `axis.end` of the resampled image, whose input begins with row `first`.
Levels resampled(const uint8_t *from, int64_t first, int64_t width, const Axis &axis) {
    Levels made((axis.end - axis.begin) * width);
    for (int64_t i = axis.begin; i < axis.end; ++i) {
        const uint8_t *own = from + (axis.firsts[i] - first) * width;
        const int32_t *weights = axis.weights + i * axis.taps;
        uint8_t *to = made.data() + (i - axis.begin) * width;
        for (int64_t at = 0; at < width; at += PART) {
            const int64_t size = std::min(PART, width - at);
            int32_t sums[PART];
            std::fill(sums, sums + PART, 1 << (BITS - 1));
            for (int k = 0; k < axis.counts[i]; ++k) {
                const uint8_t *row = own + k * width + at;
                const int32_t weight = weights[k];
                for (int64_t j = 0; j < size; ++j) sums[j] += row[j] * weight;
            }
            for (int64_t j = 0; j < size; ++j) to[at + j] = std::clamp(sums[j] >> BITS, 0, 255);
        }
    }
    return made;
}

// Rows become columns, three levels at a time.
void transpose(const uint8_t *from, int64_t rows, int64_t columns, uint8_t *to) {
    for (int64_t top = 0; top < rows; top += 16)
        for (int64_t x = 0; x < columns; ++x)
            for (int64_t y = top; y < std::min(rows, top + 16); ++y)
                memcpy(to + (x * rows + y) * 3, from + (y * columns + x) * 3, 3);
}

Levels resampled_columns(const uint8_t *from, int64_t rows, int64_t columns, const Axis &axis) {
    const int64_t wide = axis.end - axis.begin;
    Levels made(rows * wide * 3), strip(std::min(rows, STRIP) * columns * 3);
    for (int64_t top = 0; top < rows; top += STRIP) {
        const int64_t some = std::min(STRIP, rows - top);
        transpose(from + top * columns * 3, some, columns, strip.data());
        transpose(resampled(strip.data(), 0, some * 3, axis).data(), wide, some, made.data() + top * wide * 3);
    }
    return made;
}

// First and last input of the outputs that are needed.
std::pair<int64_t, int64_t> inputs(const Axis &axis) {
    return {axis.firsts[axis.begin], axis.firsts[axis.end - 1] + axis.counts[axis.end - 1]};
}

}  // namespace

extern "C" {

// Planes [3 h w] of the image [rows columns 3], resampled along `down` and `across` (null: not resampled), cut to the
// outputs that are needed, as the numbers that `tables` [3 256] has for their levels; without tables as levels.
void resize(const uint8_t *image, int64_t rows, int64_t columns, const Axis *down, const Axis *across, int64_t columns_first,
            const float *tables, void *planes) {
    Levels made;
    int64_t top = 0;
    auto vertical = [&] {
        made = resampled(made.empty() ? image : made.data(), top, columns * 3, *down);
        rows = down->end - down->begin;
    };
    auto horizontal = [&] {
        if (made.empty() && down) {  // the rows that are needed later
            auto [first, last] = inputs(*down);
            image += first * columns * 3, rows = last - first, top = first;
        }
        made = resampled_columns(made.empty() ? image : made.data(), rows, columns, *across);
        columns = across->end - across->begin;
    };
    if (columns_first && across) horizontal();
    if (down) vertical();
    if (!columns_first && across) horizontal();
    const uint8_t *from = made.empty() ? image : made.data();
    const int64_t size = rows * columns;
    for (int64_t i = 0; tables && i < size; ++i)
        for (int c = 0; c < 3; ++c) ((float *)planes)[c * size + i] = tables[256 * c + from[3 * i + c]];
    for (int64_t i = 0; !tables && i < size; ++i)
        for (int c = 0; c < 3; ++c) ((uint8_t *)planes)[c * size + i] = from[3 * i + c];
}
}
