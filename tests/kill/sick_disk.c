/* A disk that fails on request: preloaded into an unmodified daemon.
 *
 * While the file named by SICK_DISK exists, calls on slab files (*.kvs) fail the way its
 * first letter says: r: reads with EIO, w: writes with EIO, f: a full disk (ENOSPC for
 * writes and allocations), h: reads hang, s: writes hang, for as long as it says so.
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

static char sickness(int fd) {
    const char *path = getenv("SICK_DISK");
    char link[64], target[4096], letter = 0;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    if (read(file, &letter, 1) != 1) letter = 0;
    close(file);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target);
    return length > 4 && !memcmp(target + length - 4, ".kvs", 4) ? letter : 0;
}

static int read_fails(int fd) {
    char letter = sickness(fd);
    while (letter == 'h') {
        usleep(20000);
        letter = sickness(fd);
    }
    return letter == 'r' ? EIO : 0;
}

static int write_fails(int fd) {
    char letter = sickness(fd);
    while (letter == 's') {
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
