/*
 * forkapi MODE: the C fork API, checked from inside. Prints "ok" at the end; exits 1 with a reason.
 *
 *   messages       4 workers each send messages of 0, 1 and 5 MiB, in order
 *   hierarchical   4 workers on 2-vCPU clones; prints "vmid pid machine-id" of each, then ok
 *   kill           3 workers sleep for ever, and are killed
 *   errors         what must be refused is, with the documented errno
 *   nested         each of 2 workers forks 2 of its own, and sends on what they sent
 *   abandon        one worker ends without sf_exit(): it counts as failed
 */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "vmfork.h"

static const size_t sizes[] = {0, 1, 5u << 20};
#define SIZES (sizeof sizes / sizeof *sizes)

static void check(int holds, const char *format, ...)
{
    if (holds)
        return;
    va_list arguments;
    va_start(arguments, format);
    printf("failed: ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
    _exit(1);
}

static uint8_t byte_of(int vmid, size_t message, size_t i)
{
    return (uint8_t)((i * 2654435761u >> 13) + (size_t)vmid * 31 + message);
}

static sf_ticket request(int n, int hierarchical)
{
    sf_ticket ticket = sf_request_ticket(n, hierarchical);
    check(ticket.granted == n, "granted %d of %d", ticket.granted, n);
    return ticket;
}

static void messages(void)
{
    sf_ticket ticket = request(4, 0);
    int vmid = sf_clone(ticket);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid > 0) {
        for (size_t m = 0; m < SIZES; m++) {
            uint8_t *data = malloc(sizes[m] + 1);
            check(data != NULL, "no memory");
            for (size_t i = 0; i < sizes[m]; i++)
                data[i] = byte_of(vmid, m, i);
            int rc = sf_send(data, sizes[m]);
            if (rc != 0)
                _exit(1); /* counts as failed in sf_join */
            free(data);
        }
        sf_exit();
    }
    size_t seen[5] = {0};
    void *data;
    size_t bytes;
    int from, rc;
    while ((rc = sf_recv(ticket, SF_ANY, &data, &bytes, &from)) == 0) {
        check(from >= 1 && from <= 4, "a message from %d", from);
        check(data != NULL, "a NULL message from %d", from);
        size_t m = seen[from]++;
        check(m < SIZES && bytes == sizes[m], "message %zu of %d has %zu bytes", m, from, bytes);
        for (size_t i = 0; i < bytes; i++)
            check(((uint8_t *)data)[i] == byte_of(from, m, i), "byte %zu of message %zu of %d", i, m, from);
        free(data);
    }
    check(rc == -EPIPE, "sf_recv at the end: %d", rc);
    for (int v = 1; v <= 4; v++)
        check(seen[v] == SIZES, "%zu messages of %d", seen[v], v);
    rc = sf_join(ticket);
    check(rc == 0, "sf_join: %d failed", rc);
    rc = sf_join(ticket);
    check(rc == -ESTALE, "sf_join again: %d", rc);
}

static void hierarchical(void)
{
    sf_ticket ticket = request(4, 1);
    int vmid = sf_clone(ticket);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid > 0) {
        char id[64] = "", text[160];
        FILE *file = fopen("/etc/machine-id", "r");
        if (file == NULL || fscanf(file, "%63s", id) != 1)
            _exit(1);
        fclose(file);
        int n = snprintf(text, sizeof text, "%d %d %s", vmid, (int)getpid(), id);
        if (sf_vmid() != vmid || sf_send(text, (size_t)n) != 0)
            _exit(1);
        sf_exit();
    }
    void *data;
    size_t bytes;
    int from;
    while (sf_recv(ticket, SF_ANY, &data, &bytes, &from) == 0) {
        printf("%.*s\n", (int)bytes, (char *)data);
        free(data);
    }
    int rc = sf_join(ticket);
    check(rc == 0, "sf_join: %d failed", rc);
}

static void kill_all(void)
{
    sf_ticket ticket = request(3, 0);
    int vmid = sf_clone(ticket);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid > 0)
        for (;;)
            pause();
    int rc = sf_kill(ticket);
    check(rc == 3, "sf_kill: %d", rc);
    rc = sf_kill(ticket);
    check(rc == -ESTALE, "sf_kill again: %d", rc);
}

static void errors(void)
{
    sf_ticket none = {.id = 1ULL << 62, .granted = 1};
    int rc = sf_request_ticket(0, 0).granted;
    check(rc == -EINVAL, "a ticket for 0: %d", rc);
    rc = sf_clone(none);
    check(rc == -EINVAL, "sf_clone of no ticket: %d", rc);
    rc = sf_join(none);
    check(rc == -EINVAL, "sf_join of no ticket: %d", rc);
    sf_ticket ticket = request(1, 0);
    rc = sf_join(ticket);
    check(rc == -EINVAL, "sf_join before sf_clone: %d", rc);
    int vmid = sf_clone(ticket);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid > 0)
        sf_exit();
    rc = sf_clone(ticket);
    check(rc == -EINVAL, "sf_clone twice: %d", rc);
    rc = sf_join(ticket);
    check(rc == 0, "sf_join: %d", rc);
    ticket = request(2, 0);
    rc = sf_kill(ticket); /* given back without having been cloned */
    check(rc >= 0, "sf_kill of an unused ticket: %d", rc);
}

static void nested(void)
{
    sf_ticket outer = request(2, 0);
    int vmid = sf_clone(outer);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid > 0) {
        sf_ticket inner = sf_request_ticket(2, 0);
        int child = inner.granted == 2 ? sf_clone(inner) : -1;
        if (child < 0)
            _exit(1);
        if (child > 0) {
            int value = vmid * 10 + child;
            if (sf_send(&value, sizeof value) != 0)
                _exit(1);
            sf_exit();
        }
        int sum = 0, from;
        void *data;
        size_t bytes;
        while (sf_recv(inner, SF_ANY, &data, &bytes, &from) == 0) {
            int value;
            memcpy(&value, data, sizeof value);
            sum += value;
            free(data);
        }
        if (sf_join(inner) != 0 || sf_send(&sum, sizeof sum) != 0)
            _exit(1);
        sf_exit();
    }
    int total = 0, from;
    void *data;
    size_t bytes;
    while (sf_recv(outer, SF_ANY, &data, &bytes, &from) == 0) {
        int value;
        check(bytes == sizeof value, "%zu bytes from %d", bytes, from);
        memcpy(&value, data, sizeof value);
        total += value;
        free(data);
    }
    int rc = sf_join(outer);
    check(rc == 0, "sf_join: %d failed", rc);
    check(total == 11 + 12 + 21 + 22, "the sum is %d", total);
}

static void abandon(void)
{
    sf_ticket ticket = request(2, 0);
    int vmid = sf_clone(ticket);
    check(vmid >= 0, "sf_clone: %d", vmid);
    if (vmid == 2)
        _exit(0);
    if (vmid > 0)
        sf_exit();
    int rc = sf_join(ticket);
    check(rc == 1, "sf_join counts %d failed", rc);
}

int main(int argc, char **argv)
{
    const struct {
        const char *name;
        void (*run)(void);
    } modes[] = {
        {"messages", messages}, {"hierarchical", hierarchical}, {"kill", kill_all},
        {"errors", errors},     {"nested", nested},             {"abandon", abandon},
    };
    for (size_t i = 0; argc == 2 && i < sizeof modes / sizeof *modes; i++) {
        if (strcmp(argv[1], modes[i].name) == 0) {
            modes[i].run();
            printf("ok\n");
            return 0;
        }
    }
    fprintf(stderr, "usage: forkapi MODE\n");
    return 2;
}
