/* A "QEMU" that gives the guest its RAM in a way that can't be forked. It runs on the host.
 *
 * What it does is in its own name: `qemu-anonymous` has RAM that is no file, `qemu-twice` maps the
 * file a second time. Everything else is the real QEMU's. It is static, so that what is preloaded
 * goes to the real one only. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef REAL_QEMU
#define REAL_QEMU "/usr/bin/qemu-system-x86_64"
#endif

#define BACKEND "memory-backend-file,id=ram,"

int main(int argc, char **argv)
{
	const char *name = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
	char **changed = calloc(argc + 3, sizeof *changed);
	char *text;
	int count = 0;

	if (!changed)
		return 1;
	for (int i = 0; i < argc; i++) {
		changed[count++] = argv[i];
		if (strncmp(argv[i], BACKEND, strlen(BACKEND)) != 0)
			continue;
		const char *rest = argv[i] + strlen(BACKEND);
		if (strcmp(name, "qemu-anonymous") == 0) {
			/* Of the options only the size is one of every backend's. */
			int size = strcspn(rest, ",");
			if (asprintf(&text, "memory-backend-ram,id=ram,%.*s", size, rest) < 0)
				return 1;
			changed[count - 1] = text;
		} else {
			if (asprintf(&text, "memory-backend-file,id=ram2,%s", rest) < 0)
				return 1;
			changed[count++] = "-object";
			changed[count++] = text;
		}
	}
	changed[count] = NULL;
	execv(REAL_QEMU, changed);
	perror(REAL_QEMU);
	return 127;
}
