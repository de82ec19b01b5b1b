/* See digests.h. Entries are taken in groups of LANES, whose digests are computed at once and then stored or compared. */

#include "digests.h"

#include <string.h>

#include "crc32c.h"
#include "sha256.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#define LANES_MAX CRC32C_LANES
#define BLOCK SHA256_BLOCK_BYTES

_Static_assert(HEADER_BYTES + 32 == BLOCK, "a header and 32 bytes of a payload are a block");

typedef struct {
    sha256_state inner, outer;
} hmac_key;

typedef uint8_t digest[DIGEST_BYTES_MAX];

/* Return what `ask` says, and ask once in the life of the process: a virtual machine traps CPUID, at 4 to 8 us each. */
static int once(_Atomic int *answer, int (*ask)(void))
{
    enum { UNKNOWN, NO, YES };
    if (*answer == UNKNOWN)
        *answer = ask() ? YES : NO;
    return *answer == YES;
}

int digests_are_there(int type)
{
    static _Atomic int crc32c, sha256;
    switch (type) {
    case DIGEST_CRC32C:
        return once(&crc32c, crc32c_is_there);
    case DIGEST_HMAC_SHA256:
        return once(&sha256, sha256_is_there);
    case DIGEST_NONE:
    case DIGEST_XXH3:
        return 1;
    default:
        return 0;
    }
}

size_t digest_bytes(int type)
{
    switch (type) {
    case DIGEST_CRC32C:
        return 4;
    case DIGEST_HMAC_SHA256:
        return SHA256_DIGEST_BYTES;
    case DIGEST_XXH3:
        return 8;
    default:
        return 0;
    }
}

/* ---- HMAC-SHA256 (RFC 2104) --------------------------------------------------------------------------------------- */

static void forget(void *secret, size_t size)
{
    memset(secret, 0, size);
    __asm__ volatile("" : : "r"(secret) : "memory"); /* or the compiler would leave the memset out */
}

static hmac_key prepared(const uint8_t key[HMAC_KEY_BYTES])
{
    hmac_key made = {SHA256_INITIAL, SHA256_INITIAL};
    uint8_t inner[BLOCK], outer[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint8_t byte = i < HMAC_KEY_BYTES ? key[i] : 0;
        inner[i] = byte ^ 0x36;
        outer[i] = byte ^ 0x5C;
    }
    sha256_two(&made.inner, inner, &made.outer, outer, 1);
    forget(inner, sizeof inner);
    forget(outer, sizeof outer);
    return made;
}

/* The end of a message: what is left of it, a bit, zeros, and its length in bits; one block or two. */
static size_t finish(uint8_t tail[2 * BLOCK], const uint8_t *rest, size_t rest_bytes, uint64_t message_bytes)
{
    size_t blocks = rest_bytes + 9 > BLOCK ? 2 : 1;
    memcpy(tail, rest, rest_bytes);
    memset(tail + rest_bytes, 0, blocks * BLOCK - rest_bytes);
    tail[rest_bytes] = 0x80;
    uint64_t bits = __builtin_bswap64(8 * message_bytes);
    memcpy(tail + blocks * BLOCK - 8, &bits, 8);
    return blocks;
}

/* A message after the block of the key: some blocks where they are, between a first and a last part that are copies. */
typedef struct {
    uint8_t first[BLOCK], tail[2 * BLOCK];
    const uint8_t *middle;
    size_t has_first, middle_blocks, tail_blocks;
} message;

static void split(message *into, const entry *of)
{
    uint64_t bytes = BLOCK + HEADER_BYTES + (uint64_t)of->payload_bytes;
    memcpy(into->first, of->header, HEADER_BYTES);
    into->has_first = of->payload_bytes >= BLOCK - HEADER_BYTES;
    if (!into->has_first) {
        memcpy(into->first + HEADER_BYTES, of->payload, of->payload_bytes);
        into->middle_blocks = 0;
        into->tail_blocks = finish(into->tail, into->first, HEADER_BYTES + of->payload_bytes, bytes);
        return;
    }
    memcpy(into->first + HEADER_BYTES, of->payload, BLOCK - HEADER_BYTES);
    into->middle = of->payload + (BLOCK - HEADER_BYTES);
    size_t left = of->payload_bytes - (BLOCK - HEADER_BYTES);
    into->middle_blocks = left / BLOCK;
    into->tail_blocks = finish(into->tail, into->middle + left - left % BLOCK, left % BLOCK, bytes);
}

