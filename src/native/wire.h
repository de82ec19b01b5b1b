/* The messages of an add and a read of one entry, as pybk/transport/frames.py and codec.py make and take them. What a
   function here does not take may be a message all the same: the caller then looks at it in Python, which says what is
   wrong. */

#ifndef PYBK_WIRE_H
#define PYBK_WIRE_H

#include <stddef.h>
#include <stdint.h>

#define WIRE_INSTANCE_BYTES 16
#define WIRE_KEY_BYTES 32 /* of the key of a session; a session without a secret has none */
#define WIRE_MAC_BYTES 16
#define WIRE_REQUEST_BYTES 128 /* of a request without content */
#define WIRE_TAKEN_BYTES_MAX (64 * 1024) /* larger messages are left to Python */
#define WIRE_BODY_BYTES_MAX (8 * 1024)
#define WIRE_ENTRY_BYTES_MIN 32

/* What both ends of a session know: the key of its MACs (empty for checksums instead), the bookie's instance. */
typedef struct {
    const uint8_t *key, *instance;
    size_t key_bytes;
} wire_session;

typedef struct {
    uint64_t request_id, counter, taken_bytes;
    int64_t ledger_id, first, last, stride, bytes_max;
    uint16_t flags;
} wire_read;

typedef struct {
    uint64_t request_id;
    int64_t first;
    uint64_t stride;
    size_t start, end; /* where the entry lies in the message; both are its end if there is none */
    uint16_t flags;
} wire_entry;

typedef struct {
    uint64_t counter, taken_bytes;
    int64_t ledger_id, lac;
    wire_entry entry;
} wire_add;

/* Write a read, WIRE_REQUEST_BYTES bytes. */
void wire_write_read(const wire_session *of, uint8_t version, const wire_read *read, uint8_t *message);

/* Whether a message is an authentic read with valid numbers; if so, which. */
int wire_take_read(const wire_session *of, const uint8_t *message, size_t count, wire_read *read);

/* The bytes of an answer with one entry. */
size_t wire_answer_bytes(size_t entry_bytes);

/* Write an answer with one entry of up to WIRE_BODY_BYTES_MAX bytes. */
void wire_write_answer(const wire_session *of, uint8_t version, const wire_entry *about, const uint8_t *entry,
                       size_t entry_bytes, uint8_t *message);

/* Whether a message is an authentic, whole answer with one entry and nothing else, or a reply without content; if so,
   where the entry is. */
int wire_take_reply(const wire_session *of, const uint8_t *message, size_t count, wire_entry *found);

/* Whether a message is an authentic, whole add of one entry with valid numbers; if so, which. */
int wire_take_add(const wire_session *of, const uint8_t *message, size_t count, wire_add *add);

#endif
