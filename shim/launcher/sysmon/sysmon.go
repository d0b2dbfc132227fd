// Package sysmon keeps the monitor thread of Go's runtime from taking a part of what launchers and containers' inits do.
//
// That thread (sysmon in Go's runtime/proc.go) sleeps for 20 µs at a time while the program works, also while that is in a system call. It took a
// fifth of what a launcher did for an exec. Init, which has one P (libcontainer sets GOMAXPROCS=1), loses that in each system call that
// lasts longer to another thread, which is woken, finds nothing to do and sleeps again.
//
// A program that imports this package has it sleep for half a millisecond, in a launcher and in init: the timer slack (prctl(2),
// PR_SET_TIMERSLACK) of the process's first thread is set before Go's runtime starts, and inherited by the threads that are started then.
// For so long a goroutine may wait for the P of one in a system call, where all are, which is seldom there.
//
// # Contract
//
// Nothing that is executed but the monitor, which starts nothing, has that slack, nor has it for its default: a process is started, and a program
// executed, by a thread that has called [Restore].
package sysmon

// #cgo LDFLAGS: -Wl,--wrap=nsexec
// #include "slack.h"
import "C"

import (
	"os"
	"runtime"

	_ "github.com/opencontainers/runc/libcontainer/nsenter" // calls nsexec
)

// Restore gives the calling thread the timer slack that the process was started with.
func Restore() error {
	if status, err := C.sysmon_slack_back(); status != 0 {
		return os.NewSyscallError("prctl(PR_SET_TIMERSLACK)", err)
	}
	return nil
}

// WithRestored calls do, which may start processes, on a thread that has called [Restore]. That is for goroutines other than the one whose thread is
// restored already.
func WithRestored(do func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := Restore(); err != nil {
		return err
	}
	return do()
}