/* Compress two runs of blocks, the common part of them at once. */
static void both(sha256_state states[2], const uint8_t *one, size_t one_blocks, const uint8_t *other,
                 size_t other_blocks)
{
    size_t common = one_blocks < other_blocks ? one_blocks : other_blocks;
    if (common > 0)
        sha256_two(&states[0], one, &states[1], other, common);
    if (one_blocks > common)
        sha256_one(&states[0], one + common * BLOCK, one_blocks - common);
    if (other_blocks > common)
        sha256_one(&states[1], other + common * BLOCK, other_blocks - common);
}

static void hmac_of(const hmac_key *key, const entry *entries, size_t lanes, digest *into)
{
    message of[2];
    sha256_state states[2] = {key->inner, key->inner};
    split(&of[0], &entries[0]);
    split(&of[1], &entries[lanes - 1]); /* a last odd one is computed twice, at the price of once */
    both(states, of[0].first, of[0].has_first, of[1].first, of[1].has_first);
    both(states, of[0].middle, of[0].middle_blocks, of[1].middle, of[1].middle_blocks);
    both(states, of[0].tail, of[0].tail_blocks, of[1].tail, of[1].tail_blocks);
    uint8_t outer[2][2 * BLOCK];
    for (int lane = 0; lane < 2; lane++) {
        uint8_t inner[SHA256_DIGEST_BYTES];
        sha256_write(&states[lane], inner);
        finish(outer[lane], inner, sizeof inner, BLOCK + sizeof inner);
        states[lane] = key->outer;
    }
    sha256_two(&states[0], outer[0], &states[1], outer[1], 1);
    for (size_t lane = 0; lane < lanes; lane++)
        sha256_write(&states[lane], into[lane]);
}

/* ---- CRC-32C and XXH3 --------------------------------------------------------------------------------------------- */

static void crc32c_of(const entry *entries, size_t lanes, digest *into)
{
    uint32_t crcs[CRC32C_LANES] = {0};
    const uint8_t *headers[CRC32C_LANES], *payloads[CRC32C_LANES];
    size_t header_bytes[CRC32C_LANES], payload_bytes[CRC32C_LANES];
    for (size_t lane = 0; lane < CRC32C_LANES; lane++) {
        const entry *of = &entries[lane < lanes ? lane : 0];
        headers[lane] = of->header, header_bytes[lane] = HEADER_BYTES;
        payloads[lane] = of->payload, payload_bytes[lane] = of->payload_bytes;
    }
    crc32c_lanes(crcs, headers, header_bytes);
    crc32c_lanes(crcs, payloads, payload_bytes);
    for (size_t lane = 0; lane < lanes; lane++) {
        uint32_t word = __builtin_bswap32(crcs[lane]);
        memcpy(into[lane], &word, sizeof word);
    }
}

static void xxh3_of(const entry *of, digest into)
{
    uint64_t word = XXH3_64bits_withSeed(of->payload, of->payload_bytes, XXH3_64bits(of->header, HEADER_BYTES));
    word = __builtin_bswap64(word);
    memcpy(into, &word, sizeof word);
}

/* ---- batches ------------------------------------------------------------------------------------------------------- */

static size_t lanes_of(int type)
{
    return type == DIGEST_HMAC_SHA256 ? 2 : type == DIGEST_CRC32C ? CRC32C_LANES : 1;
}

static void compute(int type, const hmac_key *key, const entry *entries, size_t lanes, digest *into)
{
    if (type == DIGEST_HMAC_SHA256)
        hmac_of(key, entries, lanes, into);
    else if (type == DIGEST_CRC32C)
        crc32c_of(entries, lanes, into);
    else if (type == DIGEST_XXH3)
        xxh3_of(entries, into[0]);
}

/* Compute all digests, and store them, or compare them with what is there; return whether none differs. */
static int each(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count, int stores)
{
    hmac_key prepared_key = {SHA256_INITIAL, SHA256_INITIAL};
    digest found[LANES_MAX];
    size_t size = digest_bytes(type), lanes = lanes_of(type);
    uint8_t differs = 0;
    if (type == DIGEST_HMAC_SHA256)
        prepared_key = prepared(key);
    for (size_t at = 0; at < count; at += lanes) {
        if (lanes > count - at)
            lanes = count - at;
        compute(type, &prepared_key, entries + at, lanes, found);
        for (size_t lane = 0; lane < lanes; lane++) {
            uint8_t *place = entries[at + lane].digest;
            if (stores)
                memcpy(place, found[lane], size);
            else
                for (size_t i = 0; i < size; i++)
                    differs |= place[i] ^ found[lane][i];
        }
    }
    forget(&prepared_key, sizeof prepared_key);
    return differs == 0;
}

void make_digests(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count)
{
    each(type, key, entries, count, 1);
}

int digests_match(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count)
{
    return each(type, key, entries, count, 0);
}
