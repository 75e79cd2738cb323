/*
 * pagewalk MIB [REST_US]: what it costs to touch a page for the first time after a fork.
 *
 * Fills MIB, then waits for this VM to become a clone (/run/vmfork/vmid changes). The clone with vmid
 * 1 walks at once, others (with REST_US all) when /run/pagewalk.go appears: one read of every 16th page, in an order that
 * no neighbour follows, each timed. With REST_US of every 128th, too few for the next to be predicted, and a rest
 * after each.
 * What it fills does not compress. The times go to /run/pagewalk.out, ns, one a line, and the file
 * appears when it is whole.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define STRIDE_BYTES 65536u
#define SPARSE_BYTES 524288u

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int vmid(void)
{
    char text[16] = "";
    int fd = open("/run/vmfork/vmid", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    return n > 0 ? atoi(text) : -1;
}

int main(int argc, char **argv)
{
    uint64_t mib = argc == 2 || argc == 3 ? strtoull(argv[1], NULL, 10) : 0;
    useconds_t rest_us = argc == 3 ? (useconds_t)atoi(argv[2]) : 0;
    if (mib == 0) {
        fprintf(stderr, "usage: pagewalk MIB [REST_US]\n");
        return 2;
    }
    size_t bytes = mib << 20, stride = argc == 3 ? SPARSE_BYTES : STRIDE_BYTES, stops = bytes / stride;
    uint64_t *region = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t *ticks = calloc(stops, sizeof *ticks);
    if (region == MAP_FAILED || ticks == NULL) {
        perror("pagewalk: memory");
        return 1;
    }
    uint64_t word = 1;
    for (size_t i = 0; i < bytes / 8; i++) {
        word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        region[i] = word ^ word >> 29;
    }
    memset(ticks, 1, stops * sizeof *ticks); /* present, so that storing a time faults nowhere */
    uint64_t t0 = now_ns(), c0 = __rdtsc();
    usleep(200000);
    double ns_per_tick = (double)(now_ns() - t0) / (double)(__rdtsc() - c0);
    int was = vmid();
    int out = open("/run/pagewalk.ready", O_CREAT | O_WRONLY, 0644);
    close(out);
    int is;
    while ((is = vmid()) == was || is < 0)
        usleep(500);
    while ((is != 1 || argc == 3) && access("/run/pagewalk.go", F_OK) != 0)
        usleep(2000);
    uint64_t sum = 0;
    for (size_t i = 0; i < stops; i++) {
        /* Downwards and hopping: a drain goes upwards. 5 and 7 share nothing with a power of two. */
        size_t stop = (stops - 1 - i * 5 % stops);
        const volatile uint64_t *at = (const volatile uint64_t *)((char *)region + stop * stride);
        uint64_t begin = __rdtsc();
        sum += *at;
        ticks[i] = __rdtsc() - begin;
        if (rest_us > 0)
            usleep(rest_us);
    }
    FILE *file = fopen("/run/pagewalk.part", "w");
    if (file == NULL)
        return 1;
    for (size_t i = 0; i < stops; i++)
        fprintf(file, "%.0f\n", (double)ticks[i] * ns_per_tick);
    fclose(file);
    fprintf(stderr, "sum %llu\n", (unsigned long long)sum);
    return rename("/run/pagewalk.part", "/run/pagewalk.out") == 0 ? 0 : 1;
}
