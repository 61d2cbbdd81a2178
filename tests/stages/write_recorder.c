/* Loaded with LD_PRELOAD: writes every change of files below RECORD_ROOT to the file RECORD_LOG.
 *
 * One record per system call, in the order of the calls: a header, one or two paths, the bytes. A lock
 * is held over the call and its record. Data of memory-mapped files is not seen (SQLite's -shm). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE, TRUNCATE, SYNC, RENAME, UNLINK, MKDIR };
struct header { uint32_t kind, path, path2, pad; uint64_t inode, offset, size; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[4096];
static int out = -1;

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("RECORD_ROOT"), *log = getenv("RECORD_LOG");
    if (!where || !log) return;
    snprintf(root, sizeof root, "%s/", where);
    out = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int ours(const char *path) { return out >= 0 && !strncmp(path, root, strlen(root)); }

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, 4095);
    path[n > 0 ? n : 0] = 0;
    return ours(path);
}

static int resolve(int folder, const char *name, char *path) {
    if (out < 0) return 0;
    if (name[0] == '/') snprintf(path, 4096, "%s", name);
    else {
        char base[4096];
        if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t n = readlink(link, base, 4095);
            if (n < 0) return 0;
            base[n] = 0;
        }
        snprintf(path, 4096, "%.3000s/%.1000s", base, name);
    }
    return ours(path);
}

static void record(int kind, int fd, const char *path, const char *path2, uint64_t offset,
                   const void *data, uint64_t size) {
    struct stat about = {0};
    if (fd >= 0) fstat(fd, &about);
    struct header head = {kind, strlen(path), path2 ? strlen(path2) : 0, 0, about.st_ino, offset, size};
    struct iovec parts[4] = {{&head, sizeof head}, {(void *)path, head.path},
                             {(void *)path2, head.path2}, {(void *)data, data ? size : 0}};
    if (syscall(SYS_writev, out, parts, 4) < 0) abort();
}

#define REAL(name) static typeof(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

static int opened(int fd, int folder, const char *name, int flags) {
    char path[4096];
    if (fd >= 0 && (flags & (O_CREAT | O_TRUNC)) && !(flags & O_DIRECTORY) && path_of(fd, path))
        record(OPEN, fd, path, NULL, 0, NULL, (flags & O_TRUNC) ? 1 : 0);
    return fd;
}

#define OPENS(name)                                                                        \
    int name(const char *path, int flags, ...) {                                           \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
        REAL(name);                                                                        \
        if (out < 0 || !(flags & (O_CREAT | O_TRUNC))) return real(path, flags, mode);     \
        pthread_mutex_lock(&lock);                                                         \
        int fd = opened(real(path, flags, mode), AT_FDCWD, path, flags);                   \
        pthread_mutex_unlock(&lock);                                                       \
        return fd;                                                                         \
    }
OPENS(open)
OPENS(open64)

#define OPENATS(name)                                                                      \
    int name(int folder, const char *path, int flags, ...) {                               \
        va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list); \
        REAL(name);                                                                        \
        if (out < 0 || !(flags & (O_CREAT | O_TRUNC))) return real(folder, path, flags, mode); \
        pthread_mutex_lock(&lock);                                                         \
        int fd = opened(real(folder, path, flags, mode), folder, path, flags);             \
        pthread_mutex_unlock(&lock);                                                       \
        return fd;                                                                         \
    }
OPENATS(openat)
OPENATS(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char path[4096];
    if (out < 0 || !path_of(fd, path)) return real(fd, data, size);
    pthread_mutex_lock(&lock);
    ssize_t n = real(fd, data, size);
    if (n > 0) record(WRITE, fd, path, NULL, lseek(fd, 0, SEEK_CUR) - n, data, n);
    pthread_mutex_unlock(&lock);
    return n;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    char path[4096];
    if (out < 0 || !path_of(fd, path)) return real(fd, parts, count);
    ssize_t sum = 0;
    for (int i = 0; i < count; i++) {
        ssize_t n = parts[i].iov_len ? write(fd, parts[i].iov_base, parts[i].iov_len) : 0;
        if (n < 0) return sum ? sum : n;
        sum += n;
        if ((size_t)n < parts[i].iov_len) break;
    }
    return sum;
}

#define PWRITES(name)                                                                      \
    ssize_t name(int fd, const void *data, size_t size, off_t offset) {                    \
        REAL(name);                                                                        \
        char path[4096];                                                                   \
        if (out < 0 || !path_of(fd, path)) return real(fd, data, size, offset);            \
        pthread_mutex_lock(&lock);                                                         \
        ssize_t n = real(fd, data, size, offset);                                          \
        if (n > 0) record(WRITE, fd, path, NULL, offset, data, n);                         \
        pthread_mutex_unlock(&lock);                                                       \
        return n;                                                                          \
    }
PWRITES(pwrite)
PWRITES(pwrite64)

#define TRUNCATES(name)                                                                    \
    int name(int fd, off_t size) {                                                         \
        REAL(name);                                                                        \
        char path[4096];                                                                   \
        if (out < 0 || !path_of(fd, path)) return real(fd, size);                          \
        pthread_mutex_lock(&lock);                                                         \
        int done = real(fd, size);                                                         \
        if (!done) record(TRUNCATE, fd, path, NULL, 0, NULL, size);                        \
        pthread_mutex_unlock(&lock);                                                       \
        return done;                                                                       \
    }
TRUNCATES(ftruncate)
TRUNCATES(ftruncate64)

#define SYNCS(name)                                                                        \
    int name(int fd) {                                                                     \
        REAL(name);                                                                        \
        char path[4096];                                                                   \
        if (out < 0) return real(fd);                                                      \
        path_of(fd, path);                                                                 \
        strncat(path, "/", 4095 - strlen(path)); /* the root itself counts */              \
        int is_ours = ours(path);                                                          \
        path[strlen(path) - 1] = 0;                                                        \
        if (!is_ours) return real(fd);                                                     \
        pthread_mutex_lock(&lock); /* the disk is not needed: its sync is in the record */ \
        record(SYNC, fd, path, NULL, 0, NULL, 0);                                          \
        pthread_mutex_unlock(&lock);                                                       \
        return 0;                                                                          \
    }
