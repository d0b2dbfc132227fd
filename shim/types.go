// Package shim starts containers and watches over them.
//
// A container is launched by berth-shim, a process of its own that links
// libcontainer (package shim/launcher). The launcher then replaces itself by
// execve with the monitor (package main in shim/monitor): same pid, same
// children, a fraction of the memory. This package is the daemon's side: a
// Launcher pool that starts launchers ahead of need, and a Monitor handle for
// talking to a running monitor, whether this daemon started it or an earlier one.
//
// # Contract
//
// Everything a monitor knows is in the container's shim directory (Dir), so a
// new daemon needs nothing else:
//
//	Dir/shim   "<shim pid> <shim starttime> <init pid> <init starttime> <started, unix ns>\n", init
//	           fields 0 until the container's init exists; replaced by rename. It is there before the
//	           launcher gets its order, and goes when the launcher has undone a launch that failed
//	Dir/sock   the monitor's unix socket: attach, log reopen, resize, close stdin
//	Dir/oci    how to call the runtime that made the container, if that was a program (JSON)
//	Dir/exit   the exit record, written by rename when init has ended and its output
//	           is on disk; after it the monitor exits
//
// The end of a container is the end of its monitor process (pidfd): then Dir/exit
// either exists, or the shim was lost.
package shim

import (
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/rootfs"
	"berth/shim/control"
	"berth/shim/ociruntime"
)

// LaunchRequest asks for one container (or pause) to be created and started.
type LaunchRequest struct {
	ID            string      // container or sandbox ID, also libcontainer's
	Dir           string      // the shim directory, exists, 0700, below the private state mount
	Spec          *specs.Spec // runtime-spec; Root.Path is set by the launcher
	Rootfs        rootfs.Spec // mounted by the launcher in its own mount namespace at Dir/rootfs
	Volumes       []Volume    // images mounted as volumes
	RootPlace     string      // an empty directory to mount it on instead, on a private mount; a container's root that is not the host's must be able to reach it
	SystemdCgroup bool        // cgroup driver
	Pause         bool        // a sandbox's pause: no monitor, no log, no socket
	BuiltIn       bool        // the pause is berth's own program (package payload)

	// Runtime makes the container; nil: libcontainer, in the launcher itself. The launcher
	// writes it down in Dir, see Destroy.
	Runtime *ociruntime.Runtime

	// For containers only.
	LogPath    string // CRI log file; empty: output is discarded (attach still sees it)
	LogDir     string // a directory on the way to it, below which no symbolic link is followed; empty: the file's own
	MaxLogLine int    // bytes of one log record's content before it is split as partial
	Stdin      bool   // keep stdin open for attach
	StdinOnce  bool   // close stdin when the first attached client that had stdin goes
	Terminal   bool   // a pty instead of pipes
}

// Volume is an image that the launcher mounts, in its own mount namespace, for mounts of the spec.
type Volume = control.Volume

// Started is what a successful launch returns. The caller owns the files.
type Started struct {
	InitPID       int
	InitStartTime uint64   // field 22 of /proc/PID/stat, clock ticks since boot
	Init          *os.File // pidfd of the container's init (or pause)
	StartedAt     time.Time

	// For containers only: the monitor, which was the launcher.
	ShimPID       int
	ShimStartTime uint64
	Shim          *os.File // pidfd
}

// Exit is the content of an exit record.
type Exit struct {
	Code      int32     // exit code, or 128+signal
	Signal    int       // 0 if it exited by itself
	OOMKilled bool      // the kernel's OOM killer killed a process of the container's cgroup
	At        time.Time // when init was reaped
}

// ExecRequest asks for one more process in a running container.
type ExecRequest struct {
	ID      string         // the container
	ExecID  string         // unique in the container; names the exec's own sub-cgroup, see control.ExecName
	Process *specs.Process // args, env, cwd, user, capabilities …, complete
	Stdin   *os.File       // nil: /dev/null; not used when Process.Terminal
	Stdout  *os.File       // nil: /dev/null
	Stderr  *os.File       // nil: /dev/null

	Runtime *ociruntime.Runtime // that the container was launched with
	Dir     string              // the container's shim directory; only needed with Runtime

	CgroupsPath   string // the container's, as in its spec: what a lost launcher leaves is found by it
	SystemdCgroup bool   // cgroup driver
}
