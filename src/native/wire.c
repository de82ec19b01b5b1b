/* See wire.h. Numbers are little-endian, as are all processors that the core is built for. */

#include "wire.h"

#include <string.h>

#include "blake2b.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#define VERSION_MIN 1
#define VERSION 1
#define KIND_ADD 16
#define KIND_REPLY 17
#define KIND_ANSWER 19
#define KIND_READ 20
#define RUNS_MAX 64
#define MESSAGE_BYTES_MAX (24 << 20) /* no reply is larger, whatever a read asks for */
#define STRIDE_MAX UINT32_MAX /* as of extents */

typedef struct {
    uint8_t magic[2], version, kind;
    uint16_t flags, head_bytes;
    uint64_t request_id, counter, taken_bytes;
    uint8_t instance[WIRE_INSTANCE_BYTES];
    int64_t ledger_id, a, b, c, d;
    uint16_t runs, frames;
    uint32_t inline_bytes;
    uint8_t checksum[16];
} head;

typedef struct {
    int64_t first;
    uint64_t stride;
    uint32_t entries, bytes;
} run;

_Static_assert(sizeof(head) == 112 && sizeof(run) == 24, "the head and the run have no gaps");
_Static_assert(sizeof(head) + WIRE_MAC_BYTES == WIRE_REQUEST_BYTES, "a request without content is a head and its MAC");

static void checksum(const uint8_t *bytes, size_t count, uint8_t into[16])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes, count));
    memcpy(into, canonical.digest, sizeof canonical.digest);
}

static void write_mac(const wire_session *of, const uint8_t *bytes, size_t count, uint8_t mac[WIRE_MAC_BYTES])
{
    if (of->key_bytes)
        blake2b(of->key, of->key_bytes, bytes, count, mac, WIRE_MAC_BYTES);
    else
        checksum(bytes, count, mac);
}

/* The time does not depend on which byte differs. */
static int are_equal(const uint8_t *left, const uint8_t *right, size_t count)
{
    volatile uint8_t different = 0;
    for (size_t i = 0; i < count; i++)
        different |= left[i] ^ right[i];
    return !different;
}

/* Whether bytes are a message of one frame in this session that arrived whole. Lengths are compared before anything is
   read by them. */
static int is_message(const wire_session *of, const uint8_t *message, size_t count, head *as)
{
    if (count < WIRE_REQUEST_BYTES || count > WIRE_TAKEN_BYTES_MAX)
        return 0;
    memcpy(as, message, sizeof *as);
    const size_t before = (size_t)as->head_bytes + WIRE_MAC_BYTES;
    if (as->magic[0] != 'P' || as->magic[1] != 'B' || as->version < VERSION_MIN || as->version > VERSION ||
        as->runs > RUNS_MAX || as->frames || as->head_bytes < sizeof *as + as->runs * sizeof(run) ||
        before + as->inline_bytes != count || memcmp(as->instance, of->instance, WIRE_INSTANCE_BYTES) != 0)
        return 0;
    uint8_t right[WIRE_MAC_BYTES];
    write_mac(of, message, as->head_bytes, right);
    if (!are_equal(right, message + as->head_bytes, sizeof right))
        return 0;
    checksum(message + before, as->inline_bytes, right);
    return are_equal(right, as->checksum, sizeof right);
}

void wire_write_read(const wire_session *of, uint8_t version, const wire_read *read, uint8_t *message)
{
    head made = {{'P', 'B'}, version, KIND_READ, read->flags, sizeof(head), read->request_id, read->counter,
                 read->taken_bytes, {0}, read->ledger_id, read->first, read->last, read->stride, read->bytes_max,
                 0, 0, 0, {0}};
    memcpy(made.instance, of->instance, WIRE_INSTANCE_BYTES);
    checksum(message, 0, made.checksum);
    memcpy(message, &made, sizeof made);
    write_mac(of, message, sizeof made, message + sizeof made);
}

