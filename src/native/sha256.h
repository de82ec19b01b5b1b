/* SHA-256 by the processor's own instructions: the compression of blocks into one state, or into two at once. */

#ifndef PYBK_SHA256_H
#define PYBK_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BLOCK_BYTES 64
#define SHA256_DIGEST_BYTES 32

/* The eight words a to h of FIPS 180-4. */
typedef struct {
    uint32_t words[8];
} sha256_state;

/* The state before the first block, and the constants of the rounds. */
extern const sha256_state SHA256_INITIAL;
extern const uint32_t SHA256_CONSTANTS[64];

/* Whether this processor has the instructions; without them nothing below may be called. */
int sha256_is_there(void);

/* Compress `blocks` blocks into a state. */
void sha256_one(sha256_state *state, const uint8_t *data, size_t blocks);

/* Compress `blocks` blocks into each of two states, in less time than one after the other takes: the instructions of one
   state wait for each other, and those of the other fill the gaps. */
void sha256_two(sha256_state *first, const uint8_t *first_data, sha256_state *second, const uint8_t *second_data,
                size_t blocks);

/* Write a state as the digest that it is once the last block is in it. */
void sha256_write(const sha256_state *state, uint8_t digest[SHA256_DIGEST_BYTES]);

#endif
