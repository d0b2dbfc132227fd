package nri

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
)

// startLibrary starts the library's adaptation and takes on the programs that it launches. The library (0.12.5) waits
// for those only that it stops by itself: one that ends before it registers would stay a zombie, and one that
// closes its connection before would stay for good.
//
// It tells nobody their pids. But it launches them on the thread that Start runs on, so they are what that
// thread has more children afterwards: no other goroutine runs on a locked thread. Nobody else's child is touched.
func (p *Plugins) startLibrary() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := childrenOfThread()
	startErr := p.adaptation.Start()
	var after []int
	if err == nil {
		after, err = childrenOfThread()
	}
	if err != nil {
		p.cfg.Log.Warn("NRI: installed plugins that do not register are not reaped", "error", err)
	}
	for _, pid := range after {
		if !slices.Contains(before, pid) {
			p.adopt(pid)
		}
	}
	return startErr
}

// childrenOfThread returns the processes that the calling thread has started and nobody has reaped yet (CONFIG_PROC_CHILDREN).
func childrenOfThread() ([]int, error) {
	list, err := os.ReadFile("/proc/thread-self/children")
	if err != nil {
		return nil, fmt.Errorf("find the programs of plugins: %w", err)
	}
	var pids []int
	for _, field := range strings.Fields(string(list)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("find the programs of plugins: %w", err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// adopt reaps a plugin's program when it ends, and ends it with p. The library may reap it first, or find that it is
// reaped: either is content.
func (p *Plugins) adopt(pid int) {
	process, err := pidfd.Open(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return // reaped by the library
	}
	if err != nil {
		p.cfg.Log.Warn("NRI: watch the program of a plugin", "error", err)
		return
	}
	watch := func() {
		defer process.Close()
		if err := p.awaitProgram(process); err != nil {
			p.cfg.Log.Warn("NRI: the program of a plugin", "pid", pid, "error", err)
		}
	}
	if !p.own.Spawn(watch) { // Close was called meanwhile
		watch()
	}
}

// awaitProgram returns when a program has ended. It is killed when p is closed.
func (p *Plugins) awaitProgram(process *os.File) error {
	if err := pidfd.Wait(p.own.Context(), process); p.own.Context().Err() == nil {
		return err
	}
	if err := pidfd.Signal(process, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
	defer cancel()
	return pidfd.Wait(ctx, process)
}