int wire_take_read(const wire_session *of, const uint8_t *message, size_t count, wire_read *read)
{
    head as;
    if (count < WIRE_REQUEST_BYTES || message[3] != KIND_READ || !is_message(of, message, count, &as))
        return 0;
    const int64_t bytes_max = as.d < MESSAGE_BYTES_MAX ? as.d : MESSAGE_BYTES_MAX;
    *read = (wire_read){as.request_id, as.counter, as.taken_bytes, as.ledger_id, as.a, as.b, as.c, bytes_max, as.flags};
    return !as.runs && !as.inline_bytes && as.ledger_id >= 0 && 0 <= as.a && as.a <= as.b && 1 <= as.c &&
           as.c <= (int64_t)STRIDE_MAX && as.d >= 0;
}

size_t wire_answer_bytes(size_t entry_bytes)
{
    return sizeof(head) + sizeof(run) + WIRE_MAC_BYTES + sizeof(uint32_t) + entry_bytes;
}

void wire_write_answer(const wire_session *of, uint8_t version, const wire_entry *about, const uint8_t *entry,
                       size_t entry_bytes, uint8_t *message)
{
    const uint32_t size = (uint32_t)entry_bytes, content = size + (uint32_t)sizeof size;
    const size_t before = sizeof(head) + sizeof(run);
    uint8_t *body = message + before + WIRE_MAC_BYTES;
    const run one = {about->first, about->stride, 1, size};
    head made = {{'P', 'B'}, version, KIND_ANSWER, 0, (uint16_t)before, about->request_id, 0, 0, {0}, 0, 0, 0, 0, 0,
                 1, 0, content, {0}};
    memcpy(body, &size, sizeof size);
    memcpy(body + sizeof size, entry, entry_bytes);
    checksum(body, content, made.checksum);
    memcpy(made.instance, of->instance, WIRE_INSTANCE_BYTES);
    memcpy(message, &made, sizeof made);
    memcpy(message + sizeof made, &one, sizeof one);
    write_mac(of, message, before, message + before);
}

/* Whether the content of a message is one run of one entry; if so, where that is. */
static int is_one_entry(const head *as, const uint8_t *message, size_t count, wire_entry *found)
{
    const size_t at = (size_t)as->head_bytes + WIRE_MAC_BYTES;
    run one;
    uint32_t size;
    if (as->runs != 1 || as->inline_bytes < sizeof size)
        return 0;
    memcpy(&one, message + sizeof *as, sizeof one);
    memcpy(&size, message + at, sizeof size);
    *found = (wire_entry){as->request_id, one.first, one.stride, at + sizeof size, count, as->flags};
    return one.entries == 1 && one.first >= 0 && 1 <= one.stride && one.stride <= STRIDE_MAX && one.bytes == size &&
           size >= WIRE_ENTRY_BYTES_MIN && as->inline_bytes == sizeof size + (size_t)size;
}

int wire_take_reply(const wire_session *of, const uint8_t *message, size_t count, wire_entry *found)
{
    head as;
    if (count < WIRE_REQUEST_BYTES || (message[3] != KIND_ANSWER && message[3] != KIND_REPLY) ||
        !is_message(of, message, count, &as))
        return 0;
    if (as.kind == KIND_ANSWER)
        return !as.flags && is_one_entry(&as, message, count, found);
    *found = (wire_entry){as.request_id, 0, 0, count, count, as.flags};
    return !as.runs && !as.inline_bytes;
}

int wire_take_add(const wire_session *of, const uint8_t *message, size_t count, wire_add *add)
{
    head as;
    if (count < WIRE_REQUEST_BYTES || message[3] != KIND_ADD || !is_message(of, message, count, &as))
        return 0;
    *add = (wire_add){as.counter, as.taken_bytes, as.ledger_id, as.a, {0}};
    return as.ledger_id >= 0 && as.a >= -1 && is_one_entry(&as, message, count, &add->entry);
}
