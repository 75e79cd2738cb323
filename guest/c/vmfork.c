/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library's half of the protocol in crates/agent/src/wire.rs, over /run/vmfork/fork.sock.
 *
 * Each request has a connection of its own, so that calls of several threads don't wait for each
 * other; closing it gives the request up. Only a worker keeps one: its life is the worker's life,
 * as the agent sees it.
 */
#define _GNU_SOURCE
#include "vmfork.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define PROTOCOL 1
#define RUN_DIR "/run/vmfork"
/* SCM_MAX_FD of the kernel. */
#define SOCKETS_MAX 253
/* How long sf_exit() waits for the agent; the worker ends in any case. */
#define EXIT_SECONDS 10

enum op { REQUEST_TICKET = 1, CLONE, EXIT, JOIN, KILL, SEND, RECV };

struct request {
	uint16_t version;
	uint16_t op;
	uint32_t a32;
	uint64_t a64;
	uint64_t bytes;
};

struct reply {
	int32_t status;
	uint32_t a32;
	uint64_t a64;
	uint64_t bytes;
};

typedef char request_is_24_bytes[sizeof(struct request) == 24 ? 1 : -1];
typedef char reply_is_24_bytes[sizeof(struct reply) == 24 ? 1 : -1];

/* This process as a worker. The lock serialises requests on worker_fd. */
static pthread_mutex_t worker_lock = PTHREAD_MUTEX_INITIALIZER;
static int worker_fd = -1;
static int worker_vmid;

/* VMFORK_RUN_DIR is for tests; a privileged program doesn't listen to it. */
static const char *run_dir(void)
{
	const char *dir = secure_getenv("VMFORK_RUN_DIR");

	return dir ? dir : RUN_DIR;
}

/* A new connection to the agent, or a negative errno. */
static int connect_agent(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int length, fd;

	length = snprintf(address.sun_path, sizeof(address.sun_path), "%s/fork.sock", run_dir());
	if (length < 0 || (size_t)length >= sizeof(address.sun_path))
		return -ENAMETOOLONG;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	while (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
		int error = errno;

		if (error == EINTR)
			continue;
		close(fd);
		return -error;
	}
	return fd;
}

static int write_all(int fd, const void *data, size_t bytes)
{
	const char *at = data;

	while (bytes > 0) {
		ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		at += n;
		bytes -= (size_t)n;
	}
	return 0;
}

static int read_all(int fd, void *data, size_t bytes)
{
	char *at = data;

	while (bytes > 0) {
		ssize_t n = recv(fd, at, bytes, 0);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -ECONNRESET;
		at += n;
		bytes -= (size_t)n;
	}
	return 0;
}

/* Send a request and read the head of its reply: 0, or a negative errno from either side. */
static int ask(int fd, enum op op, uint32_t a32, uint64_t a64, const void *data, size_t bytes,
	       struct reply *reply)
{
	struct request request = { PROTOCOL, (uint16_t)op, a32, a64, bytes };
	int sent, rc;

	sent = write_all(fd, &request, sizeof(request));
	if (sent == 0)
		sent = write_all(fd, data, bytes);
	/* An agent that hung up may have said why before. */
	rc = read_all(fd, reply, sizeof(*reply));
	if (rc < 0)
		return sent < 0 ? sent : rc;
	return reply->status;
}

/* The same on a connection of its own, which is returned, or a negative errno. */
static int ask_anew(enum op op, uint32_t a32, uint64_t a64, struct reply *reply)
{
	int fd, rc;

	fd = connect_agent();
	if (fd < 0)
		return fd;
	rc = ask(fd, op, a32, a64, NULL, 0, reply);
	if (rc < 0) {
		close(fd);
		return rc;
	}
	return fd;
}

sf_ticket sf_request_ticket(int n, int hierarchical)
{
	sf_ticket ticket = { 0, -EINVAL, 0 };
	struct reply reply;
	int fd;

	if (n < 1)
		return ticket;
	fd = ask_anew(REQUEST_TICKET, (uint32_t)n, hierarchical != 0, &reply);
	if (fd < 0) {
		ticket.granted = fd;
		return ticket;
	}
	close(fd);
	ticket.id = reply.a64;
	ticket.granted = (int32_t)reply.a32;
	return ticket;
}

/* The reply to CLONE: it may carry the sockets of the workers after the first. */
static int read_clone_reply(int fd, struct reply *reply, int *sockets, size_t *count)
{
	union {
		struct cmsghdr header;
		char bytes[CMSG_SPACE(SOCKETS_MAX * sizeof(int))];
	} control;
	struct iovec part = { reply, sizeof(*reply) };
	struct msghdr message = {
		.msg_iov = &part,
		.msg_iovlen = 1,
		.msg_control = &control,
		.msg_controllen = sizeof(control),
	};
	struct cmsghdr *c;
	ssize_t n;

	*count = 0;
	do
		n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return -errno;
	for (c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		*count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(sockets, CMSG_DATA(c), *count * sizeof(int));
	}
	if (n == 0)
		return -ECONNRESET;
	return read_all(fd, (char *)reply + n, sizeof(*reply) - (size_t)n);
}

static void become_worker(int fd, int vmid)
{
	pthread_mutex_lock(&worker_lock);
	if (worker_fd >= 0)
		close(worker_fd);
	worker_fd = fd;
	worker_vmid = vmid;
	pthread_mutex_unlock(&worker_lock);
}

