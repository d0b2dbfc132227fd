#include <asm/signal.h>
#include <linux/prctl.h>

#include "monitor.h"

static struct monitor monitor;

#define BIT(sig) (1UL << ((sig)-1))

/*
 * ignore_signals ignores signals that end or stop a process, except SIGKILL, SIGSTOP and signals
 * about faults. Stopping the daemon's service or closing a terminal must not affect a container.
 * The launcher ignored the same signals. SIGCHLD is blocked; a signalfd reports it (events.c).
 */
static void ignore_signals(void)
{
	const unsigned long faults =
		BIT(SIGILL) | BIT(SIGTRAP) | BIT(SIGABRT) | BIT(SIGBUS) | BIT(SIGFPE) | BIT(SIGSEGV) | BIT(SIGSYS);
	const unsigned long children = BIT(SIGCHLD);

	for (int sig = 1; sig <= 64; sig++) {
		struct sigaction action = {.sa_handler = SIG_IGN};

		if (sig == SIGKILL || sig == SIGSTOP)
			continue;
		/* Ignoring it would discard the children's exit codes. */
		if (sig == SIGCHLD || (faults & BIT(sig)) != 0)
			action.sa_handler = SIG_DFL;
		SYS4(rt_sigaction, sig, &action, 0, sizeof(children));
	}
	SYS4(rt_sigprocmask, SIG_SETMASK, &children, 0, sizeof(children));
}

static void complain(const char *what, long result)
{
	char text[256];
	struct line l = {.at = text, .cap = sizeof(text)};

	line_text(&l, "berth-monitor: ");
	line_text(&l, what);
	if (result < 0) {
		line_text(&l, ": ");
		line_error(&l, (int)-result);
	}
	line_text(&l, "\n");
	sys_write(2, l.at, l.len);
}

/* pass_gate waits until the launcher lets the monitor begin. It returns false if the launch was
 * undone or the launcher has ended. */
static bool pass_gate(int gate)
{
	char byte;
	long n;

	if (gate < 0)
		return true; /* this process was the launcher */
	do
		n = sys_read(gate, &byte, 1);
	while (n == -EINTR);
	sys_close(gate);
	return n == 1;
}

static int monitor_main(int argc, char **argv)
{
	struct params p;
	long result;

	ignore_signals();
	/* Huge pages would round up the buffers. */
	SYS4(prctl, PR_SET_THP_DISABLE, 1, 0, 0);
	REACH("monitor.started");
	if (argc < 1 || !params_parse(&p, argc - 1, argv + 1)) {
		complain("the command line is not a launcher's", 0);
		return 1;
	}
	if (!pass_gate(p.gate))
		return 1;
	result = monitor_init(&monitor, &p);
	if (result < 0) {
		/* If there is no monitor, no process logs, reaps or reports, so the container is ended. */
		SYS4(pidfd_send_signal, p.init, SIGKILL, 0, 0);
		complain("take over from the launcher", result);
		return 1;
	}
	return monitor_run(&monitor);
}

#ifdef HOSTED

/* The monitor frees buffers as soon as they are empty. The kernel frees the rest at its end. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=1:detect_leaks=0"; }

int main(int argc, char **argv, char **environment)
{
	(void)environment;
#ifdef FAILPOINTS
	failpoint_init(argv[0], environment);
#endif
	return monitor_main(argc, argv);
}

#else

/* start gets the stack as the kernel has prepared it: argc, argv, NULL, environment, NULL. */
__attribute__((noreturn, used)) void start(long *stack)
{
	int argc = (int)stack[0];
	char **argv = (char **)(stack + 1);

#ifdef FAILPOINTS
	failpoint_init(argv[0], argv + argc + 1);
#endif
	sys_exit(monitor_main(argc, argv));
}

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall start\n");
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n\tb start\n");
#endif

#endif
