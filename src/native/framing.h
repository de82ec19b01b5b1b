/* The bytes of a commit of one entry, as pybk/storage/format/log_file.py makes them, and those of encoded entries, as
   pybk/ledger/digest.py does. */

#ifndef PYBK_FRAMING_H
#define PYBK_FRAMING_H

#include <stddef.h>
#include <stdint.h>

#include "digests.h"

#define COMMIT_BLOCK_BYTES 4096
#define COMMIT_ENTRY_AT 128 /* after the headers of the commit and of its record */
#define COMMIT_ENTRY_BYTES_MAX (UINT32_MAX - COMMIT_BLOCK_BYTES)

typedef struct {
    int64_t ledger_id, entry_id, lsn, file_id;
} place;

/* The size of the commit of an entry, with its padding. */
size_t entry_commit_bytes(size_t entry_bytes);

/* Write headers and padding around an entry that stands at COMMIT_ENTRY_AT. */
void frame_entry(uint8_t *commit, size_t entry_bytes, const place *at);

/* Compute the digests of some entries, and return XXH3-64 of the bytes of a head and then of header, digest and payload
   of each, while the payloads are in the processor's caches. If `copies`, the entries follow each other, with space for
   the payload after each digest, and the payloads are copied there. A header always stands right before its digest. */
uint64_t encode_entries(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count,
                        const uint8_t *head, size_t head_bytes, int copies);

#endif
