/* Injects faults into system calls that touch one folder. Loaded with LD_PRELOAD; steered by tests/deep/faults.py.

   In: faults_share() once, before processes are forked, then faults_arm(...) in a child. Out: what was counted, in memory that
   parent and children share. A call counts if its path, or the path of its descriptor, lies in the folder; calls are numbered
   from 1 in the order in which they are made. At call number `at` the fault happens. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, OPEN, READ, WRITE, SYNC, RENAME, UNLINK, TRUNCATE, ALLOCATE, MAP, CLOSE, MODE, LOCK, STAT };
enum action { COUNT, FAIL, FAIL_AFTER, SHORT, SHORT_FROM_HERE, DEAD, READ_ONLY, FULL, KILL, KILL_AFTER };
enum verdict { PASS, ERROR, PERFORM_AND_ERROR, HALF, PERFORM_AND_KILL };

#define MOST 16384

struct shared {
    int at, action, error, count, fired;
    unsigned char kinds[MOST];
};

static struct shared *shared;
static int armed;
static char folder[4096];
static size_t folder_length;

struct shared *faults_share(void) {
    if (!shared)
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return shared;
}

void faults_arm(const char *under, int at, int action, int error) {
    snprintf(folder, sizeof folder, "%s", under);
    folder_length = strlen(folder);
    shared->at = at, shared->action = action, shared->error = error, shared->count = 0, shared->fired = 0;
    armed = 1;
}

void faults_disarm(void) { armed = 0; }

static int under_folder(const char *path) {
    char here[4096];
    if (path[0] != '/') {
        if (!getcwd(here, sizeof here)) return 0;
        path = here;
    }
    return !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}

static int path_matters(const char *path) { return armed && path && under_folder(path); }

static int descriptor_matters(int fd, int written_only) {
    char name[64], path[4096];
    if (!armed || fd < 0) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (path[0] != '/' || !under_folder(path)) return 0;
    return !written_only || (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
}

/* What becomes of a call that counts. */
static enum verdict verdict(enum kind kind) {
    int number = __atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST);
    if (number < MOST) shared->kinds[number] = kind;
    if (shared->action == COUNT || number < shared->at) return PASS;
    int here = number == shared->at;
    switch (shared->action) {
        case FAIL: return here ? (shared->fired++, ERROR) : PASS;
        case FAIL_AFTER: return here ? (shared->fired++, PERFORM_AND_ERROR) : PASS;
        case SHORT: return here ? (shared->fired++, HALF) : PASS;
        case SHORT_FROM_HERE: return kind == WRITE ? (shared->fired++, HALF) : PASS;
        case DEAD:
            shared->fired++;
            return kind == CLOSE ? PERFORM_AND_ERROR : ERROR;
        case READ_ONLY:
            if (kind == OPEN || kind == READ || kind == STAT || kind == MAP || kind == LOCK || kind == CLOSE || kind == SYNC) return PASS;
            shared->fired++;
            return ERROR;
        case FULL:
            if (kind != CREATE && kind != WRITE && kind != ALLOCATE) return PASS;
            shared->fired++;
            return ERROR;
        case KILL:
            if (here) shared->fired++, kill(getpid(), SIGKILL);
            return PASS;
        case KILL_AFTER: return here ? (shared->fired++, PERFORM_AND_KILL) : PASS;
    }
    return PASS;
}

