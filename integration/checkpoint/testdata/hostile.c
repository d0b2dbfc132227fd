// hostile stands in for a CRIU that was taken over. It tries what only rights outside of its user
// namespace permit, and reports each attempt in its log.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static FILE *report;

static void tried(const char *what, int result) {
	fprintf(report, " %s=%s;", what, result < 0 ? strerror(errno) : "DONE");
}

static int opened(const char *path, int flags) {
	int fd = open(path, flags, 0644);
	if (fd >= 0) close(fd);
	return fd;
}

static void field(const char *path, const char *name) {
	char line[256];
	FILE *f = fopen(path, "r");
	while (f && fgets(line, sizeof(line), f))
		if (!strncmp(line, name, strlen(name))) {
			line[strcspn(line, "\n")] = 0;
			fprintf(report, " %s;", line);
		}
	if (f) fclose(f);
}

int main(void) {
	char request[65536], path[64];
	if (recv(3, request, sizeof(request), 0) < 0) return 1; // the request for a restore
	if (!(report = fopen("/log/restore.log", "w"))) return 1;
	fprintf(report, "(0) Error (hostile:");
	field("/proc/self/uid_map", "");
	field("/proc/self/status", "CapEff");
	tried("read the node's passwords", opened("/etc/shadow", O_RDONLY));
	tried("write the node's programs", opened("/usr/made-by-criu", O_CREAT | O_WRONLY));
	tried("change an image", opened("/images/inventory.img", O_WRONLY));
	tried("change a setting", opened("/proc/sys/kernel/core_pattern", O_WRONLY));
	tried("mount", mount("tmpfs", "/log", "tmpfs", 0, NULL));
	tried("make a device", mknod("/log/disk", S_IFBLK | 0600, makedev(8, 0)));
	tried("signal the launcher", kill(getppid(), 0));
	snprintf(path, sizeof(path), "/proc/%d/root/", getppid());
	tried("read the launcher's root", opened(path, O_RDONLY));
	int ns = open("/proc/1/ns/mnt", O_RDONLY);
	tried("enter the node's mounts", ns < 0 ? ns : setns(ns, CLONE_NEWNS));
	fprintf(report, "\n");
	fclose(report);
	return 1;
}
