/* Records what a process does to the files below one directory: each write, change of a name and sync, in order.

   A shared library for LD_PRELOAD, so it sees the calls of Python, of numpy and of LMDB alike. The environment names
   the directory (LOSS_ROOT) and the file to append records to (LOSS_LOG), and after which of its records a process
   kills itself (LOSS_KILL_AFTER), if it is to. Calls are carried out one at a time, under a
   lock that processes share, so the order of the records is the order of the calls. Stores to shared maps are seen when
   their file is synced, and at each mark.

   A sync of a parent process's file by its forked child is seen, too. Not seen: io_uring, ioctl, and what the C library
   writes through its streams; the replay of a whole record is compared with the directory, so such a call is noticed.
   Neither pybk nor LMDB, as pybk opens it, calls msync, sync_file_range, syncfs or sync: a process that does is ended,
   because what they make durable would not be recorded. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind {
    CREATE = 1, /* inode, its mode; parent, name */
    WRITE,      /* inode, offset, data; extra: 1 if durable when it returns */
    ZEROS,      /* as WRITE, without the data */
    RESIZE,     /* inode, size */
    ALLOCATE,   /* inode, offset, size: the file is at least so long */
    SYNC,       /* inode; extra: 0 fsync, 1 fdatasync */
    RENAME,     /* parent, other parent, both names; extra: 1 if they are exchanged */
    LINK,       /* inode, parent, name */
    UNLINK,     /* parent, name; of a directory, too */
    MODE,       /* inode, mode */
    STORED,     /* inode, data: the whole content of a file with a shared map */
    MARK,       /* data */
    SYMLINK,    /* inode, parent, name, data: where it points */
};

struct record {
    uint32_t kind, extra;
    uint64_t inode, parent, other, offset, size, data_bytes;
    uint32_t name_bytes, site_bytes;
};

#define SITE_MAX 2048
#define MAPS_MAX 256

typedef void (*site_function)(char *text, int capacity);

static char root[PATH_MAX];
static size_t root_bytes;
static int log_fd = -1, lock_fd = -1;
static long left = -1; /* records until the process kills itself; never if negative */
static site_function site_of;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static struct { uint64_t inode; int fd; uint64_t sum; } maps[MAPS_MAX];
static int map_count;