SYNCS(fsync)
SYNCS(fdatasync)

static int renamed(int done, const char *from, const char *to) {
    if (!done) record(RENAME, -1, from, to, 0, NULL, 0);
    return done;
}

int rename(const char *from, const char *to) {
    REAL(rename);
    char a[4096], b[4096];
    if (!resolve(AT_FDCWD, from, a) || !resolve(AT_FDCWD, to, b)) return real(from, to);
    pthread_mutex_lock(&lock);
    int done = renamed(real(from, to), a, b);
    pthread_mutex_unlock(&lock);
    return done;
}

int renameat(int folder, const char *from, int folder2, const char *to) {
    REAL(renameat);
    char a[4096], b[4096];
    if (!resolve(folder, from, a) || !resolve(folder2, to, b)) return real(folder, from, folder2, to);
    pthread_mutex_lock(&lock);
    int done = renamed(real(folder, from, folder2, to), a, b);
    pthread_mutex_unlock(&lock);
    return done;
}

static int removed(int done, const char *path) {
    if (!done) record(UNLINK, -1, path, NULL, 0, NULL, 0);
    return done;
}

#define REMOVES(name)                                                                      \
    int name(const char *given) {                                                          \
        REAL(name);                                                                        \
        char path[4096];                                                                   \
        if (!resolve(AT_FDCWD, given, path)) return real(given);                           \
        pthread_mutex_lock(&lock);                                                         \
        int done = removed(real(given), path);                                             \
        pthread_mutex_unlock(&lock);                                                       \
        return done;                                                                       \
    }
REMOVES(unlink)
REMOVES(rmdir)

int unlinkat(int folder, const char *given, int flags) {
    REAL(unlinkat);
    char path[4096];
    if (!resolve(folder, given, path)) return real(folder, given, flags);
    pthread_mutex_lock(&lock);
    int done = removed(real(folder, given, flags), path);
    pthread_mutex_unlock(&lock);
    return done;
}

static int made(int done, const char *path) {
    if (!done) record(MKDIR, -1, path, NULL, 0, NULL, 0);
    return done;
}

int mkdir(const char *given, mode_t mode) {
    REAL(mkdir);
    char path[4096];
    if (!resolve(AT_FDCWD, given, path)) return real(given, mode);
    pthread_mutex_lock(&lock);
    int done = made(real(given, mode), path);
    pthread_mutex_unlock(&lock);
    return done;
}

int mkdirat(int folder, const char *given, mode_t mode) {
    REAL(mkdirat);
    char path[4096];
    if (!resolve(folder, given, path)) return real(folder, given, mode);
    pthread_mutex_lock(&lock);
    int done = made(real(folder, given, mode), path);
    pthread_mutex_unlock(&lock);
    return done;
}

int renameat2(int folder, const char *from, int folder2, const char *to, unsigned flags) {
    REAL(renameat2);
    char a[4096], b[4096];
    if (!resolve(folder, from, a) || !resolve(folder2, to, b)) return real(folder, from, folder2, to, flags);
    pthread_mutex_lock(&lock);
    int done = renamed(real(folder, from, folder2, to, flags), a, b);
    pthread_mutex_unlock(&lock);
    return done;
}
