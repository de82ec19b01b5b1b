/* See checksum_wide.h. Clang takes no such pragma, and computes with the vectors that every x86-64 has. */

#include "checksum_wide.h"

#if defined(__x86_64__) && !defined(__clang__)

#pragma GCC target("avx2")

#define XXH_INLINE_ALL
#include "xxhash.h"

int checksum_wide_is_there(void) { return __builtin_cpu_supports("avx2") != 0; }

void checksum_wide(void *state, const uint8_t *bytes, size_t size) { XXH3_64bits_update(state, bytes, size); }

#else

int checksum_wide_is_there(void) { return 0; }

void checksum_wide(void *state, const uint8_t *bytes, size_t size)
{
    (void)state, (void)bytes, (void)size;
    __builtin_trap();
}

#endif
