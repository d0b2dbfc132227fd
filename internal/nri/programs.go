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

// startLibrary starts the library's adaptation and adopts the programs that it launches. The
// library (0.12.5) waits only for programs that it stops. A program that exits before it registers
// would stay a zombie. A program that closes its connection early would run forever.
//
// The library does not report PIDs. The library launches the programs on the thread that calls
// Start, so they are the new children of this thread. The thread is locked, so it starts no
// children for other goroutines.
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
		p.cfg.Log.Warn("NRI: cannot find the processes of installed plugins; unregistered ones stay zombies", "error", err)
	}
	for _, pid := range after {
		if !slices.Contains(before, pid) {
			p.adopt(pid)
		}
	}
	return startErr
}

// childrenOfThread returns the unreaped children of the calling thread (CONFIG_PROC_CHILDREN).
func childrenOfThread() ([]int, error) {
	list, err := os.ReadFile("/proc/thread-self/children")
	if err != nil {
		return nil, fmt.Errorf("find processes of NRI plugins: %w", err)
	}
	var pids []int
	for _, field := range strings.Fields(string(list)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("find processes of NRI plugins: %w", err)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// adopt reaps a plugin's program when it exits, and kills it when p is closed. The library may reap
// the program first. adopt ignores that.
func (p *Plugins) adopt(pid int) {
	process, err := pidfd.Open(pid)
	if errors.Is(err, os.ErrProcessDone) {
		return // reaped by the library
	}
	if err != nil {
		p.cfg.Log.Warn("NRI: watch plugin process", "error", err)
		return
	}
	watch := func() {
		defer process.Close()
		if err := p.awaitProgram(process); err != nil {
			p.cfg.Log.Warn("NRI: wait for plugin process", "pid", pid, "error", err)
		}
	}
	if !p.own.Spawn(watch) { // Close was called meanwhile
		watch()
	}
}

// awaitProgram waits until a program has exited. When p is closed it kills the program.
func (p *Plugins) awaitProgram(process *os.File) error {
	if err := pidfd.Wait(p.own.Context(), process); p.own.Context().Err() == nil {
		return err
	}
	if err := pidfd.Signal(process, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return pidfd.Wait(ctx, process)
}