#define REAL(name)                                                        \
    ({                                                                    \
        static void *found;                                               \
        if (!found) found = dlsym(RTLD_NEXT, #name);                      \
        (__typeof__(&name))found;                                         \
    })

/* The body of a wrapper: performs `call`, or does what the fault says. */
#define FAULTED(matters, kind, type, failed, call)                    \
    if (!(matters)) return call;                                      \
    enum verdict v = verdict(kind);                                   \
    if (v == ERROR) return errno = shared->error, (type)(failed);     \
    type result = call;                                               \
    if (v == PERFORM_AND_KILL) kill(getpid(), SIGKILL);               \
    if (v == PERFORM_AND_ERROR) return errno = shared->error, (type)(failed); \
    return result;

#define CREATING (O_CREAT | O_TMPFILE)
#define KIND_OF_OPEN(flags) (((flags) & O_CREAT) || ((flags) & O_ACCMODE) != O_RDONLY ? CREATE : OPEN)
#define MODE_OF(last) mode_t mode = 0; if (flags & CREATING) { va_list a; va_start(a, last); mode = va_arg(a, mode_t); va_end(a); }

int open64(const char *path, int flags, ...) {
    MODE_OF(flags)
    FAULTED(path_matters(path), KIND_OF_OPEN(flags), int, -1, REAL(open64)(path, flags, mode))
}

int open(const char *path, int flags, ...) {
    MODE_OF(flags)
    FAULTED(path_matters(path), KIND_OF_OPEN(flags), int, -1, REAL(open)(path, flags, mode))
}

int openat64(int at, const char *path, int flags, ...) {
    MODE_OF(flags)
    FAULTED(path_matters(path), KIND_OF_OPEN(flags), int, -1, REAL(openat64)(at, path, flags, mode))
}

int openat(int at, const char *path, int flags, ...) {
    MODE_OF(flags)
    FAULTED(path_matters(path), KIND_OF_OPEN(flags), int, -1, REAL(openat)(at, path, flags, mode))
}

ssize_t read(int fd, void *data, size_t size) {
    FAULTED(descriptor_matters(fd, 0), READ, ssize_t, -1, REAL(read)(fd, data, size))
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    FAULTED(descriptor_matters(fd, 0), READ, ssize_t, -1, REAL(pread64)(fd, data, size, offset))
}

/* As FAULTED, and `half` is the call that writes only a part. */
#define WRITTEN(fd, whole, half)                                              \
    if (!descriptor_matters(fd, 0)) return whole;                             \
    enum verdict v = verdict(WRITE);                                          \
    if (v == ERROR) return errno = shared->error, -1;                         \
    ssize_t result = v == HALF ? half : whole;                                \
    if (v == PERFORM_AND_KILL) kill(getpid(), SIGKILL);                       \
    if (v == PERFORM_AND_ERROR) return errno = shared->error, -1;             \
    return result;

#define HALF_OF(size) ((size) > 1 ? (size) / 2 : (size))

ssize_t write(int fd, const void *data, size_t size) {
    WRITTEN(fd, REAL(write)(fd, data, size), REAL(write)(fd, data, HALF_OF(size)))
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    WRITTEN(fd, REAL(pwrite64)(fd, data, size, offset), REAL(pwrite64)(fd, data, HALF_OF(size), offset))
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    WRITTEN(fd, REAL(writev)(fd, parts, count), REAL(writev)(fd, parts, 1))
}

int fsync(int fd) { FAULTED(descriptor_matters(fd, 0), SYNC, int, -1, REAL(fsync)(fd)) }
int fdatasync(int fd) { FAULTED(descriptor_matters(fd, 0), SYNC, int, -1, REAL(fdatasync)(fd)) }

int rename(const char *old, const char *new) {
    FAULTED(path_matters(old) || path_matters(new), RENAME, int, -1, REAL(rename)(old, new))
}

int renameat(int old_at, const char *old, int new_at, const char *new) {
    FAULTED(path_matters(old) || path_matters(new), RENAME, int, -1, REAL(renameat)(old_at, old, new_at, new))
}

int link(const char *old, const char *new) {
    FAULTED(path_matters(old) || path_matters(new), RENAME, int, -1, REAL(link)(old, new))
}

int linkat(int old_at, const char *old, int new_at, const char *new, int flags) {
    FAULTED(path_matters(old) || path_matters(new), RENAME, int, -1, REAL(linkat)(old_at, old, new_at, new, flags))
}

int unlink(const char *path) { FAULTED(path_matters(path), UNLINK, int, -1, REAL(unlink)(path)) }
int unlinkat(int at, const char *path, int flags) {
    FAULTED(path_matters(path), UNLINK, int, -1, REAL(unlinkat)(at, path, flags))
}

int ftruncate64(int fd, off64_t size) { FAULTED(descriptor_matters(fd, 0), TRUNCATE, int, -1, REAL(ftruncate64)(fd, size)) }
int truncate64(const char *path, off64_t size) { FAULTED(path_matters(path), TRUNCATE, int, -1, REAL(truncate64)(path, size)) }

int posix_fallocate64(int fd, off64_t offset, off64_t size) { /* returns the error */
    FAULTED(descriptor_matters(fd, 0), ALLOCATE, int, shared->error, REAL(posix_fallocate64)(fd, offset, size))
}

void *mmap64(void *wanted, size_t size, int protection, int flags, int fd, off64_t offset) {
    FAULTED(fd >= 0 && descriptor_matters(fd, 0), MAP, void *, MAP_FAILED, REAL(mmap64)(wanted, size, protection, flags, fd, offset))
}

void *mmap(void *wanted, size_t size, int protection, int flags, int fd, off_t offset) {
    FAULTED(fd >= 0 && descriptor_matters(fd, 0), MAP, void *, MAP_FAILED, REAL(mmap)(wanted, size, protection, flags, fd, offset))
}

/* A close that fails has closed the descriptor all the same, as on Linux. */
int close(int fd) {
    if (!descriptor_matters(fd, 1)) return REAL(close)(fd);
    enum verdict v = verdict(CLOSE);
    int result = REAL(close)(fd);
    if (v == PERFORM_AND_KILL) kill(getpid(), SIGKILL);
    if (v == ERROR || v == PERFORM_AND_ERROR) return errno = shared->error, -1;
    return result;
}

int chmod(const char *path, mode_t mode) { FAULTED(path_matters(path), MODE, int, -1, REAL(chmod)(path, mode)) }
int fchmod(int fd, mode_t mode) { FAULTED(descriptor_matters(fd, 0), MODE, int, -1, REAL(fchmod)(fd, mode)) }
int flock(int fd, int operation) { FAULTED(descriptor_matters(fd, 0), LOCK, int, -1, REAL(flock)(fd, operation)) }

int stat64(const char *path, struct stat64 *found) { FAULTED(path_matters(path), STAT, int, -1, REAL(stat64)(path, found)) }
int lstat64(const char *path, struct stat64 *found) { FAULTED(path_matters(path), STAT, int, -1, REAL(lstat64)(path, found)) }
int fstat64(int fd, struct stat64 *found) { FAULTED(descriptor_matters(fd, 0), STAT, int, -1, REAL(fstat64)(fd, found)) }
