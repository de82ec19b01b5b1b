/* See crc32c.h. */

#include "crc32c.h"

#include <string.h>

#if defined(__x86_64__)

#include <cpuid.h>
#include <nmmintrin.h>

#define TARGET __attribute__((target("sse4.2")))

int crc32c_is_there(void)
{
    unsigned int a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_2) != 0;
}

TARGET static inline uint64_t take_8(uint64_t crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
TARGET static inline uint64_t take_1(uint64_t crc, uint8_t byte) { return _mm_crc32_u8((uint32_t)crc, byte); }

#elif defined(__aarch64__)

#include <arm_acle.h>
#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

#define TARGET __attribute__((target("+crc")))

int crc32c_is_there(void) { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

TARGET static inline uint64_t take_8(uint64_t crc, uint64_t word) { return __crc32cd((uint32_t)crc, word); }
TARGET static inline uint64_t take_1(uint64_t crc, uint8_t byte) { return __crc32cb((uint32_t)crc, byte); }

#else

#define TARGET

int crc32c_is_there(void) { return 0; }

static inline uint64_t take_8(uint64_t crc, uint64_t word)
{
    (void)word;
    __builtin_trap();
    return crc;
}

static inline uint64_t take_1(uint64_t crc, uint8_t byte) { return take_8(crc, byte); }

#endif

static inline uint64_t word_at(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

TARGET uint32_t crc32c_one(uint32_t crc, const uint8_t *data, size_t size)
{
    uint64_t at = crc ^ 0xFFFFFFFFu;
    for (; size >= 8; size -= 8, data += 8)
        at = take_8(at, word_at(data));
    for (; size > 0; size--, data++)
        at = take_1(at, *data);
    return (uint32_t)at ^ 0xFFFFFFFFu;
}

TARGET void crc32c_lanes(uint32_t crcs[CRC32C_LANES], const uint8_t *const data[CRC32C_LANES],
                         const size_t sizes[CRC32C_LANES])
{
    size_t least = sizes[0];
    for (int lane = 1; lane < CRC32C_LANES; lane++)
        least = sizes[lane] < least ? sizes[lane] : least;
    least -= least % 8;
    uint64_t a = crcs[0] ^ 0xFFFFFFFFu, b = crcs[1] ^ 0xFFFFFFFFu, c = crcs[2] ^ 0xFFFFFFFFu;
    for (size_t at = 0; at < least; at += 8) {
        a = take_8(a, word_at(data[0] + at));
        b = take_8(b, word_at(data[1] + at));
        c = take_8(c, word_at(data[2] + at));
    }
    const uint64_t done[CRC32C_LANES] = {a, b, c};
    for (int lane = 0; lane < CRC32C_LANES; lane++)
        crcs[lane] = crc32c_one((uint32_t)done[lane] ^ 0xFFFFFFFFu, data[lane] + least, sizes[lane] - least);
}
