/*
 * The monitor's system calls. They return the kernel's result, or -errno. The monitor uses no C
 * library: glibc's initialisation alone takes more memory than a monitor.
 */
#ifndef SYS_H
#define SYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <asm/errno.h>
#include <asm/ioctls.h>
#include <asm/termios.h>
#include <asm/unistd.h>
#include <linux/eventpoll.h>
#include <linux/fcntl.h>
#include <linux/openat2.h>
#include <linux/stat.h>
#include <linux/time_types.h>

/* Definitions that the kernel's user headers leave to the C library. */
#define CLOCK_REALTIME 0
#define CLOCK_MONOTONIC 1
#define SEEK_SET 0
#define WNOHANG 1
#define SOL_SOCKET 1
#define SO_SNDBUF 7
#define SO_PEERCRED 17
#define SO_SNDBUFFORCE 32
#define SOCK_NONBLOCK O_NONBLOCK
#define SOCK_CLOEXEC O_CLOEXEC
#define MSG_DONTWAIT 0x40
#define MSG_NOSIGNAL 0x4000
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_PRIVATE 2
#define MAP_ANONYMOUS 0x20
#define MREMAP_MAYMOVE 1
#define EPOLL_ERRORS (EPOLLHUP | EPOLLERR)

struct ucred {
	int32_t pid;
	uint32_t uid, gid;
};

static inline long syscall6(long nr, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = nr;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "the monitor knows the system calls of x86_64 and aarch64 only"
#endif
}

#define SYS0(name) syscall6(__NR_##name, 0, 0, 0, 0, 0, 0)
#define SYS1(name, a) syscall6(__NR_##name, (long)(a), 0, 0, 0, 0, 0)
#define SYS2(name, a, b) syscall6(__NR_##name, (long)(a), (long)(b), 0, 0, 0, 0)
#define SYS3(name, a, b, c) syscall6(__NR_##name, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define SYS4(name, a, b, c, d) syscall6(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define SYS5(name, a, b, c, d, e) syscall6(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)
#define SYS6(name, a, b, c, d, e, f) \
	syscall6(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static inline long sys_read(int fd, void *buf, size_t n) { return SYS3(read, fd, buf, n); }
static inline long sys_pread(int fd, void *buf, size_t n, long at) { return SYS4(pread64, fd, buf, n, at); }
static inline long sys_write(int fd, const void *buf, size_t n) { return SYS3(write, fd, buf, n); }
static inline long sys_pwrite(int fd, const void *buf, size_t n, long at) { return SYS4(pwrite64, fd, buf, n, at); }
static inline long sys_close(int fd) { return SYS1(close, fd); }
static inline long sys_fcntl(int fd, int op, long arg) { return SYS3(fcntl, fd, op, arg); }
static inline long sys_ioctl(int fd, unsigned int op, long arg) { return SYS3(ioctl, fd, op, arg); }
static inline long sys_ftruncate(int fd, long size) { return SYS2(ftruncate, fd, size); }
static inline long sys_flock(int fd, int op) { return SYS2(flock, fd, op); }
static inline long sys_lseek(int fd, long offset, int whence) { return SYS3(lseek, fd, offset, whence); }
static inline long sys_getdents64(int fd, void *buf, size_t n) { return SYS3(getdents64, fd, buf, n); }

static inline long sys_openat(int dir, const char *path, int flags, int mode)
{
	return SYS4(openat, dir, path, flags, mode);
}

static inline long sys_openat2(int dir, const char *path, struct open_how *how)
{
	return SYS4(openat2, dir, path, how, sizeof(*how));
}

/* struct stat differs between architectures, but struct statx does not. */
static inline long sys_statx(int fd, const char *path, int flags, unsigned int mask, struct statx *st)
{
	return SYS5(statx, fd, path, flags, mask, st);
}

static inline long sys_faccessat(int dir, const char *path, int mode) { return SYS3(faccessat, dir, path, mode); }
static inline long sys_unlinkat(int dir, const char *path, int flags) { return SYS3(unlinkat, dir, path, flags); }

static inline long sys_rename(const char *from, const char *to)
{
	return SYS5(renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static inline long sys_epoll_create(void) { return SYS1(epoll_create1, EPOLL_CLOEXEC); }
static inline long sys_epoll_ctl(int epoll, int op, int fd, struct epoll_event *e)
{
	return SYS4(epoll_ctl, epoll, op, fd, e);
}

static inline long sys_epoll_wait(int epoll, struct epoll_event *events, int max, int timeout)
{
	return SYS6(epoll_pwait, epoll, events, max, timeout, 0, 0); /* arm64 has no epoll_wait */
}

static inline long sys_accept(int fd) { return SYS4(accept4, fd, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC); }

static inline long sys_send(int fd, const void *buf, size_t n)
{
	return SYS6(sendto, fd, buf, n, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0);
}

static inline long sys_getsockopt(int fd, int option, void *value, unsigned int *size)
{
	return SYS5(getsockopt, fd, SOL_SOCKET, option, value, size);
}

static inline long sys_setsockopt(int fd, int option, int value)
{
	return SYS5(setsockopt, fd, SOL_SOCKET, option, &value, sizeof(value));
}

static inline long sys_wait4(int pid, int *status, int options) { return SYS4(wait4, pid, status, options, 0); }
static inline long sys_kill(int pid, int sig) { return SYS2(kill, pid, sig); }
static inline long sys_getpid(void) { return SYS0(getpid); }
static inline long sys_geteuid(void) { return SYS0(geteuid); }
static inline long sys_clock_gettime(int clock, struct __kernel_timespec *t) { return SYS2(clock_gettime, clock, t); }
static inline long sys_nanosleep(const struct __kernel_timespec *t) { return SYS2(nanosleep, t, 0); }

#ifdef HOSTED /* the sanitizers check the bounds of their malloc's memory */
void *malloc(size_t size);
void *realloc(void *at, size_t size);
void free(void *at);
static inline long sys_mmap(size_t size) { return (long)malloc(size); }
static inline long sys_mremap(void *at, size_t from, size_t to) { return (void)from, (long)realloc(at, to); }
static inline void sys_munmap(void *at, size_t size) { (void)size, free(at); }
#else
static inline long sys_mmap(size_t size)
{
	return SYS6(mmap, 0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static inline long sys_mremap(void *at, size_t from, size_t to) { return SYS4(mremap, at, from, to, MREMAP_MAYMOVE); }
static inline void sys_munmap(void *at, size_t size) { SYS2(munmap, at, size); }
#endif

__attribute__((noreturn)) static inline void sys_exit(int code)
{
	for (;;)
		SYS1(exit_group, code);
}

/* failed returns whether a system call returned an error. */
static inline bool failed(long result) { return result < 0 && result >= -4095; }

#endif
