/* A wall clock that is moved while a process runs, for LD_PRELOAD: MOVED_CLOCK names a file with the ms to add.
 *
 * Only CLOCK_REALTIME moves, as when somebody sets the time. A wait until a moment of that clock ends when the moment has
 * come by the moved clock as it is when the wait begins. (libfaketime 0.9.10 refuses sleeps by the monotonic clock.)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define LOOK_AGAIN_MS 200

static _Atomic long long looked_ms = -LOOK_AGAIN_MS, added_ms = 0;

static long long moved_ms(void) {
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC_COARSE, &now);
    long long now_ms = now.tv_sec * 1000LL + now.tv_nsec / 1000000;
    if (now_ms >= looked_ms + LOOK_AGAIN_MS) {
        looked_ms = now_ms;
        const char *name = getenv("MOVED_CLOCK");
        FILE *file = name ? fopen(name, "re") : NULL;
        long long read_ms;
        if (file) {
            if (fscanf(file, "%lld", &read_ms) == 1) added_ms = read_ms;
            fclose(file);
        }
    }
    return added_ms;
}

static void add(struct timespec *at, long long ms) {
    long long ns = at->tv_nsec + ms % 1000 * 1000000;
    at->tv_sec += ms / 1000 + (ns >= 1000000000) - (ns < 0);
    at->tv_nsec = (ns + 1000000000) % 1000000000;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, at);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) add(at, moved_ms());
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *at, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, at) ? base : 0;
}

/* What a wait of the real clock has to end at. A condition of the monotonic clock, whose moments lie before 1980, stays. */
static struct timespec unmoved(const struct timespec *until) {
    struct timespec real = *until;
    if (real.tv_sec > 10 * 365 * 86400) add(&real, -moved_ms());
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec end = unmoved(until);
    return real(condition, mutex, &end);
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(cnd_t *, mtx_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "cnd_timedwait");
    struct timespec end = unmoved(until);
    return real(condition, mutex, &end);
}
