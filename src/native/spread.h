/* The check of a large batch by several threads. */

#ifndef PYBK_SPREAD_H
#define PYBK_SPREAD_H

#include "digests.h"

/* As digests_match, by as many threads as have processors and enough to do; the interpreter lock must not be held. */
int digests_match_spread(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count, size_t nbytes);

#endif
