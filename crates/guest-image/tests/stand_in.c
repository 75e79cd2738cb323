/*
 * Stands in for the agent: does what it does up to the root file system, says so on the console,
 * and ends the VM. Keeps the test of images apart from the agent's own.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void end(const char *what)
{
	printf("STAND-IN: %s: %s\n", what, strerror(errno));
	reboot(RB_POWER_OFF);
	_exit(1);
}

static void show(const char *path)
{
	char text[256];
	int fd = open(path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);

	if (n < 0)
		end(path);
	text[n] = 0;
	text[strcspn(text, "\n")] = 0;
	printf("STAND-IN: %s: %s\n", path, text);
	close(fd);
}

int main(void)
{
	char line[256], path[300];
	struct timespec tick = {0, 20000000};
	FILE *order = fopen("/modules/order", "r");

	setvbuf(stdout, NULL, _IOLBF, 0);
	mount("proc", "/proc", "proc", 0, "");
	show("/proc/uptime");
	if (!order)
		end("/modules/order");
	while (fgets(line, sizeof line, order)) {
		line[strcspn(line, "\n")] = 0;
		snprintf(path, sizeof path, "/modules/%s", line);
		int fd = open(path, O_RDONLY);
		if (fd < 0 || syscall(SYS_finit_module, fd, "", 0))
			end(path);
		close(fd);
	}
	mount("dev", "/dev", "devtmpfs", 0, "");
	for (int i = 0; i < 500 && access("/dev/vda", F_OK); i++)
		nanosleep(&tick, NULL);
	mkdir("/lower", 0755);
	mkdir("/upper", 0755);
	if (mount("/dev/vda", "/lower", "ext4", MS_RDONLY, ""))
		end("mount /dev/vda");
	if (mount("tmpfs", "/upper", "tmpfs", 0, "") || mkdir("/upper/u", 0755) || mkdir("/upper/w", 0755))
		end("tmpfs");
	if (mount("overlay", "/newroot", "overlay", 0, "lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w"))
		end("mount overlay");
	if (chroot("/newroot") || chdir("/"))
		end("chroot");
	show("/etc/debian_version");
	show("/etc/hostname");
	show("/opt/extra/note");
	show("/usr/include/vmfork.h");
	int status = system("/etc/vmfork/firstboot");
	printf("STAND-IN: firstboot: %d\n", WEXITSTATUS(status));
	show("/written");
	printf("STAND-IN: done\n");
	reboot(RB_POWER_OFF);
	return 1;
}
