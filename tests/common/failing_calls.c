// Makes one call that names a path fail with EIO, as a network file system may. Loaded by LD_PRELOAD.
//   FAIL_PATH  part of the paths that count
//   FAIL_AT    number of the call, from 1
// Standard error gets a line for that call.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static int calls;

static int fails(const char *path, const char *name) {
    const char *wanted = getenv("FAIL_PATH"), *at = getenv("FAIL_AT");
    if (!wanted || !at || !path || !strstr(path, wanted)) return 0;
    if (__sync_add_and_fetch(&calls, 1) != atoi(at)) return 0;
    fprintf(stderr, "failing call: %s %s\n", name, path);
    errno = EIO;
    return 1;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

int statx(int at, const char *path, int flags, unsigned mask, struct statx *found) {
    if (fails(path, "statx")) return -1;
    return REAL(int, "statx", int, const char *, int, unsigned, struct statx *)(at, path, flags, mask, found);
}

int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    int mode = va_arg(list, int);
    va_end(list);
    return fails(path, "open") ? -1 : REAL(int, "open64", const char *, int, ...)(path, flags, mode);
}

int rename(const char *path, const char *to) {
    return fails(path, "rename") ? -1 : REAL(int, "rename", const char *, const char *)(path, to);
}

int unlink(const char *path) { return fails(path, "unlink") ? -1 : REAL(int, "unlink", const char *)(path); }

int mkdir(const char *path, mode_t mode) {
    return fails(path, "mkdir") ? -1 : REAL(int, "mkdir", const char *, mode_t)(path, mode);
}

DIR *opendir(const char *path) { return fails(path, "opendir") ? NULL : REAL(DIR *, "opendir", const char *)(path); }
