/* SHA-256 of many messages at once, a message in each lane of the processor's vectors: for processors that have no
   instructions for SHA-256 itself. */

#ifndef PYBK_SHA256_WIDE_H
#define PYBK_SHA256_WIDE_H

#include <stddef.h>
#include <stdint.h>

#include "sha256.h"

#define SHA256_LANES_MAX 16

/* The states of all lanes: word after word, and within each word lane after lane. */
typedef struct {
    uint32_t words[8][SHA256_LANES_MAX];
} sha256_states;

/* How many lanes this processor has; 0 if its vectors are too short to be worth it. */
size_t sha256_lanes(void);

/* Compress `blocks` blocks into the state of each lane. The next block of a lane is `steps` bytes behind the one before:
   SHA256_BLOCK_BYTES, or 0 for a lane without a message. */
void sha256_wide(sha256_states *states, const uint8_t *const data[], const size_t steps[], size_t blocks);

/* Set and return the state of one lane. */
void sha256_set_lane(sha256_states *states, size_t lane, const sha256_state *state);
sha256_state sha256_lane(const sha256_states *states, size_t lane);

#endif
