/* CRC-32, as of zlib, by multiplication without carries: the remainder of 64 bytes is folded into the next 64. A table takes
   half a second of processor for a GiB, five times as long. After "Fast CRC Computation for Generic Polynomials Using
   PCLMULQDQ Instruction" of Intel, with its constants for the reflected polynomial. */

#include <emmintrin.h>
#include <smmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <wmmintrin.h>

#define HERE __attribute__((target("sse4.1,pclmul")))

HERE static __m128i at(const unsigned char *bytes)
{
    return _mm_loadu_si128((const __m128i *)bytes);
}

/* The remainder `x` as it is some bits further on, by the constants `k` for these bits, and the bytes that are there. */
HERE static __m128i folded(__m128i x, __m128i k, __m128i there)
{
    __m128i low = _mm_clmulepi64_si128(x, k, 0x00), high = _mm_clmulepi64_si128(x, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

int holdfast_crc32_here(void)
{
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

/* The checksum of bytes after others whose checksum is `crc`. `count` is a multiple of 16, and at least 64. */
HERE uint32_t holdfast_crc32(uint32_t crc, const unsigned char *bytes, size_t count)
{
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124), polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = at(bytes), b = at(bytes + 16), c = at(bytes + 32), d = at(bytes + 48), x, y;

    a = _mm_xor_si128(a, _mm_cvtsi32_si128((int)~crc));
    for (bytes += 64, count -= 64; count >= 64; bytes += 64, count -= 64) {
        a = folded(a, by_512, at(bytes));
        b = folded(b, by_512, at(bytes + 16));
        c = folded(c, by_512, at(bytes + 32));
        d = folded(d, by_512, at(bytes + 48));
    }
    x = folded(folded(folded(a, by_128, b), by_128, c), by_128, d);
    for (; count >= 16; bytes += 16, count -= 16)
        x = folded(x, by_128, at(bytes));

    /* From 128 bits to 64, and to 32 by Barrett's reduction. */
    x = _mm_xor_si128(_mm_srli_si128(x, 8), _mm_clmulepi64_si128(x, by_128, 0x10));
    x = _mm_xor_si128(_mm_srli_si128(x, 4), _mm_clmulepi64_si128(_mm_and_si128(x, low_words), by_64, 0x00));
    y = _mm_clmulepi64_si128(_mm_and_si128(x, low_words), polynomial, 0x10);
    y = _mm_clmulepi64_si128(_mm_and_si128(y, low_words), polynomial, 0x00);
    return ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(x, y), 1);
}
