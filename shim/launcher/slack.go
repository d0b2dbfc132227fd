package launcher

// Timer slack reduces the CPU time of the monitor thread of Go's runtime, in launchers and in inits
// of containers.
//
// That thread (sysmon in Go's runtime/proc.go) sleeps for only 20 µs at a time while the program
// works, even in a system call. init has one P, because libcontainer sets GOMAXPROCS=1. In init the
// thread takes the P from each longer system call and wakes another thread, which has no work. An
// exec then takes 1.2 times the CPU time.
//
// slack.c lengthens these sleeps to two milliseconds. It sets the timer slack of the process's
// first thread (prctl(2), PR_SET_TIMERSLACK) before Go's runtime starts, and the runtime's threads
// inherit it. A goroutine may wait twice as long for a P that is blocked in a system call. So init
// must not need a second goroutine while it reads, and a launcher has at least two Ps.
//
// No other program gets this slack, not even as its default, because a thread calls restoreSlack
// before it starts a process or executes a program. The monitor is an exception, because it starts
// no programs.

// #cgo LDFLAGS: -Wl,--wrap=nsexec
// #include "slack.h"
import "C"

import (
	"os"
	"runtime"

	_ "github.com/opencontainers/runc/libcontainer/nsenter" // calls nsexec
)

// restoreSlack restores the calling thread's timer slack of the process's start.
func restoreSlack() error {
	if status, err := C.slack_restore(); status != 0 {
		return os.NewSyscallError("prctl(PR_SET_TIMERSLACK)", err)
	}
	return nil
}

// withSlackRestored calls do, which may start processes, on a thread with the restored slack.
// Goroutines need it, except the one that handles a request.
func withSlackRestored(do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := restoreSlack(); err != nil {
		return err
	}
	return do()
}