#define REAL(type, name, ...) \
    static type (*real_##name)(__VA_ARGS__); \
    if (!real_##name) real_##name = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static ssize_t raw_pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off_t);
    return real_pwrite64(fd, data, bytes, offset);
}

static int raw_openat(int at, const char *path, int flags, mode_t mode) {
    REAL(int, openat64, int, const char *, int, ...);
    return real_openat64(at, path, flags, mode);
}

static void die(const char *what) {
    dprintf(2, "loss recorder: %s: %s\n", what, strerror(errno));
    _exit(97);
}

static void forking(void) { pthread_mutex_lock(&guard); }
static void forked(void) { pthread_mutex_unlock(&guard); }

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("LOSS_ROOT"), *log = getenv("LOSS_LOG"), *after = getenv("LOSS_KILL_AFTER");
    char path[PATH_MAX];
    if (!directory || !log || !realpath(directory, root)) return;
    root_bytes = strlen(root);
    if (after) left = atol(after);
    snprintf(path, sizeof path, "%s.lock", log);
    log_fd = raw_openat(AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    lock_fd = raw_openat(AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (log_fd < 0 || lock_fd < 0) die(log);
    /* High numbers, which a program does not reuse by accident. */
    log_fd = fcntl(log_fd, F_DUPFD_CLOEXEC, 900);
    lock_fd = fcntl(lock_fd, F_DUPFD_CLOEXEC, 900);
    pthread_atfork(forking, forked, forked);
}

static void lock(void) {
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    pthread_mutex_lock(&guard);
    while (fcntl(lock_fd, F_OFD_SETLKW, &all) != 0)
        if (errno != EINTR) die("lock");
}

static void unlock(void) {
    struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    int saved = errno;
    fcntl(lock_fd, F_OFD_SETLK, &all);
    pthread_mutex_unlock(&guard);
    errno = saved;
}

static int below(const char *path) {
    return root_bytes && !strncmp(path, root, root_bytes) && (path[root_bytes] == '/' || !path[root_bytes]);
}

/* Whether a descriptor is of a file or directory below the root. */
static int tracked(int fd, struct stat *status) {
    char name[64], path[PATH_MAX];
    int saved = errno;
    ssize_t bytes;
    if (log_fd < 0 || fd < 0 || fd == log_fd) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    bytes = readlink(name, path, sizeof path - 1);
    errno = saved;
    if (bytes < 0) return 0;
    path[bytes] = 0;
    if (!below(path) || fstat(fd, status) != 0) return 0;
    return S_ISREG(status->st_mode) || S_ISDIR(status->st_mode);
}

struct place {
    uint64_t parent;
    char path[PATH_MAX];
    const char *name;
};

/* Whether a path names something below the root; its directory is resolved, its last part is not. */
static int placed(int at, const char *given, struct place *place) {
    char joined[PATH_MAX * 2], directory[PATH_MAX];
    struct stat status;
    int saved = errno, found = 0;
    char *slash;
    size_t bytes;
    if (log_fd < 0 || !given || !*given) return 0;
    if (*given != '/' && at != AT_FDCWD) {
        char name[64];
        ssize_t got;
        snprintf(name, sizeof name, "/proc/self/fd/%d", at);
        got = readlink(name, joined, PATH_MAX - 1);
        if (got < 0) goto out;
        joined[got] = 0;
        snprintf(joined + got, sizeof joined - got, "/%s", given);
    } else if (*given != '/') {
        if (!getcwd(joined, PATH_MAX)) goto out;
        bytes = strlen(joined);
        snprintf(joined + bytes, sizeof joined - bytes, "/%s", given);
    } else
        snprintf(joined, sizeof joined, "%s", given);
    for (bytes = strlen(joined); bytes > 1 && joined[bytes - 1] == '/'; bytes--) joined[bytes - 1] = 0;
    slash = strrchr(joined, '/');
    if (!slash || strlen(slash + 1) > NAME_MAX) goto out;
    *slash = 0;
    if (!realpath(*joined ? joined : "/", directory) || !below(directory) || stat(directory, &status)) goto out;
    place->parent = status.st_ino;
    if (snprintf(place->path, sizeof place->path, "%s/%s", directory, slash + 1) >= (int)sizeof place->path) goto out;
    place->name = strrchr(place->path, '/') + 1;
    found = 1;
out:
    errno = saved;
    return found;
}

static void put(const void *data, size_t bytes) {
    REAL(ssize_t, write, int, const void *, size_t);
    while (bytes) {
        ssize_t done = real_write(log_fd, data, bytes);
        if (done < 0) die("log");
        data = (const char *)data + done;
        bytes -= done;
    }
}

static void note_stored(int index);

/* Called under the lock, so no other thread or process is between a call and its record when this one kills itself. */
static void note(struct record record, const char *name, const char *site, const void *data) {
    int saved = errno;
    record.site_bytes = site ? strlen(site) : 0;
    put(&record, sizeof record);
    put(name, record.name_bytes);
    put(site, record.site_bytes);
    put(data, record.data_bytes);
    if (left > 0 && !--left) {
        /* What was stored to shared maps outlives the process. */
        for (int index = 0; index < map_count; index++) note_stored(index);
        for (kill(getpid(), SIGKILL);;) pause();
    }
    errno = saved;
}

static void note_name(enum kind kind, uint64_t inode, const struct place *place, uint32_t extra) {
    struct record record = {
        .kind = kind, .extra = extra, .inode = inode, .parent = place->parent, .name_bytes = strlen(place->name)};
    note(record, place->name, NULL, NULL);
}

/* The caller of a sync; it may take the lock of the interpreter, so it comes before lock(). */
static void find_site(char *site) {
    int saved = errno;
    *site = 0;
    if (site_of) site_of(site, SITE_MAX);
    errno = saved;
}

void loss_recorder_sites(site_function function) { site_of = function; }

static uint64_t sum_of(const unsigned char *data, size_t bytes) {
    uint64_t sum = 1469598103934665603u;
    for (size_t at = 0; at < bytes; at++) sum = (sum ^ data[at]) * 1099511628211u;
    return sum;
}

/* Records what was stored through a map of a file. */
static void note_stored(int index) {
    struct stat status;
    unsigned char *data;
    REAL(ssize_t, pread64, int, void *, size_t, off_t);
    if (fstat(maps[index].fd, &status) || status.st_size > (16 << 20)) return;
    data = malloc(status.st_size + 1);
    if (!data) die("memory");
    if (real_pread64(maps[index].fd, data, status.st_size, 0) == status.st_size) {
        uint64_t sum = sum_of(data, status.st_size);
        if (sum != maps[index].sum) {
            struct record record = {.kind = STORED, .inode = status.st_ino, .data_bytes = status.st_size};
            maps[index].sum = sum;
            note(record, NULL, NULL, data);
        }
    }
    free(data);
}

static void note_stored_of(uint64_t inode) {
    for (int index = 0; index < map_count; index++)
        if (maps[index].inode == inode) note_stored(index);
}

void loss_recorder_mark(const char *data, size_t bytes) {
    struct record record = {.kind = MARK, .data_bytes = bytes};
    if (log_fd < 0) return;
    lock();
    for (int index = 0; index < map_count; index++) note_stored(index);
    note(record, NULL, NULL, data);
    unlock();
}

/* ---- files ------------------------------------------------------------------------------------------------------ */

static int do_open(int at, const char *path, int flags, mode_t mode) {
    struct place place;
    struct stat before, after;
    int fd, there;
    if (!(flags & (O_CREAT | O_TRUNC)) || !placed(at, path, &place)) return raw_openat(at, path, flags, mode);
    lock();
    there = !stat(place.path, &before);
    fd = raw_openat(at, path, flags, mode);
    if (fd >= 0 && !fstat(fd, &after) && S_ISREG(after.st_mode)) {
        if (!there)
            note_name(CREATE, after.st_ino, &place, after.st_mode);
        else if ((flags & O_TRUNC) && before.st_size)
            note((struct record){.kind = RESIZE, .inode = after.st_ino}, NULL, NULL, NULL);
    }
    unlock();
    return fd;
}

static mode_t mode_in(int flags, va_list arguments) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode_t mode = mode_in(flags, arguments); \
        va_end(arguments); \
        return do_open(AT_FDCWD, path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode_t mode = mode_in(flags, arguments); \
        va_end(arguments); \
        return do_open(at, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
int creat(const char *path, mode_t mode) { return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

static int is_zero(const char *data, size_t bytes) {
    return !bytes || (!*data && !memcmp(data, data + 1, bytes - 1));
}

static void note_written(uint64_t inode, off_t offset, const char *data, size_t bytes, int durable, const char *site) {
    struct record record = {.kind = WRITE, .extra = durable, .inode = inode, .offset = offset, .size = bytes};
    if (is_zero(data, bytes))
        record.kind = ZEROS;
    else
        record.data_bytes = bytes;
    note(record, NULL, site, data);
}

/* A write at an offset, or at the descriptor's own if that is negative. */
static ssize_t do_write(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    struct stat status;
    char site[SITE_MAX] = "";
    ssize_t done;
    int opened, durable;
    REAL(ssize_t, pwritev64v2, int, const struct iovec *, int, off_t, int);
    if (!tracked(fd, &status)) return real_pwritev64v2(fd, pieces, count, offset, flags);
    opened = fcntl(fd, F_GETFL);
    durable = (opened & O_DSYNC) || (flags & (RWF_DSYNC | RWF_SYNC));
    if (durable) find_site(site);
    lock();
    if (opened & O_APPEND) {
        fstat(fd, &status);
        done = real_pwritev64v2(fd, pieces, count, offset, flags);
        offset = status.st_size;
    } else {
        off_t at = offset < 0 ? lseek(fd, 0, SEEK_CUR) : offset;
        done = real_pwritev64v2(fd, pieces, count, offset, flags);
        offset = at;
    }
    if (done > 0) {
        char *data = malloc(done), *end = data;
        if (!data) die("memory");
        for (int each = 0; end - data < done; each++) {
            size_t bytes = pieces[each].iov_len, left = done - (end - data);
            if (bytes > left) bytes = left;
            memcpy(end, pieces[each].iov_base, bytes);
            end += bytes;
        }
        note_written(status.st_ino, offset, data, done, durable, durable ? site : NULL);
        free(data);
    }
    unlock();
    return done;
}

ssize_t write(int fd, const void *data, size_t bytes) {
    struct stat status;
    struct iovec piece = {.iov_base = (void *)data, .iov_len = bytes};
    REAL(ssize_t, write, int, const void *, size_t);
    return tracked(fd, &status) ? do_write(fd, &piece, 1, -1, 0) : real_write(fd, data, bytes);
}
ssize_t writev(int fd, const struct iovec *pieces, int count) {
    struct stat status;
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return tracked(fd, &status) ? do_write(fd, pieces, count, -1, 0) : real_writev(fd, pieces, count);
}
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) {
    struct stat status;
    struct iovec piece = {.iov_base = (void *)data, .iov_len = bytes};
    return tracked(fd, &status) ? do_write(fd, &piece, 1, offset, 0) : raw_pwrite(fd, data, bytes, offset);
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) { return pwrite64(fd, data, bytes, offset); }
ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    return do_write(fd, pieces, count, offset, flags);
}
ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    return do_write(fd, pieces, count, offset, flags);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off_t offset) {
    return do_write(fd, pieces, count, offset, 0);
}
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
    return do_write(fd, pieces, count, offset, 0);
}

/* Records a range that the system copied into a file, as it is now. */
static void note_copied(int fd, off_t offset, size_t bytes) {
    struct stat status;
    char name[64], *data = malloc(bytes);
    int readable;
    REAL(ssize_t, pread64, int, void *, size_t, off_t);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    readable = raw_openat(AT_FDCWD, name, O_RDONLY | O_CLOEXEC, 0);
    if (!data || readable < 0 || real_pread64(readable, data, bytes, offset) != (ssize_t)bytes) die("copied range");
    fstat(fd, &status);
    note_written(status.st_ino, offset, data, bytes, 0, NULL);
    close(readable);
    free(data);
}

ssize_t sendfile64(int out, int in, off_t *offset, size_t bytes) {
    struct stat status;
    ssize_t done;
    REAL(ssize_t, sendfile64, int, int, off_t *, size_t);
    if (!tracked(out, &status)) return real_sendfile64(out, in, offset, bytes);
    lock();
    done = real_sendfile64(out, in, offset, bytes);
    if (done > 0) note_copied(out, lseek(out, 0, SEEK_CUR) - done, done);
    unlock();
    return done;
}
ssize_t sendfile(int out, int in, off_t *offset, size_t bytes) { return sendfile64(out, in, offset, bytes); }

ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t bytes, unsigned flags) {
    struct stat status;
    ssize_t done;
    REAL(ssize_t, copy_file_range, int, off_t *, int, off_t *, size_t, unsigned);
    if (!tracked(out, &status)) return real_copy_file_range(in, from, out, to, bytes, flags);
    lock();
    done = real_copy_file_range(in, from, out, to, bytes, flags);
    if (done > 0) note_copied(out, (to ? *to : lseek(out, 0, SEEK_CUR)) - done, done);
    unlock();
    return done;
}

