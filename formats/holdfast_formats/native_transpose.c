/* Copies a matrix whose rows are the columns of another one. A copy element by element reads, or writes, a line of the cache
   for each of them: 0.5 GB/s of matrices of 4096 x 4096, and here 9. */

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64 /* bytes of a cache line: a tile is as many of them as a line has elements */

/* Write a tile of `size` bytes an element, whose columns are `step` apart, as rows of a line each. */
#define TURN(SIZE)                                                                                 \
    static void turn_##SIZE(char *tile, const char *source, size_t step)                           \
    {                                                                                              \
        for (size_t c = 0; c < LINE / SIZE; c++, source += step)                                   \
            for (size_t r = 0; r < LINE / SIZE; r++)                                               \
                memcpy(tile + LINE * r + SIZE * c, source + SIZE * r, SIZE);                       \
    }
TURN(1)
TURN(8)

static __m128i at(const char *bytes)
{
    return _mm_loadu_si128((const __m128i *)bytes);
}

static void put(char *bytes, __m128i value)
{
    _mm_store_si128((__m128i *)bytes, value);
}

static void turn_2(char *tile, const char *source, size_t step)
{
    for (size_t c = 0; c < 32; c += 8, source += 8 * step)
        for (size_t r = 0; r < 32; r += 8) {
            const char *from = source + 2 * r;
            char *to = tile + LINE * r + 2 * c;
            __m128i a[8], b[8];
            for (size_t i = 0; i < 8; i++)
                a[i] = at(from + i * step);
            for (size_t i = 0; i < 4; i++) {
                b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
            }
            for (size_t i = 0; i < 8; i += 4)
                for (size_t j = 0; j < 2; j++) {
                    a[i + 2 * j] = _mm_unpacklo_epi32(b[i + j], b[i + j + 2]);
                    a[i + 2 * j + 1] = _mm_unpackhi_epi32(b[i + j], b[i + j + 2]);
                }
            for (size_t i = 0; i < 4; i++) {
                put(to + LINE * (2 * i), _mm_unpacklo_epi64(a[i], a[i + 4]));
                put(to + LINE * (2 * i + 1), _mm_unpackhi_epi64(a[i], a[i + 4]));
            }
        }
}

static void turn_4(char *tile, const char *source, size_t step)
{
    for (size_t c = 0; c < 16; c += 4, source += 4 * step)
        for (size_t r = 0; r < 16; r += 4) {
            const char *from = source + 4 * r;
            char *to = tile + LINE * r + 4 * c;
            __m128i a = at(from), b = at(from + step), x = at(from + 2 * step), y = at(from + 3 * step);
            __m128i low = _mm_unpacklo_epi32(a, b), high = _mm_unpackhi_epi32(a, b);
            __m128i lower = _mm_unpacklo_epi32(x, y), higher = _mm_unpackhi_epi32(x, y);
            put(to, _mm_unpacklo_epi64(low, lower));
            put(to + LINE, _mm_unpackhi_epi64(low, lower));
            put(to + 2 * LINE, _mm_unpacklo_epi64(high, higher));
            put(to + 3 * LINE, _mm_unpackhi_epi64(high, higher));
        }
}

/* Row r of the target, `target_step` bytes after the one before, is column r of the source, whose rows are `source_step`
   apart. Elements have 1, 2, 4 or 8 bytes. The two may not overlap. */
void holdfast_transpose(char *target, size_t target_step, const char *source, size_t source_step, size_t rows,
                        size_t columns, size_t size)
{
    void (*turn)(char *, const char *, size_t) = size == 1 ? turn_1 : size == 2 ? turn_2 : size == 4 ? turn_4 : turn_8;
    char tile[LINE * LINE] __attribute__((aligned(LINE)));
    size_t side = LINE / size, whole_rows = rows / side * side, whole_columns = columns / side * side;
    int lines = ((uintptr_t)target | target_step) % LINE == 0; /* whole ones go past the caches, in any order */
    size_t high = lines ? whole_rows : 4 * side, wide = lines ? side : 16 * side; /* others are completed in the cache */
    for (size_t top = 0; top < whole_rows; top += high)
        for (size_t left = 0; left < whole_columns; left += wide)
            for (size_t r = top; r < whole_rows && r < top + high; r += side)
                for (size_t c = left; c < whole_columns && c < left + wide; c += side) {
                    const char *from = source + c * source_step + r * size;
                    char *to = target + r * target_step + c * size;
                    for (size_t i = 0; i < side; i++) /* past the end it is no error, only in vain */
                        _mm_prefetch(lines ? from + i * source_step + 2 * LINE : from + (side + i) * source_step, _MM_HINT_T0);
                    turn(tile, from, source_step);
                    for (size_t i = 0; i < side; i++, to += target_step)
                        for (size_t j = 0; j < LINE; j += 16)
                            if (lines)
                                _mm_stream_si128((__m128i *)(to + j), at(tile + LINE * i + j));
                            else
                                _mm_storeu_si128((__m128i *)(to + j), at(tile + LINE * i + j));
                }
    for (size_t c = 0; c < columns; c++) /* the edges */
        for (size_t r = c < whole_columns ? whole_rows : 0; r < rows; r++)
            memcpy(target + r * target_step + c * size, source + c * source_step + r * size, size);
    _mm_sfence(); /* what comes next may say that all is there */
}
