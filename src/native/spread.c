/* The check of a large batch by several threads. The caller's thread takes a share itself, and takes over each share for
   which no thread can be made, so the result never depends on threads. */

#define _GNU_SOURCE /* sched_getaffinity */

#include "spread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#define SHARE_BYTES ((size_t)1 << 20) /* of each thread at least: making one takes as long as checking some 30 KiB */
#define THREADS_MAX 4

typedef struct {
    int type, match;
    const uint8_t *key;
    const entry *entries;
    size_t count;
} share;

static void *check(void *given)
{
    share *of = given;
    of->match = digests_match(of->type, of->key, of->entries, of->count);
    return NULL;
}

/* The processors that this process may use. */
static size_t processors(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? (size_t)CPU_COUNT(&set) : 1;
}

static size_t threads_for(size_t count, size_t nbytes)
{
    size_t threads = nbytes / SHARE_BYTES;
    if (threads > THREADS_MAX)
        threads = THREADS_MAX;
    if (threads > count)
        threads = count;
    if (threads < 2)
        return 1;
    const size_t most = processors();
    return threads < most ? threads : most;
}

int digests_match_spread(int type, const uint8_t key[HMAC_KEY_BYTES], const entry *entries, size_t count, size_t nbytes)
{
    const size_t threads = threads_for(count, nbytes);
    share shares[THREADS_MAX];
    pthread_t made[THREADS_MAX];
    int is_made[THREADS_MAX] = {0};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    for (size_t i = 0, first = 0; i < threads; i++) {
        size_t end = first, taken = 0;
        while (end < count - (threads - 1 - i) && (i + 1 == threads || taken < nbytes / threads))
            taken += entries[end++].payload_bytes;
        shares[i] = (share){type, 0, key, entries + first, end - first};
        first = end;
        if (i + 1 < threads)
            is_made[i] = pthread_create(&made[i], NULL, check, &shares[i]) == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    int match = 1;
    for (size_t i = threads; i-- > 0;) {
        if (is_made[i])
            pthread_join(made[i], NULL);
        else
            check(&shares[i]);
        match &= shares[i].match;
    }
    return match;
}
