/*
 * dirty FILE REGION_MIB RATE_MB_S PATTERN AMOUNT_MIB SEED: writes pages of a region.
 *
 * The region is FILE mapped shared (made and filled if need be; in /dev/shm it is guest memory), so
 * that runs after one another write the same pages. RATE_MB_S 0: as fast as it goes. PATTERN seq:
 * one page after the other from a place that follows from SEED; scatter: pages all over it. Only
 * non-zero bytes are written, and never the same ones twice. AMOUNT_MIB 0: until SIGTERM. Says:
 *   wrote 16777216 bytes in 102.1 ms
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define WORDS (PAGE_BYTES / 8)

static volatile sig_atomic_t stop;

static void on_term(int signal)
{
    (void)signal;
    stop = 1;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void fill(volatile uint64_t *page, uint64_t value)
{
    uint64_t base = mix(value);
    for (unsigned i = 0; i < WORDS; i++)
        page[i] = (base + i) | 1;
}

int main(int argc, char **argv)
{
    if (argc != 7 || (strcmp(argv[4], "seq") != 0 && strcmp(argv[4], "scatter") != 0)) {
        fprintf(stderr, "usage: dirty FILE REGION_MIB RATE_MB_S seq|scatter AMOUNT_MIB SEED\n");
        return 2;
    }
    uint64_t pages = strtoull(argv[2], NULL, 10) << 8, amount = strtoull(argv[5], NULL, 10) << 8;
    uint64_t seed = strtoull(argv[6], NULL, 10);
    double rate_mb_s = strtod(argv[3], NULL);
    int scatter = argv[4][1] == 'c';
    int fd = open(argv[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    struct stat before;
    if (pages == 0 || fd < 0 || fstat(fd, &before) != 0 || ftruncate(fd, (off_t)(pages * PAGE_BYTES)) != 0) {
        perror("dirty: file");
        return 1;
    }
    uint64_t *at = mmap(NULL, pages * PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        perror("dirty: mmap");
        return 1;
    }
    for (uint64_t page = (uint64_t)before.st_size / PAGE_BYTES; page < pages; page++)
        fill(at + page * WORDS, page);
    signal(SIGTERM, on_term);
    double begin = now_ms();
    uint64_t done = 0;
    for (; !stop && (amount == 0 || done < amount); done++) {
        uint64_t key = mix(seed) + done;
        uint64_t page = scatter ? mix(key) % pages : key % pages;
        fill(at + page * WORDS, mix(seed ^ (done << 20)));
        if (rate_mb_s > 0 && done % 16 == 0) {
            double ahead_ms = (double)done * PAGE_BYTES / rate_mb_s / 1e3 - (now_ms() - begin);
            if (ahead_ms > 0) {
                struct timespec t = {(time_t)(ahead_ms / 1e3), (long)(ahead_ms * 1e6) % 1000000000L};
                nanosleep(&t, NULL);
            }
        }
    }
    printf("wrote %llu bytes in %.1f ms\n", (unsigned long long)done * PAGE_BYTES, now_ms() - begin);
    return 0;
}
