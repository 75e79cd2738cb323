/*
 * echo serve ADDRESS PORT BYTES: answers each request of 32 bytes with BYTES bytes,
 * on one connection after the other.
 * echo ask ADDRESS PORT BYTES ROUNDS REST_US: how long each round took, µs, one a line; rests in between.
 *
 * What a link takes for a question and an answer, with nothing but TCP.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define REQUEST_BYTES 32

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* 0: all; else the connection has ended. */
static int receive(int fd, char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t n = recv(fd, bytes, count, 0);
        if (n <= 0)
            return -1;
        bytes += n;
        count -= (size_t)n;
    }
    return 0;
}

static int give(int fd, const char *bytes, size_t count)
{
    while (count > 0) {
        ssize_t n = send(fd, bytes, count, MSG_NOSIGNAL);
        if (n <= 0)
            return -1;
        bytes += n;
        count -= (size_t)n;
    }
    return 0;
}

static void at_once(int fd)
{
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static int serve(const struct sockaddr_in *address, char *bytes, size_t count)
{
    char request[REQUEST_BYTES];
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (const struct sockaddr *)address, sizeof *address) != 0 || listen(listener, 1) != 0) {
        perror("echo: listen");
        return 1;
    }
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) {
            perror("echo: accept");
            return 1;
        }
        at_once(fd);
        while (receive(fd, request, sizeof request) == 0 && give(fd, bytes, count) == 0)
            ;
        close(fd);
    }
}

static int ask(const struct sockaddr_in *address, char *bytes, size_t count, int rounds, useconds_t rest_us)
{
    char request[REQUEST_BYTES];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(request, 1, sizeof request);
    if (connect(fd, (const struct sockaddr *)address, sizeof *address) != 0) {
        perror("echo: connect");
        return 1;
    }
    at_once(fd);
    for (int i = 0; i < rounds; i++) {
        usleep(rest_us);
        double began = now_us();
        if (give(fd, request, sizeof request) != 0 || receive(fd, bytes, count) != 0) {
            fprintf(stderr, "echo: the connection has ended\n");
            return 1;
        }
        printf("%.1f\n", now_us() - began);
    }
    return 0;
}

int main(int argc, char **argv)
{
    int serves = argc == 5 && strcmp(argv[1], "serve") == 0, asks = argc == 7 && strcmp(argv[1], "ask") == 0;
    struct sockaddr_in address = {.sin_family = AF_INET};
    if ((!serves && !asks) || inet_pton(AF_INET, argv[2], &address.sin_addr) != 1) {
        fprintf(stderr, "usage: echo serve ADDRESS PORT BYTES | echo ask ADDRESS PORT BYTES ROUNDS REST_US\n");
        return 2;
    }
    address.sin_port = htons((uint16_t)atoi(argv[3]));
    size_t count = strtoull(argv[4], NULL, 10);
    char *bytes = calloc(count + 1, 1);
    if (bytes == NULL)
        return 1;
    memset(bytes, 7, count);
    return serves ? serve(&address, bytes, count)
                  : ask(&address, bytes, count, atoi(argv[5]), (useconds_t)atoi(argv[6]));
}
