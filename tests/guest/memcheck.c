/*
 * memcheck: keeps rewriting a large region so that, at any instant, every byte of it is known.
 *
 *   memcheck serve SOCKET MIB THREADS SEED   fill the region, go to the background, listen, write
 *   memcheck ctl SOCKET COMMAND [NUMBER]     one command to a server; exit 0 ok, 1 not, 2 misuse
 *
 * The region is cut into one shard per writer thread. A writer walks its shard's pages in a fixed
 * pseudo-random order and rewrites each one wholly with bytes that follow from (seed, page, epoch).
 * Before and after each page it publishes where it stands, in a control page of its own:
 *
 *        order:   0 1 2 … step-1 | step | step+1 …
 *        epoch:      current      |  in  |    previous
 *                                  flight
 *
 * A freeze stops all vCPUs at one instant, so that control pages and region agree in every clone.
 * There the writers go on from that instruction; what they had not reached by the time they are
 * paused must still be what the parent had, and the page in flight must come out whole.
 *
 * Commands: pause, resume, status, verify (pauses), scribble N (pauses; every page becomes epoch
 * 2^32 + N), verify-scribble N (also that the epoch is that one), rate MB_PER_S (0: no limit),
 * corrupt N (pauses; flips a bit of byte N of the region, so that verify must fail), quit.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096u
#define WORDS (PAGE_BYTES / 8)
#define THREADS_MAX 8
#define SCRIBBLE_BASE (UINT64_C(1) << 32)
#define MISMATCHES_MAX 8

/* One per writer, each in a page of its own. */
struct control {
    _Atomic uint64_t epoch;      /* of pages before the step */
    _Atomic uint64_t previous;   /* of pages from the step on */
    _Atomic uint64_t step;
    _Atomic uint64_t writing;    /* whether the page of the step is in flight */
    _Atomic uint64_t written;    /* pages since the start */
    _Atomic uint64_t parked;
    uint64_t first, pages;       /* the shard */
    uint64_t stride, offset;     /* its order: page = first + (offset + step * stride) % pages */
} __attribute__((aligned(PAGE_BYTES)));

static struct control *controls;
static uint8_t *region;
static uint64_t region_bytes;
static unsigned threads;
static uint64_t seed;
static _Atomic int want_pause;
static pthread_mutex_t pausing = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t resumed = PTHREAD_COND_INITIALIZER;
static _Atomic uint64_t rate_mb_s;

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* Word `i` of page `page` in epoch `epoch`. The first two name page and epoch in clear, so that a
 * wrong page tells where its bytes came from. */
static uint64_t word(uint64_t page, uint64_t epoch, uint64_t base, unsigned i)
{
    if (i == 0)
        return page;
    if (i == 1)
        return epoch;
    return base + i * UINT64_C(0xd1342543de82ef95);
}

static uint64_t page_base(uint64_t page, uint64_t epoch)
{
    return mix(mix(seed ^ page) ^ epoch);
}

