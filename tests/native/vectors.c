/* Checks the digests of the native core against lines of tests/native/vectors.py, without Python: for processors that are
   only emulated. Each vector is computed alone and in batches with those after it. Prints how many there were of each type. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "digests.h"

#define BATCH_MAX 40 /* more than twice the lanes of a processor, so that they take entries anew */
#define LINE_MAX (1 << 16)
#define VECTORS_MAX 1024

typedef struct {
    int type;
    uint8_t key[HMAC_KEY_BYTES], header[HEADER_BYTES], digest[DIGEST_BYTES_MAX];
    uint8_t *payload;
    size_t payload_bytes;
} vector;

static size_t bytes_of(const char *hex, uint8_t *into)
{
    if (strcmp(hex, "-") == 0)
        return 0;
    const size_t size = strlen(hex) / 2;
    for (size_t i = 0; i < size; i++) {
        unsigned int byte;
        if (sscanf(hex + 2 * i, "%2x", &byte) != 1)
            exit(2);
        into[i] = (uint8_t)byte;
    }
    return size;
}

/* Compute and check the digests of some vectors of one type, all with the key of the first. */
static int holds(const vector *of, size_t count)
{
    uint8_t made[BATCH_MAX][DIGEST_BYTES_MAX];
    entry entries[BATCH_MAX];
    const size_t size = digest_bytes(of->type);
    for (size_t i = 0; i < count; i++)
        entries[i] = (entry){of[i].header, of[i].payload, of[i].payload_bytes, made[i]};
    make_digests(of->type, of->key, entries, count);
    if (memcmp(made[0], of->digest, size) != 0 || !digests_match(of->type, of->key, entries, count))
        return 0;
    for (size_t i = 0; i < count && size > 0; i++) {
        made[i][size - 1] ^= 1;
        if (digests_match(of->type, of->key, entries, count))
            return 0;
        made[i][size - 1] ^= 1;
    }
    return 1;
}

int main(void)
{
    static char line[LINE_MAX], parts[4][LINE_MAX];
    static vector all[VECTORS_MAX];
    size_t count = 0, counts[128] = {0};
    while (count < VECTORS_MAX && fgets(line, sizeof line, stdin) != NULL) {
        vector *of = &all[count++];
        if (sscanf(line, "%d %s %s %s %s", &of->type, parts[0], parts[1], parts[2], parts[3]) != 5)
            return 2;
        of->payload = malloc(strlen(parts[2]) / 2 + 1);
        bytes_of(parts[0], of->key);
        bytes_of(parts[1], of->header);
        of->payload_bytes = bytes_of(parts[2], of->payload);
        bytes_of(parts[3], of->digest);
    }
    for (size_t i = 0; i < count; i++) {
        if (!digests_are_there(all[i].type))
            continue;
        for (size_t batch = 1; batch <= BATCH_MAX && i + batch <= count && all[i + batch - 1].type == all[i].type; batch++)
            if (!holds(&all[i], batch)) {
                printf("vector %zu of type %d is wrong in a batch of %zu\n", i, all[i].type, batch);
                return 1;
            }
        counts[all[i].type]++;
    }
    for (int type = 0; type < 128; type++)
        if (counts[type] > 0)
            printf("type %d: %zu vectors\n", type, counts[type]);
    return 0;
}
