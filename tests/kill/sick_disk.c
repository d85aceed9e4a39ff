/* A disk that fails on request: preloaded into an unmodified daemon.
 *
 * While the file named by SICK_DISK exists, calls on slab files (*.kvs) fail the way its
 * first letter says: r: reads with EIO, w: writes with EIO, f: a full disk (ENOSPC for
 * writes and allocations), h: reads hang, s: writes hang, d: both hang, for as long as it says so.
 * l: writes to files in a directory named "rows" (RocksDB and its log) fail with EIO.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char asked_for(void) {
    const char *path = getenv("SICK_DISK");
    char letter = 0;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, &letter, 1) != 1) letter = 0;
    close(file);
    return letter;
}

static ssize_t target_of(int fd, char *target, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, size - 1);
    target[length > 0 ? length : 0] = 0;
    return length;
}

static char sickness(int fd) {
    char target[4096], letter = asked_for();
    if (!letter) return 0;
    ssize_t length = target_of(fd, target, sizeof target);
    return length > 4 && !memcmp(target + length - 4, ".kvs", 4) ? letter : 0;
}

static int row_write_fails(int fd) {
    char target[4096];
    if (asked_for() != 'l') return 0;
    target_of(fd, target, sizeof target);
    char *name = strrchr(target, '/');
    return name && name - target >= 5 && !memcmp(name - 5, "/rows", 5) ? EIO : 0;
}

static int read_fails(int fd) {
    char letter = sickness(fd);
    while (letter == 'h' || letter == 'd') {
        usleep(20000);
        letter = sickness(fd);
    }
    return letter == 'r' ? EIO : 0;
}

static int write_fails(int fd) {
    char letter = sickness(fd);
    while (letter == 's' || letter == 'd') {
        usleep(20000);
        letter = sickness(fd);
    }
    return letter == 'w' ? EIO : letter == 'f' ? ENOSPC : 0;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(error) do { int e = (error); if (e) { errno = e; return -1; } } while (0)

ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    REAL(preadv64v2); FAIL_IF(read_fails(fd)); return real(fd, iov, count, offset, flags);
}
ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset) {
    REAL(preadv64); FAIL_IF(read_fails(fd)); return real(fd, iov, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    REAL(pwritev64v2); FAIL_IF(write_fails(fd)); return real(fd, iov, count, offset, flags);
}
ssize_t pwritev64(int fd, const struct iovec *iov, int count, off64_t offset) {
    REAL(pwritev64); FAIL_IF(write_fails(fd)); return real(fd, iov, count, offset);
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    int error = write_fails(fd);
    return error ? error : real(fd, offset, length);
}
ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(write); FAIL_IF(row_write_fails(fd)); return real(fd, bytes, count);
}
ssize_t writev(int fd, const struct iovec *iov, int count) {
    REAL(writev); FAIL_IF(row_write_fails(fd)); return real(fd, iov, count);
}
ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) {
    REAL(pwrite64); FAIL_IF(row_write_fails(fd)); return real(fd, bytes, count, offset);
}
int fdatasync(int fd) {
    REAL(fdatasync); FAIL_IF(row_write_fails(fd)); return real(fd);
}
int fsync(int fd) {
    REAL(fsync); FAIL_IF(row_write_fails(fd)); return real(fd);
}
