/*
 * pause holds a pod's namespaces and, where the pod shares its PID namespace,
 * is process 1 there: it reaps orphans. It ends on SIGTERM and SIGINT.
 *
 * It needs no C library, so that a pod costs a few pages.
 */
#include <asm/signal.h>
#include <asm/unistd.h>

#define BIT(sig) (1UL << ((sig) - 1))
#define WNOHANG 1

static long syscall4(long nr, long a, long b, long c, long d)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	long ret;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10)
			 : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = nr;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
#else
#error "pause knows the system calls of x86_64 and aarch64 only"
#endif
}

__attribute__((noreturn, used)) void _start(void)
{
	/* Blocked signals wait for rt_sigtimedwait; process 1 gets them like any other. */
	unsigned long set = BIT(SIGTERM) | BIT(SIGINT) | BIT(SIGCHLD);
	long sig;

	syscall4(__NR_rt_sigprocmask, SIG_BLOCK, (long)&set, 0, sizeof(set));
	do {
		while (syscall4(__NR_wait4, -1, 0, WNOHANG, 0) > 0)
			;
		sig = syscall4(__NR_rt_sigtimedwait, (long)&set, 0, 0, sizeof(set));
	} while (sig != SIGTERM && sig != SIGINT);

	for (;;)
		syscall4(__NR_exit_group, 0, 0, 0, 0);
}
