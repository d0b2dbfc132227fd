#include "monitor.h"

int64_t now(int clock)
{
	struct __kernel_timespec t = {0};

	sys_clock_gettime(clock, &t); /* it fails only for unknown clocks */
	return t.tv_sec * SECOND + t.tv_nsec;
}

void sleep_for(int64_t nanoseconds)
{
	struct __kernel_timespec t = {.tv_sec = nanoseconds / SECOND, .tv_nsec = nanoseconds % SECOND};

	sys_nanosleep(&t); /* all callers check again after an interruption */
}
