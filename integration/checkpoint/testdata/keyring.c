/* keyring prints the serial number of its session keyring. */
#include <linux/keyctl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	for (;;) {
		printf("%ld\n", syscall(SYS_keyctl, KEYCTL_GET_KEYRING_ID, KEY_SPEC_SESSION_KEYRING, 0));
		fflush(stdout);
		usleep(20000);
	}
}
