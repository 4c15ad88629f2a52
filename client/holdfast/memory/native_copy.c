/* What Python would do in many calls, in one and without its lock: proofs of extents, looks at many places of memory, and
   first of all copies that go past the cores' caches: stores with a non-temporal hint, which do not read the target first.

   A plain copy of memory that no cache holds moves every byte three times (the source, the target as it was, the target as
   it is), and leaves the cores' caches full of what nobody wants soon. See "Optimizing Cache Usage" in Intel's optimization
   manual; AMD's says the same. C libraries do it for large copies only, larger than the part of the cache that they take for
   theirs, which on a virtual machine may be hundreds of megabytes. */

#include <emmintrin.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define LINE 64                /* bytes of a cache line */
#define AHEAD (16 * LINE)      /* how far ahead the source is asked for */
#define STREAMED_MIN (8 * 1024) /* less is as fast through the cache, and may be wanted from it */

struct copy {
    uint64_t target, source, bytes;
};

/* At least a line of it: the head alone may be as long. */
static void stream(char *target, const char *source, size_t bytes)
{
    size_t head = -(uintptr_t)target % LINE;
    memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; bytes >= LINE; bytes -= LINE, target += LINE, source += LINE) {
        _mm_prefetch(source + AHEAD, _MM_HINT_NTA); /* past the end it is no error, only in vain */
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c);
        _mm_stream_si128((__m128i *)target + 3, d);
    }
    memcpy(target, source, bytes);
}

static void copy(char *target, const char *source, size_t bytes)
{
    if (bytes < STREAMED_MIN)
        memcpy(target, source, bytes);
    else
        stream(target, source, bytes);
}

/* Copy bytes over others, which they may not overlap. All is visible to other cores when this returns. */
void holdfast_copy_one(char *target, const char *source, size_t bytes)
{
    copy(target, source, bytes);
    _mm_sfence(); /* non-temporal stores are not ordered with others, and what comes next may say that all is there */
}

/* The same of many. */
void holdfast_copy(const struct copy *copies, size_t count)
{
    for (size_t i = 0; i < count; i++)
        copy((char *)(uintptr_t)copies[i].target, (const char *)(uintptr_t)copies[i].source, copies[i].bytes);
    _mm_sfence();
}