static void write_page(uint64_t page, uint64_t epoch)
{
    volatile uint64_t *words = (volatile uint64_t *)(region + page * PAGE_BYTES);
    uint64_t base = page_base(page, epoch);
    for (unsigned i = 0; i < WORDS; i++)
        words[i] = word(page, epoch, base, i);
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

static uint64_t page_at(const struct control *c, uint64_t step)
{
    return c->first + (c->offset + step * c->stride) % c->pages;
}

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void nap_us(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

static void *writer(void *argument)
{
    struct control *c = argument;
    uint64_t begin = now_us(), since = 0;
    for (;;) {
        if (atomic_load(&want_pause)) {
            /* Asleep for good: many clones stand still at once, and a vCPU that polls is slow to emulate. */
            pthread_mutex_lock(&pausing);
            atomic_store(&c->parked, 1);
            while (atomic_load(&want_pause))
                pthread_cond_wait(&resumed, &pausing);
            atomic_store(&c->parked, 0);
            pthread_mutex_unlock(&pausing);
            begin = now_us();
            since = 0;
        }
        if (c->step == c->pages) {
            /* Whole shard in `epoch`: the next one begins. The order of these stores matters: at no
             * instant may they say something untrue of a page. */
            atomic_store(&c->previous, c->epoch);
            atomic_store(&c->step, 0);
            atomic_store(&c->epoch, c->epoch + 1);
        }
        atomic_store(&c->writing, 1);
        write_page(page_at(c, c->step), c->epoch);
        atomic_store(&c->step, c->step + 1);
        atomic_store(&c->writing, 0);
        atomic_fetch_add(&c->written, 1);
        since++;
        uint64_t rate = atomic_load(&rate_mb_s) / threads;
        if (rate != 0 && since % 16 == 0) {
            uint64_t due_us = since * PAGE_BYTES / rate; /* MB/s is bytes per us */
            uint64_t spent_us = now_us() - begin;
            if (due_us > spent_us)
                nap_us((long)(due_us - spent_us));
        }
    }
    return NULL;
}

/* An answer being put together; cut if it grows too long. */
struct text {
    size_t length;
    char bytes[4096];
};

static void say(struct text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct text *out, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(out->bytes + out->length, sizeof out->bytes - out->length, format, arguments);
    va_end(arguments);
    if (n > 0)
        out->length += (size_t)n;
    if (out->length >= sizeof out->bytes)
        out->length = sizeof out->bytes - 1;
}

/* Have all writers parked, or none; returns once they are. */
static int park_writers(int parked)
{
    pthread_mutex_lock(&pausing);
    atomic_store(&want_pause, parked);
    pthread_cond_broadcast(&resumed);
    pthread_mutex_unlock(&pausing);
    for (int wait_ms = 0; wait_ms < 60000; wait_ms++) {
        unsigned there = 0;
        for (unsigned t = 0; t < threads; t++)
            there += (atomic_load(&controls[t].parked) != 0) == parked;
        if (there == threads)
            return 0;
        nap_us(1000);
    }
    return -1;
}

static void status(struct text *out)
{
    for (unsigned t = 0; t < threads; t++)
        say(out, " [%u] epoch=%" PRIu64 " previous=%" PRIu64 " step=%" PRIu64 "/%" PRIu64 " written=%" PRIu64,
            t, (uint64_t)controls[t].epoch, (uint64_t)controls[t].previous, (uint64_t)controls[t].step,
            controls[t].pages, (uint64_t)controls[t].written);
}

/* Every byte of every page; returns how many pages are wrong. */
static uint64_t verify(struct text *out)
{
    uint64_t wrong = 0;
    for (unsigned t = 0; t < threads; t++) {
        const struct control *c = &controls[t];
        if (c->writing) {
            say(out, " [%u] parked with a page in flight\n", t);
            wrong++;
        }
        for (uint64_t step = 0; step < c->pages; step++) {
            uint64_t page = page_at(c, step);
            uint64_t epoch = step < c->step ? c->epoch : c->previous;
            uint64_t base = page_base(page, epoch);
            const volatile uint64_t *words = (const volatile uint64_t *)(region + page * PAGE_BYTES);
            unsigned bad = 0, first = 0;
            uint64_t seen = 0;
            for (unsigned i = 0; i < WORDS; i++) {
                uint64_t got = words[i];
                if (got != word(page, epoch, base, i)) {
                    if (bad++ == 0) {
                        first = i;
                        seen = got;
                    }
                }
            }
            if (bad == 0)
                continue;
            if (wrong++ < MISMATCHES_MAX)
                say(out,
                    "\n [%u] page %" PRIu64 " at step %" PRIu64 " (cursor %" PRIu64 "): %u of %u words wrong, the "
                    "first is %u: %#" PRIx64 ", wanted %#" PRIx64 "; it calls itself page %" PRIu64 " of epoch %" PRIu64
                    ", wanted epoch %" PRIu64,
                    t, page, step, (uint64_t)c->step, bad, WORDS, first, seen, word(page, epoch, base, first),
                    words[0], words[1], epoch);
        }
    }
    return wrong;
}

static void scribble(uint64_t number)
{
    for (unsigned t = 0; t < threads; t++) {
        struct control *c = &controls[t];
        for (uint64_t step = 0; step < c->pages; step++)
            write_page(page_at(c, step), SCRIBBLE_BASE + number);
        c->epoch = c->previous = SCRIBBLE_BASE + number;
        c->step = c->pages;
    }
}

static void answer(const char *line, struct text *out)
{
    char command[32] = "";
    uint64_t number = 0;
    if (sscanf(line, "%31s %" SCNu64, command, &number) < 1) {
        say(out, "error: no command");
        return;
    }
    int checks = strcmp(command, "verify") == 0, scribbled = strcmp(command, "verify-scribble") == 0;
    if (checks || scribbled || strcmp(command, "pause") == 0 || strcmp(command, "scribble") == 0 ||
        strcmp(command, "corrupt") == 0) {
        if (park_writers(1) != 0) {
            say(out, "error: writers did not park within 60 s:");
            status(out);
            return;
        }
    }
    if (scribbled) {
        for (unsigned t = 0; t < threads; t++)
            if (controls[t].epoch != SCRIBBLE_BASE + number) {
                say(out, "error: not the scribble %" PRIu64 ":", number);
                status(out);
                return;
            }
    }
    if (checks || scribbled) {
        struct text detail = {0, ""};
        uint64_t wrong = verify(&detail);
        say(out, wrong == 0 ? "ok" : "error: %" PRIu64 " pages wrong:", wrong);
        status(out);
        say(out, "%s", detail.bytes);
    } else if (strcmp(command, "pause") == 0) {
        say(out, "ok");
        status(out);
    } else if (strcmp(command, "scribble") == 0) {
        scribble(number);
        say(out, "ok");
        status(out);
    } else if (strcmp(command, "resume") == 0) {
        say(out, park_writers(0) == 0 ? "ok" : "error: writers did not go on within 60 s");
    } else if (strcmp(command, "rate") == 0) {
        atomic_store(&rate_mb_s, number);
        say(out, "ok");
    } else if (strcmp(command, "corrupt") == 0) {
        if (number < region_bytes) {
            region[number] ^= 1;
            say(out, "ok");
        } else {
            say(out, "error: the region has %" PRIu64 " bytes", region_bytes);
        }
    } else if (strcmp(command, "status") == 0 || strcmp(command, "quit") == 0) {
        say(out, "ok");
        status(out);
    } else {
        say(out, "error: unknown command %s", command);
    }
}

static int address(const char *path, struct sockaddr_un *to)
{
    memset(to, 0, sizeof *to);
    to->sun_family = AF_UNIX;
    if (strlen(path) >= sizeof to->sun_path)
        return -1;
    strcpy(to->sun_path, path);
    return 0;
}

static void *zeroed(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        perror("memcheck: mmap");
        exit(1);
    }
    return at;
}

static void begin(uint64_t mib)
{
    uint64_t pages = mib * (1048576 / PAGE_BYTES);
    region_bytes = pages * PAGE_BYTES;
    region = zeroed(region_bytes);
    controls = zeroed(threads * sizeof *controls);
    for (unsigned t = 0; t < threads; t++) {
        struct control *c = &controls[t];
        c->first = pages * t / threads;
        c->pages = pages * (t + 1) / threads - c->first;
        c->offset = mix(seed + t) % c->pages;
        c->stride = mix(seed - t) % c->pages | 1;
        while (gcd(c->stride, c->pages) != 1)
            c->stride += 2;
        for (uint64_t step = 0; step < c->pages; step++)
            write_page(page_at(c, step), 1);
        c->epoch = c->previous = 1;
        c->step = c->pages;
    }
}

static int serve(const char *path, uint64_t mib)
{
    struct sockaddr_un to;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    if (listener < 0 || address(path, &to) != 0 || bind(listener, (struct sockaddr *)&to, sizeof to) != 0 ||
        listen(listener, 16) != 0) {
        perror("memcheck: listen");
        return 1;
    }
    begin(mib);
    pid_t child = fork();
    if (child < 0) {
        perror("memcheck: fork");
        return 1;
    }
    if (child > 0)
        return 0; /* connections queue from here on */
    setsid();
    int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3 && null >= 0; fd++)
        dup2(null, fd);
    for (unsigned t = 0; t < threads; t++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, writer, &controls[t]) != 0)
            return 1;
    }
    for (;;) {
        int peer = accept(listener, NULL, NULL);
        if (peer < 0)
            continue;
        char line[128] = "";
        struct timeval limit = {5, 0};
        setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        if (read(peer, line, sizeof line - 1) > 0) {
            struct text out = {0, ""};
            answer(line, &out);
            if (write(peer, out.bytes, out.length) < 0)
                perror("memcheck: write");
            if (strncmp(line, "quit", 4) == 0)
                return 0;
        }
        close(peer);
    }
}

