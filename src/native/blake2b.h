/* Keyed BLAKE2b (RFC 7693), the MAC of a session's messages; see pybk/transport/cluster_keys.py. */

#ifndef PYBK_BLAKE2B_H
#define PYBK_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

#define BLAKE2B_KEY_BYTES_MAX 64
#define BLAKE2B_DIGEST_BYTES_MAX 64

/* Compute the keyed hash of some bytes, at least one; the key has 1 to BLAKE2B_KEY_BYTES_MAX bytes. */
void blake2b(const uint8_t *key, size_t key_bytes, const uint8_t *bytes, size_t count, uint8_t *digest,
             size_t digest_bytes);

#endif
