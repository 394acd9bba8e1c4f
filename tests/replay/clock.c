/* Lets the wall clock of a process be wrong: preloaded into it (LD_PRELOAD), adds an offset to CLOCK_REALTIME.
 *
 * The offset is the number of nanoseconds, 8 bytes in the order of the machine, in the file
 * $REPLAY_CLOCKS/$JOB_COMPLETION_INDEX. The file is mapped, so that who writes to it sets the clock of a training process
 * and of its children at once. Without the file the clock is right.
 *
 * CLOCK_MONOTONIC, CLOCK_BOOTTIME and CLOCK_TAI stay as they are, and so does what the kernel writes, such as the times
 * of files. A wait until a time of day that begins while the clock is wrong ends when that clock shows it; a wait that
 * has begun before is not touched, as if it was for a duration.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000LL
/* What is later is a time of day, and what is earlier is the time since a boot: no machine runs for 30 years. */
#define LEAST_UNIX_S 1000000000L

static const int64_t right;
static const int64_t *offset = &right;

/* The next definition of a function. An early caller may need it before this library was initialised. */
#define REAL(name)                                                              \
    static __typeof__(name) *real;                                              \
    if (real == NULL)                                                           \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void open_clock(void) {
    const char *folder = getenv("REPLAY_CLOCKS"), *name = getenv("JOB_COMPLETION_INDEX");
    char path[4096];
    int file;
    void *mapped;

    if (folder == NULL || name == NULL || snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return;
    file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        offset = mapped;
    close(file);
}

static int64_t ahead_ns(void) {
    return __atomic_load_n(offset, __ATOMIC_RELAXED);
}

static struct timespec moved(struct timespec at, int64_t by_ns) {
    int64_t ns = at.tv_nsec + by_ns % SECOND_NS;

    at.tv_sec += by_ns / SECOND_NS;
    if (ns < 0) {
        at.tv_sec -= 1;
        ns += SECOND_NS;
    } else if (ns >= SECOND_NS) {
        at.tv_sec += 1;
        ns -= SECOND_NS;
    }
    at.tv_nsec = ns;
    return at;
}

/* The moment, by the kernel's clock, at which ours shows this time of day. */
static struct timespec by_kernel(struct timespec at) {
    return at.tv_sec < LEAST_UNIX_S ? at : moved(at, -ahead_ns());
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);

    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = moved(*now, ahead_ns());
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday);
    int result = real(now, zone);

    if (result == 0) {
        struct timespec at = moved((struct timespec){now->tv_sec, now->tv_usec * 1000}, ahead_ns());

        now->tv_sec = at.tv_sec;
        now->tv_usec = at.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *also) {
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (also != NULL)
        *also = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    REAL(timespec_get);
    int result = real(now, base);

    if (result == TIME_UTC)
        *now = moved(*now, ahead_ns());
    return result;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    REAL(sem_timedwait);
    struct timespec at = by_kernel(*until);

    return real(semaphore, &at);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static __typeof__(pthread_cond_timedwait) *real;
    struct timespec at = by_kernel(*until);

    if (real == NULL) /* where there are two, dlsym may find the one of before 2003 */
        real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (real == NULL)
        real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    return real(condition, mutex, &at);
}

/* Abseil, and so JAX, waits by the futex itself. */
long syscall(long number, ...) {
    REAL(syscall);
    long word[6];
    struct timespec at;
    va_list rest;

    va_start(rest, number);
    for (int index = 0; index < 6; index++)
        word[index] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex && (word[1] & FUTEX_CLOCK_REALTIME) && word[3] != 0) {
        at = by_kernel(*(const struct timespec *)word[3]);
        word[3] = (long)&at;
    }
    return real(number, word[0], word[1], word[2], word[3], word[4], word[5]);
}
