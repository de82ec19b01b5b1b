/* CRC-32C by the processor's own instruction. */

#ifndef PYBK_CRC32C_H
#define PYBK_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* How many runs of bytes are taken at once. */
#define CRC32C_LANES 3

/* Whether this processor has the instruction; without it nothing below may be called. */
int crc32c_is_there(void);

/* Continue one CRC; `crc` is 0 at first. */
uint32_t crc32c_one(uint32_t crc, const uint8_t *data, size_t size);

/* Continue CRC32C_LANES CRCs, each over bytes of its own, in less time than one after the other takes: the instruction
   takes three cycles, and one can begin in each. */
void crc32c_lanes(uint32_t crcs[CRC32C_LANES], const uint8_t *const data[CRC32C_LANES],
                  const size_t sizes[CRC32C_LANES]);

#endif
