/* See sha256.h. Each processor family has a `rounds` for N states, which the compiler unrolls for one and for two. */

#include "sha256.h"

#include <string.h>

const sha256_state SHA256_INITIAL = {
    {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};

void sha256_write(const sha256_state *state, uint8_t digest[SHA256_DIGEST_BYTES])
{
    for (int i = 0; i < 8; i++) {
        uint32_t word = __builtin_bswap32(state->words[i]);
        memcpy(digest + 4 * i, &word, 4);
    }
}

const uint32_t SHA256_CONSTANTS[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("sha,sse4.1")))

int sha256_is_there(void)
{
    unsigned int a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) != 0;
}

/* The order of words that the instructions want: a, b, e, f in one register, and c, d, g, h in the other. */
typedef struct {
    __m128i abef, cdgh;
} registers;

TARGET static inline registers load(const sha256_state *state)
{
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state->words), 0xB1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state->words + 4)), 0x1B);
    return (registers){_mm_alignr_epi8(badc, hgfe, 8), _mm_blend_epi16(hgfe, badc, 0xF0)};
}

TARGET static inline void store(sha256_state *state, registers from)
{
    __m128i feba = _mm_shuffle_epi32(from.abef, 0x1B);
    __m128i dchg = _mm_shuffle_epi32(from.cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state->words, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state->words + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* Four words of the message schedule: of the message itself, then of the words before them. */
TARGET static inline __m128i words(__m128i w[4], const uint8_t *data, int group)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bULL, 0x0405060700010203ULL);
    if (group < 4)
        return w[group] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * group)), swap);
    __m128i newest = w[(group + 3) & 3];
    __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[group & 3], w[(group + 1) & 3]),
                                _mm_alignr_epi8(newest, w[(group + 2) & 3], 4));
    return w[group & 3] = _mm_sha256msg2_epu32(sum, newest);
}

TARGET static inline void four_rounds(registers *at, __m128i w, int group)
{
    __m128i sum = _mm_add_epi32(w, _mm_load_si128((const __m128i *)SHA256_CONSTANTS + group));
    at->cdgh = _mm_sha256rnds2_epu32(at->cdgh, at->abef, sum);
    at->abef = _mm_sha256rnds2_epu32(at->abef, at->cdgh, _mm_shuffle_epi32(sum, 0x0E));
}

TARGET static inline registers sum_of(registers one, registers other)
{
    return (registers){_mm_add_epi32(one.abef, other.abef), _mm_add_epi32(one.cdgh, other.cdgh)};
}

#define WORDS __m128i

#elif defined(__aarch64__)

#include <arm_neon.h>
#include <sys/auxv.h>

#ifndef HWCAP_SHA2
#define HWCAP_SHA2 (1 << 6)
#endif

#define TARGET __attribute__((target("+crypto")))

int sha256_is_there(void) { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

typedef struct {
    uint32x4_t abcd, efgh;
} registers;

TARGET static inline registers load(const sha256_state *state)
{
    return (registers){vld1q_u32(state->words), vld1q_u32(state->words + 4)};
}

TARGET static inline void store(sha256_state *state, registers from)
{
    vst1q_u32(state->words, from.abcd);
    vst1q_u32(state->words + 4, from.efgh);
}

/* Four words of the message schedule: of the message itself, then of the words before them. */
TARGET static inline uint32x4_t words(uint32x4_t w[4], const uint8_t *data, int group)
{
    if (group < 4)
        return w[group] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * group)));
    uint32x4_t older = vsha256su0q_u32(w[group & 3], w[(group + 1) & 3]);
    return w[group & 3] = vsha256su1q_u32(older, w[(group + 2) & 3], w[(group + 3) & 3]);
}

TARGET static inline void four_rounds(registers *at, uint32x4_t w, int group)
{
    uint32x4_t sum = vaddq_u32(w, vld1q_u32(SHA256_CONSTANTS + 4 * group));
    uint32x4_t before = at->abcd;
    at->abcd = vsha256hq_u32(at->abcd, at->efgh, sum);
    at->efgh = vsha256h2q_u32(at->efgh, before, sum);
}

TARGET static inline registers sum_of(registers one, registers other)
{
    return (registers){vaddq_u32(one.abcd, other.abcd), vaddq_u32(one.efgh, other.efgh)};
}

#define WORDS uint32x4_t

#else

int sha256_is_there(void) { return 0; }

void sha256_one(sha256_state *state, const uint8_t *data, size_t blocks)
{
    (void)state, (void)data, (void)blocks;
    __builtin_trap();
}

void sha256_two(sha256_state *first, const uint8_t *first_data, sha256_state *second, const uint8_t *second_data,
                size_t blocks)
{
    (void)first, (void)first_data, (void)second, (void)second_data, (void)blocks;
    __builtin_trap();
}

#endif

#ifdef WORDS

TARGET void sha256_one(sha256_state *state, const uint8_t *data, size_t blocks)
{
    registers at = load(state);
    for (; blocks > 0; blocks--, data += SHA256_BLOCK_BYTES) {
        WORDS w[4];
        registers before = at;
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++)
            four_rounds(&at, words(w, data, group), group);
        at = sum_of(at, before);
    }
    store(state, at);
}

TARGET void sha256_two(sha256_state *first, const uint8_t *first_data, sha256_state *second,
                       const uint8_t *second_data, size_t blocks)
{
    registers one = load(first), other = load(second);
    for (; blocks > 0; blocks--, first_data += SHA256_BLOCK_BYTES, second_data += SHA256_BLOCK_BYTES) {
        WORDS w[4], v[4];
        registers one_before = one, other_before = other;
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            four_rounds(&one, words(w, first_data, group), group);
            four_rounds(&other, words(v, second_data, group), group);
        }
        one = sum_of(one, one_before);
        other = sum_of(other, other_before);
    }
    store(first, one);
    store(second, other);
}

#endif
