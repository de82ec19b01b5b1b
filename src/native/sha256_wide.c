/* See sha256_wide.h. The rounds are those of FIPS 180-4, on vectors that have a word of each lane. */

#include "sha256_wide.h"

#include <string.h>

void sha256_set_lane(sha256_states *states, size_t lane, const sha256_state *state)
{
    for (int i = 0; i < 8; i++)
        states->words[i][lane] = state->words[i];
}

sha256_state sha256_lane(const sha256_states *states, size_t lane)
{
    sha256_state state;
    for (int i = 0; i < 8; i++)
        state.words[i] = states->words[i][lane];
    return state;
}

#if defined(__x86_64__)

#define ROTATED(x, n) ((x) >> (n) | (x) << (32 - (n)))

/* Define NAME, which compresses blocks in LANES lanes. Each width is a function for its own processors. */
#define DEFINE_WIDE(NAME, LANES, PROCESSORS)                                                                            \
    typedef uint32_t NAME##_words __attribute__((vector_size(4 * LANES)));                                              \
    __attribute__((target(PROCESSORS))) static void NAME(sha256_states *states, const uint8_t *const data[],            \
                                                         const size_t steps[], size_t blocks)                           \
    {                                                                                                                   \
        NAME##_words state[8];                                                                                          \
        for (int i = 0; i < 8; i++)                                                                                     \
            memcpy(&state[i], states->words[i], sizeof state[i]);                                                       \
        for (size_t block = 0; block < blocks; block++) {                                                               \
            uint32_t message[16][LANES];                                                                                \
            NAME##_words w[16];                                                                                         \
            for (int lane = 0; lane < LANES; lane++) {                                                                  \
                const uint8_t *from = data[lane] + block * steps[lane];                                                 \
                for (int i = 0; i < 16; i++) {                                                                          \
                    uint32_t word;                                                                                      \
                    memcpy(&word, from + 4 * i, sizeof word);                                                           \
                    message[i][lane] = __builtin_bswap32(word);                                                         \
                }                                                                                                       \
            }                                                                                                           \
            memcpy(w, message, sizeof w);                                                                               \
            NAME##_words a = state[0], b = state[1], c = state[2], d = state[3];                                        \
            NAME##_words e = state[4], f = state[5], g = state[6], h = state[7];                                        \
            _Pragma("GCC unroll 64") for (int i = 0; i < 64; i++)                                                       \
            {                                                                                                           \
                if (i >= 16) {                                                                                          \
                    NAME##_words two = w[(i + 14) & 15], fifteen = w[(i + 1) & 15];                                     \
                    w[i & 15] += (ROTATED(two, 17) ^ ROTATED(two, 19) ^ (two >> 10)) + w[(i + 9) & 15] +                \
                                 (ROTATED(fifteen, 7) ^ ROTATED(fifteen, 18) ^ (fifteen >> 3));                         \
                }                                                                                                       \
                NAME##_words one = h + (ROTATED(e, 6) ^ ROTATED(e, 11) ^ ROTATED(e, 25)) + ((e & f) ^ (~e & g)) +       \
                                   SHA256_CONSTANTS[i] + w[i & 15];                                                     \
                NAME##_words two = (ROTATED(a, 2) ^ ROTATED(a, 13) ^ ROTATED(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));   \
                h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;                                   \
            }                                                                                                           \
            state[0] += a, state[1] += b, state[2] += c, state[3] += d;                                                 \
            state[4] += e, state[5] += f, state[6] += g, state[7] += h;                                                 \
        }                                                                                                               \
        for (int i = 0; i < 8; i++)                                                                                     \
            memcpy(states->words[i], &state[i], sizeof state[i]);                                                       \
    }

DEFINE_WIDE(sixteen, 16, "avx512f")
DEFINE_WIDE(eight, 8, "avx2")

size_t sha256_lanes(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return 16;
    return __builtin_cpu_supports("avx2") ? 8 : 0;
}

void sha256_wide(sha256_states *states, const uint8_t *const data[], const size_t steps[], size_t blocks)
{
    if (sha256_lanes() == 16)
        sixteen(states, data, steps, blocks);
    else
        eight(states, data, steps, blocks);
}

#else

size_t sha256_lanes(void) { return 0; }

void sha256_wide(sha256_states *states, const uint8_t *const data[], const size_t steps[], size_t blocks)
{
    (void)states, (void)data, (void)steps, (void)blocks;
    __builtin_trap();
}

#endif