static int resized(int fd, off_t size) {
    struct stat status;
    int result;
    REAL(int, ftruncate64, int, off_t);
    if (!tracked(fd, &status)) return real_ftruncate64(fd, size);
    lock();
    result = real_ftruncate64(fd, size);
    if (!result) note((struct record){.kind = RESIZE, .inode = status.st_ino, .size = size}, NULL, NULL, NULL);
    unlock();
    return result;
}
int ftruncate64(int fd, off_t size) { return resized(fd, size); }
int ftruncate(int fd, off_t size) { return resized(fd, size); }
int truncate64(const char *path, off_t size) {
    int fd = raw_openat(AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0), result, saved;
    if (fd < 0) return -1;
    result = resized(fd, size);
    saved = errno;
    close(fd);
    errno = saved;
    return result;
}
int truncate(const char *path, off_t size) { return truncate64(path, size); }

int fallocate64(int fd, int mode, off_t offset, off_t size) {
    struct stat status;
    int result;
    REAL(int, fallocate64, int, int, off_t, off_t);
    if (!tracked(fd, &status)) return real_fallocate64(fd, mode, offset, size);
    if (mode & ~(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    lock();
    result = real_fallocate64(fd, mode, offset, size);
    if (!result && (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))) {
        struct record record = {.kind = ZEROS, .inode = status.st_ino, .offset = offset, .size = size};
        if (offset + size > status.st_size) record.size = offset < status.st_size ? status.st_size - offset : 0;
        note(record, NULL, NULL, NULL);
    }
    if (!result && !(mode & FALLOC_FL_KEEP_SIZE)) {
        struct record record = {.kind = ALLOCATE, .inode = status.st_ino, .offset = offset, .size = size};
        note(record, NULL, NULL, NULL);
    }
    unlock();
    return result;
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }
int posix_fallocate64(int fd, off_t offset, off_t size) {
    struct stat status;
    int saved = errno, result;
    REAL(int, posix_fallocate64, int, off_t, off_t);
    if (!tracked(fd, &status)) return real_posix_fallocate64(fd, offset, size);
    result = fallocate64(fd, 0, offset, size) ? errno : 0;
    errno = saved;
    return result;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

static void *do_mmap(void *wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
    struct stat status;
    void *result;
    REAL(void *, mmap64, void *, size_t, int, int, int, off_t);
    result = real_mmap64(wanted, bytes, protection, flags, fd, offset);
    if (result == MAP_FAILED || !(protection & PROT_WRITE) || !(flags & MAP_SHARED) || !tracked(fd, &status))
        return result;
    lock();
    for (int index = 0; index < map_count; index++)
        if (maps[index].inode == status.st_ino) goto out;
    if (map_count == MAPS_MAX) die("too many shared maps");
    maps[map_count].inode = status.st_ino;
    /* Never closed: that would end the process's locks of the file. Meanwhile no other file has the number. */
    maps[map_count].fd = fcntl(fd, F_DUPFD_CLOEXEC, 910);
    maps[map_count++].sum = 0;
out:
    unlock();
    return result;
}
void *mmap64(void *wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return do_mmap(wanted, bytes, protection, flags, fd, offset);
}
void *mmap(void *wanted, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return do_mmap(wanted, bytes, protection, flags, fd, offset);
}

static int do_sync(int fd, int kind, int (*real)(int)) {
    struct stat status;
    char site[SITE_MAX];
    int result;
    if (!tracked(fd, &status)) return real(fd);
    find_site(site);
    lock();
    note_stored_of(status.st_ino);
    result = real(fd);
    if (!result) note((struct record){.kind = SYNC, .extra = kind, .inode = status.st_ino}, NULL, site, NULL);
    unlock();
    return result;
}
int fsync(int fd) {
    REAL(int, fsync, int);
    return do_sync(fd, 0, real_fsync);
}
int fdatasync(int fd) {
    REAL(int, fdatasync, int);
    return do_sync(fd, 1, real_fdatasync);
}

static void unrecorded(const char *name) {
    errno = ENOSYS;
    die(name);
}
int msync(void *at, size_t bytes, int flags) {
    REAL(int, msync, void *, size_t, int);
    if (log_fd >= 0) unrecorded("msync");
    return real_msync(at, bytes, flags);
}
int sync_file_range(int fd, off64_t offset, off64_t bytes, unsigned flags) {
    REAL(int, sync_file_range, int, off64_t, off64_t, unsigned);
    if (log_fd >= 0) unrecorded("sync_file_range");
    return real_sync_file_range(fd, offset, bytes, flags);
}
int syncfs(int fd) {
    REAL(int, syncfs, int);
    if (log_fd >= 0) unrecorded("syncfs");
    return real_syncfs(fd);
}
void sync(void) { unrecorded("sync"); }

/* ---- names ------------------------------------------------------------------------------------------------------ */

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    struct place source, target;
    char names[2 * NAME_MAX + 2];
    int result, ours = placed(from_at, from, &source) && placed(to_at, to, &target);
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    if (!ours) return real_renameat2(from_at, from, to_at, to, flags);
    lock();
    result = real_renameat2(from_at, from, to_at, to, flags);
    if (!result) {
        struct record record = {
            .kind = RENAME, .extra = !!(flags & RENAME_EXCHANGE), .parent = source.parent, .other = target.parent};
        record.name_bytes = snprintf(names, sizeof names, "%s/%s", source.name, target.name);
        note(record, names, NULL, NULL);
    }
    unlock();
    return result;
}
int renameat(int from_at, const char *from, int to_at, const char *to) {
    return renameat2(from_at, from, to_at, to, 0);
}
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
    struct place target;
    struct stat status;
    int result;
    REAL(int, linkat, int, const char *, int, const char *, int);
    if (!placed(to_at, to, &target)) return real_linkat(from_at, from, to_at, to, flags);
    lock();
    result = real_linkat(from_at, from, to_at, to, flags);
    if (!result && !lstat(target.path, &status)) note_name(LINK, status.st_ino, &target, 0);
    unlock();
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int symlinkat(const char *text, int at, const char *path) {
    struct place place;
    struct stat status;
    int result;
    REAL(int, symlinkat, const char *, int, const char *);
    if (!placed(at, path, &place)) return real_symlinkat(text, at, path);
    lock();
    result = real_symlinkat(text, at, path);
    if (!result && !lstat(place.path, &status)) {
        struct record record = {.kind = SYMLINK, .inode = status.st_ino, .parent = place.parent};
        record.name_bytes = strlen(place.name);
        record.data_bytes = strlen(text);
        note(record, place.name, NULL, text);
    }
    unlock();
    return result;
}
int symlink(const char *text, const char *path) { return symlinkat(text, AT_FDCWD, path); }

int unlinkat(int at, const char *path, int flags) {
    struct place place;
    int result;
    REAL(int, unlinkat, int, const char *, int);
    if (!placed(at, path, &place)) return real_unlinkat(at, path, flags);
    lock();
    result = real_unlinkat(at, path, flags);
    if (!result) note_name(UNLINK, 0, &place, 0);
    unlock();
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    int result = unlinkat(AT_FDCWD, path, 0);
    return result && (errno == EISDIR || errno == EPERM) ? unlinkat(AT_FDCWD, path, AT_REMOVEDIR) : result;
}

int mkdirat(int at, const char *path, mode_t mode) {
    struct place place;
    struct stat status;
    int result;
    REAL(int, mkdirat, int, const char *, mode_t);
    if (!placed(at, path, &place)) return real_mkdirat(at, path, mode);
    lock();
    result = real_mkdirat(at, path, mode);
    if (!result && !lstat(place.path, &status)) note_name(CREATE, status.st_ino, &place, status.st_mode);
    unlock();
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int fchmod(int fd, mode_t mode) {
    struct stat status;
    int result;
    REAL(int, fchmod, int, mode_t);
    if (!tracked(fd, &status)) return real_fchmod(fd, mode);
    lock();
    result = real_fchmod(fd, mode);
    if (!result && !fstat(fd, &status))
        note((struct record){.kind = MODE, .extra = status.st_mode, .inode = status.st_ino}, NULL, NULL, NULL);
    unlock();
    return result;
}
int fchmodat(int at, const char *path, mode_t mode, int flags) {
    struct place place;
    struct stat status;
    int result;
    REAL(int, fchmodat, int, const char *, mode_t, int);
    if (!placed(at, path, &place)) return real_fchmodat(at, path, mode, flags);
    lock();
    result = real_fchmodat(at, path, mode, flags);
    if (!result && !stat(place.path, &status))
        note((struct record){.kind = MODE, .extra = status.st_mode, .inode = status.st_ino}, NULL, NULL, NULL);
    unlock();
    return result;
}
int chmod(const char *path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