static int ctl(const char *path, const char *command, const char *number)
{
    struct sockaddr_un to;
    char line[128], out[4096];
    size_t length = 0;
    int server = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {300, 0};
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    if (server < 0 || address(path, &to) != 0 || connect(server, (struct sockaddr *)&to, sizeof to) != 0) {
        perror("memcheck: connect");
        return 1;
    }
    int n = snprintf(line, sizeof line, "%s %s", command, number);
    if (write(server, line, (size_t)n) != n) {
        perror("memcheck: write");
        return 1;
    }
    for (ssize_t got; length < sizeof out && (got = read(server, out + length, sizeof out - length)) > 0;)
        length += (size_t)got;
    if (length == 0) {
        fprintf(stderr, "memcheck: no answer\n");
        return 1;
    }
    printf("%.*s\n", (int)length, out);
    return strncmp(out, "ok", 2) == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 6 && strcmp(argv[1], "serve") == 0) {
        uint64_t mib = strtoull(argv[3], NULL, 10);
        threads = (unsigned)strtoul(argv[4], NULL, 10);
        seed = strtoull(argv[5], NULL, 10);
        if (mib >= 1 && threads >= 1 && threads <= THREADS_MAX)
            return serve(argv[2], mib);
    }
    if (argc == 4 || argc == 5) {
        if (strcmp(argv[1], "ctl") == 0)
            return ctl(argv[2], argv[3], argc == 5 ? argv[4] : "0");
    }
    fprintf(stderr, "usage: memcheck serve SOCKET MIB THREADS SEED | memcheck ctl SOCKET COMMAND [NUMBER]\n");
    return 2;
}
