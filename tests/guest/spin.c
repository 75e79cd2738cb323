/*
 * spin once cpu|mem MIB UNITS      a fixed computation; says "UNITS units in 512.3 ms"
 * spin rate cpu|mem MIB SECONDS    the same without end; every 100 ms a line
 *                                  "REALTIME_MS UNITS" with what was done since the last one
 *
 * A unit of cpu is 20,000 rounds of an integer mix; a unit of mem adds to each word of 256 KiB
 * somewhere in a buffer of MIB, stretches all over it in turn. The sum is printed to stderr, so that
 * nothing can be left out.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define STRETCH_WORDS (256u * 1024 / 8)

static uint64_t *buffer;
static uint64_t stretches;
static uint64_t state = 1;

static double clock_ms(clockid_t which)
{
    struct timespec t;
    clock_gettime(which, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static void unit_cpu(void)
{
    uint64_t x = state;
    for (int i = 0; i < 20000; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    state = x;
}

static void unit_mem(void)
{
    static uint64_t next;
    uint64_t *at = buffer + next * STRETCH_WORDS;
    next = (next + 7) % stretches;
    for (unsigned i = 0; i < STRETCH_WORDS; i++)
        state += at[i]++;
}

int main(int argc, char **argv)
{
    uint64_t mib = argc == 5 ? strtoull(argv[3], NULL, 10) : 0;
    double amount = argc == 5 ? strtod(argv[4], NULL) : 0;
    int mem = argc == 5 && strcmp(argv[2], "mem") == 0;
    if (argc != 5 || mib == 0 || amount <= 0 || (!mem && strcmp(argv[2], "cpu") != 0)) {
        fprintf(stderr, "usage: spin once|rate cpu|mem MIB UNITS|SECONDS\n");
        return 2;
    }
    void (*unit)(void) = mem ? unit_mem : unit_cpu;
    stretches = mib * 4;
    if (mem) {
        buffer = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (buffer == MAP_FAILED) {
            perror("spin: mmap");
            return 1;
        }
        for (uint64_t i = 0; i < stretches * STRETCH_WORDS; i++)
            buffer[i] = i | 1;
    }
    double begin = clock_ms(CLOCK_MONOTONIC);
    if (strcmp(argv[1], "once") == 0) {
        for (uint64_t i = 0; i < (uint64_t)amount; i++)
            unit();
        printf("%llu units in %.1f ms\n", (unsigned long long)amount, clock_ms(CLOCK_MONOTONIC) - begin);
    } else {
        setvbuf(stdout, NULL, _IOLBF, 0);
        double slot = begin;
        uint64_t units = 0;
        while (clock_ms(CLOCK_MONOTONIC) < begin + amount * 1e3) {
            unit();
            units++;
            double now = clock_ms(CLOCK_MONOTONIC);
            if (now - slot >= 100) {
                /* Per 100 ms, whatever the slot's length came to be. */
                printf("%.1f %.3f\n", clock_ms(CLOCK_REALTIME), (double)units * 100 / (now - slot));
                units = 0;
                slot = now;
            }
        }
    }
    fprintf(stderr, "sum %llu\n", (unsigned long long)state);
    return 0;
}