/* 64 bits in which every bit depends on every bit of the value (the end of Vigna's splitmix64). */
static uint64_t mix(uint64_t value)
{
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

#define AT_ONCE 64 /* places that are asked for together: each is a line and a page of its own, which no cache holds */

/* Where the word stands that is looked at in a stretch: the number'th word of all draws its place from the seed. */
static uint64_t place(uint64_t bytes, uint64_t begin, uint64_t stretch, uint64_t seed, uint64_t number)
{
    uint64_t length = bytes - begin < stretch ? bytes - begin : stretch;
    uint64_t at = begin + 8 * ((mix(seed + number) >> 32) * ((length + 7) / 8) >> 32);
    return at + 8 <= bytes ? at : bytes < 8 ? 0 : bytes - 8;
}

static uint64_t word(const char *at, uint64_t bytes)
{
    uint64_t value = 0;
    memcpy(&value, at, bytes < 8 ? bytes : 8); /* x86-64 is little-endian */
    return value;
}

static void read_words(const char **places, const uint64_t *bytes, size_t count, uint64_t *values)
{
    for (size_t i = 0; i < count; i++)
        values[i] = word(places[i], bytes[i]);
}

/* Note one word of every stretch of the sources. */
void holdfast_note(const struct copy *copies, size_t count, uint64_t stretch, uint64_t seed, uint64_t *values)
{
    const char *places[AT_ONCE];
    uint64_t bytes[AT_ONCE], number = 0, waiting = 0;
    for (size_t i = 0; i < count; i++)
        for (uint64_t begin = 0; begin < copies[i].bytes; begin += stretch, number++) {
            places[waiting] = (const char *)(uintptr_t)copies[i].source + place(copies[i].bytes, begin, stretch, seed, number);
            bytes[waiting] = copies[i].bytes;
            _mm_prefetch(places[waiting], _MM_HINT_NTA);
            if (++waiting == AT_ONCE) {
                read_words(places, bytes, waiting, values + number + 1 - waiting);
                waiting = 0;
            }
        }
    read_words(places, bytes, waiting, values + number - waiting);
}

#define AXES_MAX 8

/* Elements that are not one after the other: how many and of how many bytes, how many make a stretch, and of every axis its
   length and the bytes from an element to the next, from the axis whose elements are the closest on. */
struct strided {
    uint64_t base, elements, bytes, stretch, axes;
    uint64_t lengths[AXES_MAX], steps[AXES_MAX];
};

struct read {
    uint64_t address, bytes;
};

/* Note one element of every stretch of the sources, and where it is. */
void holdfast_note_strided(const struct strided *sources, size_t count, uint64_t seed, struct read *reads, uint64_t *values)
{
    const char *places[AT_ONCE];
    uint64_t bytes[AT_ONCE], number = 0, waiting = 0;
    for (size_t i = 0; i < count; i++)
        for (uint64_t begin = 0; begin < sources[i].elements; begin += sources[i].stretch, number++) {
            uint64_t left = sources[i].elements - begin, length = left < sources[i].stretch ? left : sources[i].stretch;
            uint64_t rest = begin + ((mix(seed + number) >> 32) * length >> 32), address = sources[i].base;
            for (uint64_t axis = 0; axis < sources[i].axes; axis++) {
                address += rest % sources[i].lengths[axis] * sources[i].steps[axis];
                rest /= sources[i].lengths[axis];
            }
            reads[number].address = address;
            bytes[waiting] = reads[number].bytes = sources[i].bytes;
            places[waiting] = (const char *)(uintptr_t)address;
            _mm_prefetch(places[waiting], _MM_HINT_NTA);
            if (++waiting == AT_ONCE) {
                read_words(places, bytes, waiting, values + number + 1 - waiting);
                waiting = 0;
            }
        }
    read_words(places, bytes, waiting, values + number - waiting);
}

/* Copy what was noted with this stretch and seed. `changed` says of each whether a noted word was another one once its
   stretch had been copied: then it has changed before, or while it was copied. With `wrote`, stretches that the target has
   already are read and left as they are; it says of each whether others were written. */
void holdfast_copy_noted(const struct copy *copies, size_t count, uint64_t stretch, uint64_t seed, const uint64_t *values,
                         uint8_t *changed, uint8_t *wrote)
{
    uint64_t number = 0;
    for (size_t i = 0; i < count; i++) {
        char *target = (char *)(uintptr_t)copies[i].target;
        const char *source = (const char *)(uintptr_t)copies[i].source;
        uint64_t bytes = copies[i].bytes;
        changed[i] = 0;
        if (wrote)
            wrote[i] = 0;
        for (uint64_t begin = 0; begin < bytes; begin += stretch, number++) {
            uint64_t length = bytes - begin < stretch ? bytes - begin : stretch;
            if (!wrote || memcmp(target + begin, source + begin, length)) {
                if (bytes < STREAMED_MIN || length < LINE) /* what is left may not reach the next line */
                    memcpy(target + begin, source + begin, length);
                else
                    stream(target + begin, source + begin, length);
                if (wrote)
                    wrote[i] = 1;
            }
            __asm__ volatile("" ::: "memory"); /* what is read now is read now */
            changed[i] |= word(source + place(bytes, begin, stretch, seed, number), bytes) != values[number];
        }
    }
    _mm_sfence();
}

/* Say of each copy whether its target has other bytes than its source. */
void holdfast_compare(const struct copy *copies, size_t count, uint8_t *differs)
{
    for (size_t i = 0; i < count; i++)
        differs[i] = memcmp((const char *)(uintptr_t)copies[i].target, (const char *)(uintptr_t)copies[i].source,
                            copies[i].bytes) != 0;
}

typedef uint64_t digest_of(const void *data, size_t bytes);

struct box {
    uint64_t address, bytes;
};

/* Digest boxes, all of each. */
void holdfast_digest(const struct box *boxes, size_t count, digest_of *digest, uint64_t *values)
{
    for (size_t i = 0; i < count; i++)
        values[i] = digest((const void *)(uintptr_t)boxes[i].address, boxes[i].bytes);
}

#define SAMPLE 65536
#define STRETCHES 16
#define STRETCH 4096

/* Digest a sample of each, in places that follow from its length and the step alone (formats/holdfast_formats/staging/replica_claims.py). */
void holdfast_sample(const struct box *boxes, size_t count, uint64_t step, digest_of *digest, uint64_t *values)
{
    for (size_t i = 0; i < count; i++) {
        const char *box = (const char *)(uintptr_t)boxes[i].address;
        uint64_t bytes = boxes[i].bytes, parts[STRETCHES];
        if (bytes <= SAMPLE) {
            values[i] = digest(box, bytes);
            continue;
        }
        for (uint64_t j = 0; j < STRETCHES; j++) {
            uint64_t at = bytes / STRETCHES * j + mix(step * STRETCHES + j) % (bytes / STRETCHES - STRETCH + 1);
            parts[j] = digest(box + at, STRETCH);
        }
        values[i] = digest(parts, sizeof parts);
    }
}

struct extent {
    uint64_t target, bytes, digest; /* no target: it is proven, and goes nowhere */
};

/* Prove extents that lie behind each other, and copy each to its target while the cache still has it. Returns how many of
   them, from the first on, were what was written; the one behind them was not, and is copied nowhere. */
size_t holdfast_prove(const char *source, const struct extent *extents, size_t count, digest_of *digest)
{
    size_t i = 0;
    for (; i < count && digest(source, extents[i].bytes) == extents[i].digest; i++) {
        if (extents[i].target)
            copy((char *)(uintptr_t)extents[i].target, source, extents[i].bytes);
        source += extents[i].bytes;
    }
    _mm_sfence();
    return i;
}

static int read_whole(int file, char *into, size_t bytes, off_t at)
{
    while (bytes) {
        ssize_t got = pread(file, into, bytes, at);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return 0;
        into += got, at += got, bytes -= (size_t)got;
    }
    return 1;
}

/* The same of extents that lie behind each other in a file, from `at` on: each is read to its target, and proven there while
   the cache has it. The one that was not what was written is there as well. */
size_t holdfast_prove_file(int file, int64_t at, const struct extent *extents, size_t count, digest_of *digest)
{
    size_t i = 0;
    for (; i < count; at += (int64_t)extents[i].bytes, i++) {
        char *into = (char *)(uintptr_t)extents[i].target;
        if (!read_whole(file, into, extents[i].bytes, at) || digest(into, extents[i].bytes) != extents[i].digest)
            break;
    }
    return i;
}
