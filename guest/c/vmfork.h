/* SPDX-License-Identifier: Apache-2.0 */
/**
 * vmfork.h - fork the virtual machine that this program runs in.
 *
 * The calls of SnowFlock (EuroSys 2009) with their meaning, and two for messages:
 *
 *	sf_ticket ticket = sf_request_ticket(8, 0);
 *	if (ticket.granted < 0)
 *		return error(-ticket.granted);
 *	int vmid = sf_clone(ticket);
 *	if (vmid < 0)
 *		return error(-vmid);
 *	if (vmid > 0) {			// one of ticket.granted clones
 *		work(vmid, ticket.granted);
 *		sf_send(result, result_bytes);
 *		sf_exit();
 *	}
 *	while (sf_recv(ticket, SF_ANY, &message, &bytes, &from) == 0)
 *		...			// the parent; free(message)
 *	sf_join(ticket);
 *
 * After a fork everything in the VM exists once per clone: memory, processes, files. What leaves
 * the VM does not: a connection to elsewhere is the parent's.
 *
 * Errors are negative errno numbers; errno itself is not set. Any call may return
 *
 *	-ENOENT, -ECONNREFUSED	no vmfork agent here: this is no VM of vmfork's
 *	-ENOTCONN, -ECONNRESET	the agent has lost the host
 *	-ECANCELED		this VM was forked while the call waited, and this is the clone: the
 *				call goes on in the parent
 *	-EPROTO			the agent speaks another version of the protocol
 *	-EMFILE, -ENOMEM	no descriptor, no memory
 *	-ESTALE			the ticket was discarded: joined, killed, not cloned within 60 s; or
 *				it is the parent's, and this is a clone
 *
 * A signal handler that runs during a call does not end it.
 *
 * Threads: a VM fork takes all threads along, so each call may be made from any thread. With
 * hierarchical tickets process fork follows in a clone, which takes along the calling thread only.
 */
#ifndef VMFORK_H
#define VMFORK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SF_VERSION_MAJOR 0
#define SF_VERSION_MINOR 1

/** For sf_recv(): from whichever worker. */
#define SF_ANY 0

/**
 * A reservation for clones. A plain value: copy it as you like; there is nothing to free.
 *
 * @id       the ticket's number on this host.
 * @granted  how many clones it is for, 1 to what was asked; a negative errno if the request failed.
 */
typedef struct sf_ticket {
	uint64_t id;
	int32_t granted;
	int32_t reserved;
} sf_ticket;

/**
 * Reserve clones of this VM.
 *
 * @n             how many at most.
 * @hierarchical  0: one worker per clone. Else, where clones have several CPUs, each holds as many
 *                workers: process fork follows VM fork. @n counts workers then.
 * Returns  the ticket. Its .granted is negative on failure: -EINVAL (n < 1, or more than 4096),
 *          -ENOMEM (there is no room for a single one: vmforkd's log says why), -EAGAIN (this VM
 *          holds 256 tickets).
 * Ends     with sf_join() or sf_kill(); with its VM at the latest.
 * Threads  safe.
 * Since    0.1
 */
sf_ticket sf_request_ticket(int n, int hierarchical);

/**
 * Fork this VM, once per ticket.
 *
 * Buffered output of stdio is flushed before. In a clone of a hierarchical ticket the first worker
 * is this process; the others are its children, and each returns from here with its own number.
 *
 * Returns  0 in the parent; 1 to ticket.granted in the clones, a different number in each worker;
 *          -EINVAL (no such ticket, or it was cloned already), -EAGAIN (nothing was forked; the
 *          ticket is as before), -EIO (no clone could be started; the ticket is discarded).
 *          Some of the clones may have failed all the same: sf_join() tells.
 * Threads  safe; other threads run on, in the clones too.
 * Since    0.1
 */
int sf_clone(sf_ticket ticket);

/**
 * End this worker of a clone, and the clone with its last worker.
 *
 * Buffered output of stdio is flushed; atexit() handlers don't run. A worker whose process ends
 * without this call counts as failed.
 *
 * Returns  not at all in a process that sf_clone() made a worker. Else -EPERM (this VM is no
 *          clone, or has several workers and this process is none of them).
 * Threads  safe; all threads of the process end.
 * Since    0.1
 */
int sf_exit(void);

/**
 * Wait until all workers of a ticket have ended, then discard the ticket.
 *
 * Messages that were not received are discarded with it. The wait has no bound of its own: a worker
 * that must end is ended by sf_kill().
 *
 * Returns  how many workers failed: were killed, died, never started (0: all called sf_exit());
 *          or -EINVAL (no such ticket, or not cloned yet).
 * Threads  safe; while one waits, another may sf_kill().
 * Since    0.1
 */
int sf_join(sf_ticket ticket);

/**
 * Like sf_join(), and tell how each worker ended.
 *
 * @ended    called once per worker, in the order of their numbers, before this returns. @why is NULL
 *           for one that called sf_exit(), else a sentence, valid during the call. May be NULL.
 * @context  passed on.
 * Returns   as sf_join().
 * Since     0.1
 */
int sf_join_each(sf_ticket ticket, void (*ended)(int vmid, const char *why, void *context),
		 void *context);

/**
 * End all clones of a ticket now, then discard it. One that was not cloned is given back.
 *
 * Returns  how many workers had not called sf_exit(), or -EINVAL (no such ticket).
 * Threads  safe.
 * Since    0.1
 */
int sf_kill(sf_ticket ticket);

/**
 * In a clone: send a message to the parent. Messages of one worker arrive in order, each whole.
 *
 * Waits while the host holds much that the parent has not received: 64 MiB of this worker, 256 MiB of
 * all workers of this parent.
 *
 * @data, @bytes  the message, 256 MiB at most; @data may be NULL if @bytes is 0.
 * Returns  0 once the host has stored all of it (it survives this clone's end); -EPERM as sf_exit();
 *          -EMSGSIZE (longer than 256 MiB), -ENOMEM (the host has no room: 1 GiB lies there that
 *          parents have not received), -EPIPE (the ticket is gone, or the parent).
 * Threads  safe; calls of one worker are serialised.
 * Since    0.1
 */
int sf_send(const void *data, size_t bytes);

/**
 * In the parent: the next message of a worker, or of any; waits until there is one.
 *
 * @vmid    a worker's number, or SF_ANY.
 * @data    receives memory from malloc(), which the caller frees; never NULL on success.
 * @bytes   receives the message's length.
 * @from    receives the sender's number; may be NULL.
 * Returns  0; -EPIPE (that worker, or all, have ended and all they sent was received: the usual
 *          end of a loop); -EINVAL (no such ticket); -ENOMEM (the message is lost).
 *          On failure nothing was stored.
 * Threads  safe; each message goes to one of the callers.
 * Since    0.1
 */
int sf_recv(sf_ticket ticket, int vmid, void **data, size_t *bytes, int *from);

/**
 * This process's worker number.
 *
 * Returns  what sf_clone() returned last in it or the process that forked it; else the VM's own: 0
 *          where it booted, the clone's (first) number elsewhere; or a negative errno.
 * Threads  safe.
 * Since    0.1
 */
int sf_vmid(void);

#ifdef __cplusplus
}
#endif

#endif /* VMFORK_H */
