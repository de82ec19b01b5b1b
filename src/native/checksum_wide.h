/* The step of XXH3-64 in vectors of AVX2, which takes half the time. */

#ifndef PYBK_CHECKSUM_WIDE_H
#define PYBK_CHECKSUM_WIDE_H

#include <stddef.h>
#include <stdint.h>

/* Whether this processor has them, and they were compiled. */
int checksum_wide_is_there(void);

/* Do what XXH3_64bits_update does. */
void checksum_wide(void *state, const uint8_t *bytes, size_t size);

#endif
