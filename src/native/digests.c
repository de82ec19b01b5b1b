/* See digests.h. Entries are taken in groups of LANES, whose digests are computed at once and then stored or compared. */

#include "digests.h"

#include <string.h>

#include "crc32c.h"
#include "sha256.h"
#include "sha256_wide.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#define LANES_MAX CRC32C_LANES
#define BLOCK SHA256_BLOCK_BYTES
#define BELOW_BYTES (16 * 1024) /* more than all frames of `hmac_of_many` and of what it calls */

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

int digests_are_there_alone(int type)
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

/* Whether digests of a type are computed in the lanes of vectors. */
static int is_wide(int type)
{
    return type == DIGEST_HMAC_SHA256 && !digests_are_there_alone(type) && sha256_lanes() > 0;
}

int digests_are_there(int type) { return digests_are_there_alone(type) || is_wide(type); }

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

/* Overwrite what functions that were called, and have returned, left of keys on the stack: a compiler keeps vectors there
   that it has no registers for. */
__attribute__((noinline)) static void forget_below(void)
{
    uint8_t below[BELOW_BYTES];
    forget(below, sizeof below);
}

/* Not inlined, like others below, so that `forget_below` reaches all that it leaves. */
__attribute__((noinline)) static hmac_key prepared(const uint8_t key[HMAC_KEY_BYTES])
{
    hmac_key made = {SHA256_INITIAL, SHA256_INITIAL};
    uint8_t inner[BLOCK], outer[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        uint8_t byte = i < HMAC_KEY_BYTES ? key[i] : 0;
        inner[i] = byte ^ 0x36;
        outer[i] = byte ^ 0x5C;
    }
    if (is_wide(DIGEST_HMAC_SHA256)) {
        sha256_states states;
        const uint8_t *data[SHA256_LANES_MAX] = {inner, outer};
        const size_t steps[SHA256_LANES_MAX] = {0};
        for (size_t lane = 0; lane < sha256_lanes(); lane++) {
            sha256_set_lane(&states, lane, &SHA256_INITIAL);
            data[lane] = data[lane & 1];
        }
        sha256_wide(&states, data, steps, 1);
        made = (hmac_key){sha256_lane(&states, 0), sha256_lane(&states, 1)};
    } else {
        sha256_two(&made.inner, inner, &made.outer, outer, 1);
    }
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
        into->middle = into->first;
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

/* ---- the same, many at once ---------------------------------------------------------------------------------------- */

/* Store a digest at its place, or compare it with what is there; return the bits that differ. */
static uint8_t settle(const entry *of, const digest found, size_t size, int stores)
{
    uint8_t differs = 0;
    if (stores)
        memcpy(of->digest, found, size);
    else
        for (size_t i = 0; i < size; i++)
            differs |= of->digest[i] ^ found[i];
    return differs;
}

/* What a lane does: the parts of an entry's message one after the other, and then the block of the outer hash. */
typedef struct {
    const entry *of; /* NULL for none */
    enum { FIRST, MIDDLE, TAIL, OUTER } part;
    const uint8_t *at;
    size_t left; /* blocks of the part */
    message parts;
} lane_work;

static void begin(lane_work *work, const entry *of)
{
    work->of = of;
    split(&work->parts, of);
    work->part = FIRST, work->at = work->parts.first, work->left = work->parts.has_first;
    if (work->left == 0)
        work->part = TAIL, work->at = work->parts.tail, work->left = work->parts.tail_blocks;
}

/* Go on to the next part of the message; return whether there is one. */
static int go_on(lane_work *work)
{
    if (work->part == FIRST && work->parts.middle_blocks > 0)
        work->part = MIDDLE, work->at = work->parts.middle, work->left = work->parts.middle_blocks;
    else if (work->part < TAIL)
        work->part = TAIL, work->at = work->parts.tail, work->left = work->parts.tail_blocks;
    else
        return 0;
    return 1;
}

static void begin_outer(lane_work *work, const sha256_state *inner)
{
    uint8_t hashed[SHA256_DIGEST_BYTES];
    sha256_write(inner, hashed);
    work->left = finish(work->parts.tail, hashed, sizeof hashed, BLOCK + sizeof hashed);
    work->part = OUTER, work->at = work->parts.tail;
}

/* Compress as many blocks as all lanes have of their parts. */
static void advance(sha256_states *states, lane_work *works, size_t lanes)
{
    static const uint8_t NOTHING[BLOCK]; /* of lanes without an entry */
    const uint8_t *data[SHA256_LANES_MAX];
    size_t steps[SHA256_LANES_MAX], blocks = SIZE_MAX;
    for (size_t lane = 0; lane < lanes; lane++)
        if (works[lane].of != NULL && works[lane].left < blocks)
            blocks = works[lane].left;
    for (size_t lane = 0; lane < lanes; lane++) {
        lane_work *work = &works[lane];
        data[lane] = NOTHING, steps[lane] = 0;
        if (work->of != NULL) {
            data[lane] = work->at, steps[lane] = BLOCK;
            work->at += blocks * BLOCK;
            work->left -= blocks;
        }
    }
    sha256_wide(states, data, steps, blocks);
}

/* Compute, and store or compare, the digests of all entries: a lane that is done takes the next one. */
__attribute__((noinline)) static uint8_t hmac_of_many(const hmac_key *key, const entry *entries, size_t count, int stores)
{
    lane_work works[SHA256_LANES_MAX];
    sha256_states states;
    const size_t lanes = sha256_lanes();
    size_t begun = 0, busy = 0;
    uint8_t differs = 0;
    for (size_t lane = 0; lane < lanes; lane++) {
        sha256_set_lane(&states, lane, &key->inner);
        works[lane].of = NULL;
        if (begun < count) {
            begin(&works[lane], &entries[begun++]);
            busy++;
        }
    }
    while (busy > 0) {
        advance(&states, works, lanes);
        for (size_t lane = 0; lane < lanes; lane++) {
            lane_work *work = &works[lane];
            if (work->of == NULL || work->left > 0 || go_on(work))
                continue;
            const sha256_state reached = sha256_lane(&states, lane);
            if (work->part != OUTER) {
                begin_outer(work, &reached);
                sha256_set_lane(&states, lane, &key->outer);
                continue;
            }
            digest found;
            sha256_write(&reached, found);
            differs |= settle(work->of, found, sizeof found, stores);
            if (begun < count) {
                begin(work, &entries[begun++]);
                sha256_set_lane(&states, lane, &key->inner);
            } else {
                work->of = NULL, busy--;
            }
        }
    }
    return differs;
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

size_t digest_lanes(int type) { return is_wide(type) ? sha256_lanes() : lanes_of(type); }

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
    if (is_wide(type)) {
        differs = hmac_of_many(&prepared_key, entries, count, stores);
        forget_below();
        count = 0;
    }
    for (size_t at = 0; at < count; at += lanes) {
        if (lanes > count - at)
            lanes = count - at;
        compute(type, &prepared_key, entries + at, lanes, found);
        for (size_t lane = 0; lane < lanes; lane++)
            differs |= settle(&entries[at + lane], found[lane], size, stores);
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
