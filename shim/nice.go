package shim

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// background is the nice value at which launchers start and warm up ahead of need, so
// that they do not slow what is being launched. A launcher takes ours with its
// first order.
const background = 10

// ownNice returns this process's nice value. It is the calling thread's, really,
// but package os and we give none of ours another, lowPriority's apart.
func ownNice() (int, error) {
	prio, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	return 20 - prio, err // the system call's result is shifted, so as not to be negative
}

// mayRaise tells whether a process that has lowered its priority may raise it again
// to nice: that takes CAP_SYS_NICE. It tries on a thread that ends with it.
func mayRaise(nice int) bool {
	may := make(chan bool)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		may <- unix.Setpriority(unix.PRIO_PROCESS, 0, background) == nil && unix.Setpriority(unix.PRIO_PROCESS, 0, nice) == nil
	}()
	return <-may
}

// lowPriority gives the calling goroutine a thread of its own with a low
// priority, which children inherit.
func lowPriority() error {
	runtime.LockOSThread()
	return unix.Setpriority(unix.PRIO_PROCESS, 0, background)
}
