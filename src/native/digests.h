/* The digests of many entries at once; see pybk/ledger/digest.py for what they are. */

#ifndef PYBK_DIGESTS_H
#define PYBK_DIGESTS_H

#include <stddef.h>
#include <stdint.h>

#define HEADER_BYTES 32
#define HMAC_KEY_BYTES 32
#define DIGEST_BYTES_MAX 32

/* The codes of pybk.ledger.digest.DigestType. */
enum { DIGEST_CRC32C = 3, DIGEST_NONE = 4, DIGEST_HMAC_SHA256 = 100, DIGEST_XXH3 = 101 };

/* One entry: its header, its payload, and the place of its digest. */
typedef struct {
    const uint8_t *header;
    const uint8_t *payload;
    size_t payload_bytes;
    uint8_t *digest;
} entry;

/* Whether this processor computes digests of a type here: of many entries, or also of one in no more time than others
   do. */
int digests_are_there(int type);
int digests_are_there_alone(int type);

/* The size of a digest, 0 for none. */
size_t digest_bytes(int type);

/* The number of entries whose digests are computed at a time. */
size_t digest_lanes(int type);

/* Compute the digests of some entries, and write each to its place. The key is that of HMAC_SHA256; others ignore it. */
void make_digests(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count);

/* Whether the digests of all entries stand at their places. The time does not depend on which byte differs. */
int digests_match(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count);

#endif
