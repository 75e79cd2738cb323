/*
 * diskio FILE SPAN_MIB read|write seq|random DEPTH OPERATIONS SEED: times requests to a device or a
 * file.
 *
 * The first SPAN_MIB are used, past the page cache unless the file system is tmpfs.
 * Sequential requests have 1 MiB, random ones 4 KiB at a page that follows from SEED. DEPTH threads
 * make one request at a time each. OPERATIONS 0: until SIGTERM. Says:
 *   1000 operations, 81.25 us each, 4096000 bytes
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SMALL_BYTES 4096u
#define LARGE_BYTES (1u << 20)
#define DEPTH_MAX 64

static struct {
    int fd, writes, random;
    uint64_t places, operations, seed, bytes;
    atomic_uint_fast64_t next, done;
    atomic_int error;
} job;

static volatile sig_atomic_t stop;

static void on_term(int signal)
{
    (void)signal;
    stop = 1;
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void *work(void *buffer)
{
    uint64_t *words = buffer;
    while (!stop && !job.error) {
        uint64_t number = atomic_fetch_add(&job.next, 1);
        if (job.operations > 0 && number >= job.operations)
            break;
        uint64_t place = job.random ? mix(job.seed ^ mix(number)) % job.places : number % job.places;
        off_t at = (off_t)(place * job.bytes);
        /* No page is zero, and none is written twice with the same bytes. */
        for (uint64_t page = 0; job.writes && page < job.bytes / SMALL_BYTES; page++)
            words[page * (SMALL_BYTES / 8)] = mix(job.seed + number) | 1;
        ssize_t moved = job.writes ? pwrite(job.fd, buffer, job.bytes, at) : pread(job.fd, buffer, job.bytes, at);
        if (moved != (ssize_t)job.bytes) {
            job.error = moved < 0 ? errno : EIO;
            break;
        }
        atomic_fetch_add(&job.done, 1);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 8) {
        fprintf(stderr, "usage: diskio FILE SPAN_MIB read|write seq|random DEPTH OPERATIONS SEED\n");
        return 2;
    }
    unsigned long depth = strtoul(argv[5], NULL, 10);
    job.writes = strcmp(argv[3], "write") == 0;
    job.random = strcmp(argv[4], "random") == 0;
    job.bytes = job.random ? SMALL_BYTES : LARGE_BYTES;
    job.places = (strtoull(argv[2], NULL, 10) << 20) / job.bytes;
    job.operations = strtoull(argv[6], NULL, 10);
    job.seed = strtoull(argv[7], NULL, 10);
    if (job.places == 0 || depth == 0 || depth > DEPTH_MAX) {
        fprintf(stderr, "diskio: a span of at least 1 MiB, and a depth of 1 to %d\n", DEPTH_MAX);
        return 2;
    }
    int flags = (job.writes ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC;
    job.fd = open(argv[1], flags | O_DIRECT, 0600);
    if (job.fd < 0 && errno == EINVAL)
        job.fd = open(argv[1], flags, 0600);
    if (job.fd < 0) {
        perror("diskio: open");
        return 1;
    }
    pthread_t threads[DEPTH_MAX];
    void *buffers[DEPTH_MAX];
    for (unsigned long n = 0; n < depth; n++) {
        if (posix_memalign(&buffers[n], SMALL_BYTES, job.bytes) != 0) {
            perror("diskio: memory");
            return 1;
        }
        memset(buffers[n], 0x5a, job.bytes);
    }
    signal(SIGTERM, on_term);
    double begin = now_us();
    for (unsigned long n = 0; n < depth; n++) {
        if (pthread_create(&threads[n], NULL, work, buffers[n]) != 0) {
            perror("diskio: thread");
            return 1;
        }
    }
    for (unsigned long n = 0; n < depth; n++)
        pthread_join(threads[n], NULL);
    double took = now_us() - begin;
    if (job.error) {
        fprintf(stderr, "diskio: %s\n", strerror(job.error));
        return 1;
    }
    uint64_t done = job.done;
    printf("%llu operations, %.2f us each, %llu bytes\n", (unsigned long long)done, took / (double)(done ? done : 1),
           (unsigned long long)(done * job.bytes));
    return 0;
}
