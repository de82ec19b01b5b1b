/* See blake2b.h. Numbers are little-endian, as are all processors that the core is built for. */

#include "blake2b.h"

#include <string.h>

#define BLOCK_BYTES 128
#define ROUNDS 12

static const uint64_t START[8] = {
    0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
    0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
};

static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t turned(uint64_t word, int bits) { return word >> bits | word << (64 - bits); }

static inline void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = turned(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turned(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turned(v[b] ^ v[c], 63);
}

/* Take one block; `taken` are the bytes so far, with those of this block. */
static void take(uint64_t state[8], const uint8_t block[BLOCK_BYTES], uint64_t taken, int is_last)
{
    uint64_t m[16], v[16];
    memcpy(m, block, sizeof m);
    memcpy(v, state, 8 * sizeof *v);
    memcpy(v + 8, START, sizeof START);
    v[12] ^= taken;
    if (is_last)
        v[14] = ~v[14];
    for (int round = 0; round < ROUNDS; round++) {
        const uint8_t *s = ORDER[round % 10];
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        state[i] ^= v[i] ^ v[i + 8];
}

/* Overwrite what is no longer needed, even though nothing reads it afterwards. */
static void wipe(void *bytes, size_t count)
{
    memset(bytes, 0, count);
    __asm__ volatile("" : : "r"(bytes) : "memory");
}

void blake2b(const uint8_t *key, size_t key_bytes, const uint8_t *bytes, size_t count, uint8_t *digest,
             size_t digest_bytes)
{
    uint64_t state[8];
    uint8_t block[BLOCK_BYTES] = {0};
    memcpy(state, START, sizeof state);
    state[0] ^= 0x01010000 ^ (uint64_t)key_bytes << 8 ^ (uint64_t)digest_bytes;
    memcpy(block, key, key_bytes);
    take(state, block, BLOCK_BYTES, 0);
    wipe(block, sizeof block);
    uint64_t taken = BLOCK_BYTES;
    for (; count > BLOCK_BYTES; bytes += BLOCK_BYTES, count -= BLOCK_BYTES)
        take(state, bytes, taken += BLOCK_BYTES, 0);
    memcpy(block, bytes, count);
    take(state, block, taken + count, 1);
    memcpy(digest, state, digest_bytes);
    wipe(state, sizeof state);
}
