package debug

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"berth/cmd/berthd/exporter"
)

// daemonPID returns the process that listens on the debug socket. The kernel answers, so this works
// for a daemon that hangs.
func (n *node) daemonPID(ctx context.Context) (int, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(n.cfg.State, exporter.DebugSocket))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}

// daemonProcess returns the kernel's view of the daemon: memory, limits, descriptors, and where its
// threads wait. It does not read the environment.
func (n *node) daemonProcess(ctx context.Context) (clean, error) {
	pid, err := n.daemonPID(ctx)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	paths := []string{dir + "/status", dir + "/limits", dir + "/cgroup", dir + "/smaps_rollup", dir + "/oom_score_adj"}
	for _, name := range []string{"comm", "wchan", "stack"} {
		threads, err := filepath.Glob(dir + "/task/*/" + name)
		if err != nil {
			return nil, err
		}
		paths = append(paths, threads...)
	}
	content, err := n.files(asIs, paths...)(ctx)
	b := bytes.NewBuffer(content)
	fmt.Fprintf(b, "==> descriptors of process %d\n", pid)
	links, listErr := os.ReadDir(dir + "/fd")
	for _, l := range links {
		if target, err := os.Readlink(filepath.Join(dir, "fd", l.Name())); err == nil {
			fmt.Fprintln(b, l.Name(), n.mask.text(target))
		}
	}
	return b.Bytes(), errors.Join(err, listErr)
}

// processes lists the processes of the node by name and state. A process can take any name.
func (n *node) processes(context.Context) (clean, error) {
	paths, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString("PID (NAME) STATE PPID WCHAN\n")
	for _, path := range paths {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // the process has exited
		}
		begin, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
		fields := strings.Fields(string(stat[end+1:]))
		if begin < 0 || end < begin || len(fields) < 2 {
			continue
		}
		wchan, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "wchan")) // needs CONFIG_KALLSYMS
		name := n.mask.text(string(stat[begin+1 : end]))
		fmt.Fprintf(&b, "%s(%s) %s %s %s\n", stat[:begin], name, fields[0], fields[1], wchan)
	}
	return b.Bytes(), nil
}

// cgroupFiles are the files of a cgroup that show its limits and usage, for version 2 and 1.
var cgroupFiles = []string{
	"memory.current", "memory.max", "memory.high", "memory.events", "memory.pressure", "pids.current", "pids.max",
	"cpu.max", "cpu.stat", "cpu.pressure", "io.pressure", "cgroup.events", "cgroup.controllers",
	"memory.usage_in_bytes", "memory.limit_in_bytes", "memory.failcnt", "cpu.cfs_quota_us",
}

// cgroups returns the limits and the usage of the daemon's cgroups.
func (n *node) cgroups(ctx context.Context) (clean, error) {
	pid, err := n.daemonPID(ctx)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	b := bytes.NewBufferString(n.mask.text(string(content)))
	for line := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) < 3 {
			continue
		}
		for _, name := range cgroupFiles {
			path := filepath.Join("/sys/fs/cgroup", fields[1], fields[2], name)
			if addErr := n.addFile(b, path, asIs); !errors.Is(addErr, fs.ErrNotExist) {
				err = errors.Join(err, addErr)
			}
		}
	}
	return b.Bytes(), err
}
