/* See framing.h. Numbers are little-endian, as are all processors that the core is built for. */

#include "framing.h"

#include <string.h>

#include "checksum_wide.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#define CHECKED_BYTES 56
#define LANE_BYTES ((size_t)16 * 1024) /* of payloads in a round, for each entry that is hashed at a time: they stay cached */

typedef struct {
    uint8_t magic[4];
    uint32_t format;
    uint64_t lsn, durable_lsn, file_id;
    uint32_t records, body_bytes;
    uint8_t zeros[16];
    uint64_t checksum;
} commit_header;

typedef struct {
    uint16_t magic;
    uint8_t format, kind, codec, zeros[3];
    int64_t ledger_id, first_entry_id;
    uint64_t lsn;
    uint32_t entries, stride, body_bytes, raw_bytes;
    uint64_t body_checksum, checksum;
} record_header;

_Static_assert(sizeof(commit_header) + sizeof(record_header) == COMMIT_ENTRY_AT, "the headers have no gaps");

size_t entry_commit_bytes(size_t entry_bytes)
{
    return (COMMIT_ENTRY_AT + entry_bytes + COMMIT_BLOCK_BYTES - 1) / COMMIT_BLOCK_BYTES * COMMIT_BLOCK_BYTES;
}

void frame_entry(uint8_t *commit, size_t entry_bytes, const place *at)
{
    uint8_t *entry = commit + COMMIT_ENTRY_AT;
    const uint32_t size = (uint32_t)entry_bytes;
    const uint64_t lsn = (uint64_t)at->lsn;
    record_header record = {0x4B52, 1, 1,    0,    {0},  at->ledger_id, at->entry_id,
                            lsn,    1, 1,    size, size, XXH3_64bits(entry, entry_bytes), 0};
    record.checksum = XXH3_64bits(&record, CHECKED_BYTES);
    commit_header header = {{'P', 'B', 'K', 'C'}, 1, lsn, lsn - 1, (uint64_t)at->file_id,
                            1, (uint32_t)sizeof record + size, {0}, 0};
    header.checksum = XXH3_64bits(&header, CHECKED_BYTES);
    memcpy(commit, &header, sizeof header);
    memcpy(commit + sizeof header, &record, sizeof record);
    memset(entry + entry_bytes, 0, entry_commit_bytes(entry_bytes) - COMMIT_ENTRY_AT - entry_bytes);
}

static void add(XXH3_state_t *state, const uint8_t *bytes, size_t size)
{
    if (checksum_wide_is_there())
        checksum_wide(state, bytes, size);
    else
        XXH3_64bits_update(state, bytes, size);
}

/* The number of entries in a round: the lanes of the digest are full, but perhaps in the last one. */
static size_t round_of(const entry *entries, size_t count, size_t lanes)
{
    size_t bytes = 0, taken = 0;
    while (taken < count && (bytes < lanes * LANE_BYTES || taken % lanes != 0))
        bytes += entries[taken++].payload_bytes;
    return taken;
}

uint64_t encode_entries(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count,
                        const uint8_t *head, size_t head_bytes, int copies)
{
    const size_t digest = digest_bytes(type), prefix = HEADER_BYTES + digest, lanes = digest_lanes(type);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    add(&state, head, head_bytes);
    for (size_t at = 0, taken; at < count; at += taken) {
        size_t bytes = 0;
        taken = round_of(entries + at, count - at, lanes);
        make_digests(type, key, entries + at, taken);
        for (size_t i = at; i < at + taken; i++) {
            const entry *of = &entries[i];
            if (copies) {
                memcpy(of->digest + digest, of->payload, of->payload_bytes);
                bytes += prefix + of->payload_bytes;
            } else {
                add(&state, of->header, prefix);
                add(&state, of->payload, of->payload_bytes);
            }
        }
        if (copies)
            add(&state, entries[at].header, bytes);
    }
    return XXH3_64bits_digest(&state);
}
