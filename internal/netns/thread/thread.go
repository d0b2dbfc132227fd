// Package thread runs functions in network namespaces. It links little, because each launcher of a
// container is a process that links it.
//
// # Contract
//
// A function runs on a locked thread, which returns to the scheduler only in its original
// namespace. So no other goroutine ever runs in a foreign namespace. Goroutines that the function
// starts do not run in the namespace.
package thread

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// In runs fn in the network namespace at path. Sockets that fn opens stay in that namespace. The
// error wraps fs.ErrNotExist if path does not exist, and EINVAL if it is not a network namespace.
// Otherwise it is fn's error.
func In(path string, fn func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close() // Close of a namespace cannot fail
	return Run(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}

// outcome is the result of a function, or what it panicked with.
type outcome struct {
	err      error
	panicked string // the panic's value and stack
}

// Run runs fn, which may change the network namespace, on a locked thread. If Run cannot restore
// the original namespace, it ends the thread, because Go ends the thread of a goroutine that
// returns locked. Restoring is better, because a process's main thread cannot end. If the main
// thread stayed in fn's namespace, /proc would show the whole process there. A panic of fn is
// passed to the caller.
func Run(fn func() error) error {
	done := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread()
		own, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- outcome{err: fmt.Errorf("open own network namespace: %w", err)}
			return
		}
		defer own.Close() // Close of a namespace cannot fail
		result := catch(fn)
		if e := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); e == nil {
			runtime.UnlockOSThread()
		}
		done <- result
	}()
	result := <-done
	if result.panicked != "" {
		panic(result.panicked)
	}
	return result.err
}

func catch(fn func() error) (result outcome) {
	defer func() {
		if p := recover(); p != nil {
			result.panicked = fmt.Sprintf("%v\n\nin another goroutine:\n%s", p, debug.Stack())
		}
	}()
	result.err = fn()
	return result
}
