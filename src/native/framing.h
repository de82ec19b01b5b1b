/* The bytes of a commit of one entry, as pybk/storage/format/log_file.py makes them. */

#ifndef PYBK_FRAMING_H
#define PYBK_FRAMING_H

#include <stddef.h>
#include <stdint.h>

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

#endif
