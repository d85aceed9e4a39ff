/* A disk that fails on request: preloaded into an unmodified daemon.
 *
 * While the file named by SICK_DISK exists, calls on slab files (*.kvs) fail the way its
 * first letter says: r: reads with EIO, w: writes with EIO, f: a full disk (ENOSPC for
 * writes and allocations), h: reads hang, s: writes hang, d: both hang, for as long as it says so.
 * l: writes to the table of a device (slots.table) fail with EIO.
 * x: every call on anything below the directory named by SICK_BELOW hangs; "x NAME": only the
 * calls of that name. Whoever hangs makes the file SICK_DISK.hung, so that a test can wait for it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Reads the switch, past our own versions of these calls. */
static char asked(char *text, size_t size) {
    const char *path = getenv("SICK_DISK");
    int file = path ? syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return 0;
    ssize_t length = syscall(SYS_read, file, text, size - 1);
    syscall(SYS_close, file);
    text[length > 0 ? length : 0] = 0;
    return text[0];
}

static char asked_for(void) {
    char text[64];
    return asked(text, sizeof text);
}

static void hang(const char *call, const char *path) {
    const char *below = getenv("SICK_BELOW");
    char text[64], hung[4096], real[4096];
    int before = errno;  /* readdir says by it whether it failed */
    int fd, at;
    if (sscanf(path, "/proc/self/fd/%d%n", &fd, &at) == 1) {  /* a file below a directory that is open */
        snprintf(text, sizeof text, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(text, real, sizeof real - 1);
        snprintf(real + (length > 0 ? length : 0), sizeof real - (length > 0 ? length : 0), "%s", path + at);
        path = real;
    }
    errno = before;
    if (!below || strncmp(path, below, strlen(below))) return;
    while (asked(text, sizeof text) == 'x' && (!text[1] || !strcmp(text + 2, call))) {
        snprintf(hung, sizeof hung, "%s.hung", getenv("SICK_DISK"));
        syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, hung, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
        usleep(20000);
    }
    errno = before;
}

static ssize_t target_of(int fd, char *target, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, size - 1);
    target[length > 0 ? length : 0] = 0;
    return length;
}

static void hang_fd(const char *call, int fd) {
    char target[4096];
    if (getenv("SICK_BELOW") && target_of(fd, target, sizeof target) > 0) hang(call, target);
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
    return name && !strcmp(name, "/slots.table") ? EIO : 0;
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
    REAL(preadv64v2); hang_fd("preadv64v2", fd); FAIL_IF(read_fails(fd)); return real(fd, iov, count, offset, flags);
}
ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset) {
    REAL(preadv64); hang_fd("preadv64", fd); FAIL_IF(read_fails(fd)); return real(fd, iov, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    REAL(pwritev64v2); hang_fd("pwritev64v2", fd); FAIL_IF(write_fails(fd)); FAIL_IF(row_write_fails(fd)); return real(fd, iov, count, offset, flags);
}
ssize_t pwritev64(int fd, const struct iovec *iov, int count, off64_t offset) {
    REAL(pwritev64); hang_fd("pwritev64", fd); FAIL_IF(write_fails(fd)); FAIL_IF(row_write_fails(fd)); return real(fd, iov, count, offset);
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    hang_fd("posix_fallocate64", fd);
    int error = write_fails(fd);
    return error ? error : real(fd, offset, length);
}
ssize_t write(int fd, const void *bytes, size_t count) {
    REAL(write); hang_fd("write", fd); FAIL_IF(row_write_fails(fd)); return real(fd, bytes, count);
}
ssize_t writev(int fd, const struct iovec *iov, int count) {
    REAL(writev); hang_fd("writev", fd); FAIL_IF(row_write_fails(fd)); return real(fd, iov, count);
}
ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) {
    REAL(pwrite64); hang_fd("pwrite64", fd); FAIL_IF(row_write_fails(fd)); return real(fd, bytes, count, offset);
}
int fdatasync(int fd) {
    REAL(fdatasync); hang_fd("fdatasync", fd); FAIL_IF(row_write_fails(fd)); return real(fd);
}
int fsync(int fd) {
    REAL(fsync); hang_fd("fsync", fd); FAIL_IF(row_write_fails(fd)); return real(fd);
}

/* Calls that only ever hang. FD: on a descriptor; PATH: on a path, absolute as ours all are. */
#define FD(type, name, parameters, ...) \
    type name parameters { REAL(name); hang_fd(#name, fd); return real(__VA_ARGS__); }
#define PATH(type, name, parameters, ...) \
    type name parameters { REAL(name); hang(#name, path); return real(__VA_ARGS__); }

FD(ssize_t, read, (int fd, void *bytes, size_t count), fd, bytes, count)
FD(ssize_t, pread64, (int fd, void *bytes, size_t count, off64_t offset), fd, bytes, count, offset)
FD(off64_t, lseek64, (int fd, off64_t offset, int whence), fd, offset, whence)
FD(int, ftruncate64, (int fd, off64_t size), fd, size)
FD(int, fstat64, (int fd, struct stat64 *found), fd, found)
FD(int, flock, (int fd, int how), fd, how)
FD(int, close, (int fd), fd)
PATH(int, stat64, (const char *path, struct stat64 *found), path, found)
PATH(int, lstat64, (const char *path, struct stat64 *found), path, found)
PATH(int, statvfs64, (const char *path, struct statvfs64 *found), path, found)
PATH(int, unlink, (const char *path), path)
PATH(int, rename, (const char *path, const char *to), path, to)
PATH(int, mkdir, (const char *path, mode_t mode), path, mode)
PATH(int, rmdir, (const char *path), path)
PATH(DIR *, opendir, (const char *path), path)
PATH(int, open64, (const char *path, int flags, ...), path, flags, 0600)

struct dirent64 *readdir64(DIR *directory) {
    REAL(readdir64);
    hang_fd("readdir64", dirfd(directory));
    return real(directory);
}