int sf_clone(sf_ticket ticket)
{
	struct request request = { PROTOCOL, CLONE, 0, ticket.id, 0 };
	int sockets[SOCKETS_MAX];
	struct reply reply;
	size_t count = 0, i;
	int fd, rc, vmid;

	fflush(NULL);
	fd = connect_agent();
	if (fd < 0)
		return fd;
	rc = write_all(fd, &request, sizeof(request));
	if (rc == 0)
		rc = read_clone_reply(fd, &reply, sockets, &count);
	if (rc == 0)
		rc = reply.status;
	if (rc < 0 || reply.a32 == 0) {
		close(fd);
		return rc < 0 ? rc : 0;
	}
	vmid = (int)reply.a32;
	become_worker(fd, vmid);
	for (i = 0; i < count; i++) {
		/*
		 * If this fails, closing the socket is what tells the agent that the worker never
		 * was; the others go on.
		 */
		if (fork() == 0) {
			size_t other;

			for (other = i + 1; other < count; other++)
				close(sockets[other]);
			/* Another thread, which is not here, may have held it. */
			pthread_mutex_init(&worker_lock, NULL);
			vmid += (int)i + 1;
			become_worker(sockets[i], vmid);
			return vmid;
		}
		close(sockets[i]);
	}
	return vmid;
}

/* A connection for a request as a worker: the worker's own, locked, or a new one. */
static int lock_worker(void)
{
	pthread_mutex_lock(&worker_lock);
	if (worker_fd >= 0)
		return worker_fd;
	pthread_mutex_unlock(&worker_lock);
	return connect_agent();
}

static void unlock_worker(int fd)
{
	if (fd == worker_fd)
		pthread_mutex_unlock(&worker_lock);
	else
		close(fd);
}

int sf_exit(void)
{
	struct timeval patience = { .tv_sec = EXIT_SECONDS };
	int is_worker, fd, rc;
	struct reply reply;

	fflush(NULL);
	fd = lock_worker();
	is_worker = worker_vmid > 0;
	rc = fd;
	if (fd >= 0) {
		setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
		rc = ask(fd, EXIT, 0, 0, NULL, 0, &reply);
	}
	if (is_worker || rc >= 0)
		_exit(rc < 0);
	if (fd >= 0)
		unlock_worker(fd);
	return rc;
}

/* JOIN and KILL: wait for the end of all workers, then report each. */
static int end_ticket(enum op op, sf_ticket ticket,
		      void (*ended)(int vmid, const char *why, void *context), void *context)
{
	struct reply reply;
	uint32_t i;
	int fd, rc;

	fd = ask_anew(op, 0, ticket.id, &reply);
	if (fd < 0)
		return fd;
	for (i = 0, rc = 0; i < reply.a32 && ended; i++) {
		uint32_t head[2]; /* number, length of the reason */
		char *why;

		rc = read_all(fd, head, sizeof(head));
		if (rc < 0)
			break;
		why = malloc((size_t)head[1] + 1);
		if (!why) {
			rc = -ENOMEM;
			break;
		}
		rc = read_all(fd, why, head[1]);
		why[head[1]] = 0;
		if (rc == 0)
			ended((int)head[0], head[1] ? why : NULL, context);
		free(why);
		if (rc < 0)
			break;
	}
	close(fd);
	return rc < 0 ? rc : (int)reply.a64;
}

int sf_join(sf_ticket ticket)
{
	return end_ticket(JOIN, ticket, NULL, NULL);
}

int sf_join_each(sf_ticket ticket, void (*ended)(int vmid, const char *why, void *context),
		 void *context)
{
	return end_ticket(JOIN, ticket, ended, context);
}

int sf_kill(sf_ticket ticket)
{
	return end_ticket(KILL, ticket, NULL, NULL);
}

int sf_send(const void *data, size_t bytes)
{
	struct reply reply;
	int fd, rc;

	if (!data && bytes > 0)
		return -EINVAL;
	fd = lock_worker();
	if (fd < 0)
		return fd;
	rc = ask(fd, SEND, 0, 0, data, bytes, &reply);
	unlock_worker(fd);
	return rc;
}

int sf_recv(sf_ticket ticket, int vmid, void **data, size_t *bytes, int *from)
{
	struct reply reply;
	void *message;
	int fd, rc;

	if (vmid < 0 || !data || !bytes)
		return -EINVAL;
	fd = ask_anew(RECV, (uint32_t)vmid, ticket.id, &reply);
	if (fd < 0)
		return fd;
	message = reply.bytes < SIZE_MAX ? malloc(reply.bytes ? (size_t)reply.bytes : 1) : NULL;
	rc = message ? read_all(fd, message, (size_t)reply.bytes) : -ENOMEM;
	close(fd);
	if (rc < 0) {
		free(message);
		return rc;
	}
	*data = message;
	*bytes = (size_t)reply.bytes;
	if (from)
		*from = (int)reply.a32;
	return 0;
}

int sf_vmid(void)
{
	char path[256];
	int vmid, rc;
	FILE *file;

	pthread_mutex_lock(&worker_lock);
	vmid = worker_vmid;
	pthread_mutex_unlock(&worker_lock);
	if (vmid > 0)
		return vmid;
	rc = snprintf(path, sizeof(path), "%s/vmid", run_dir());
	if (rc < 0 || (size_t)rc >= sizeof(path))
		return -ENAMETOOLONG;
	file = fopen(path, "re");
	if (!file)
		return -errno;
	if (fscanf(file, "%d", &vmid) != 1)
		vmid = -EIO;
	fclose(file);
	return vmid;
}
