// Package control is the protocol between the daemon and a launcher, over a unix
// stream socket pair that the launcher is born with.
//
// The daemon sends one Request at a time; the launcher answers with one Reply, for
// an exec with two: Exec when it runs, Exited when it has ended. Until it reads
// the second the daemon may send Kill.
//
// End of file is an order as well. A launcher that reads it while idle exits; while
// it launches, it destroys what there is of the container; while it execs, it kills
// the exec's processes. The turning point of a launch is the Reply: once that is
// sent, the container lives on whatever becomes of the daemon.
package control

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/rootfs"
	"berth/internal/trace"
	"berth/shim/ociruntime"
)

// The file descriptors a launcher is born with, besides stdio.
const (
	SocketFD  = 3 // its end of the socket pair
	MountNSFD = 4 // the daemon's mount namespace, where the monitor will live
	ExeFD     = 5 // the sealed copy of berth-shim it runs from
	FiltersFD = 6 // the table of seccomp filters of all launchers (package shim/launcher/filter)
)

// SlackEnv is set in a launcher's environment: package shim/launcher/sysmon looks for it before Go's runtime starts.
const SlackEnv = "BERTH_TIMER_SLACK"

// LogFormatEnv is "json" in the environment of a launcher whose daemon logs JSON.
const LogFormatEnv = "BERTH_LOG_FORMAT"

// Request is a message to the launcher. Exactly one field is set.
type Request struct {
	Launch *Launch `json:"launch,omitempty"`
	Exec   *Exec   `json:"exec,omitempty"`
	Kill   string  `json:"kill,omitempty"` // the ExecID of the exec whose processes are to be killed; nothing happens if it has ended
}

// Launch is shim.LaunchRequest with the pool's settings.
type Launch struct {
	StateRoot   string `json:"stateRoot"`
	MonitorPath string `json:"monitorPath"`

	ID            string      `json:"id"`
	Dir           string      `json:"dir"`
	Spec          *specs.Spec `json:"spec"`
	Rootfs        rootfs.Spec `json:"rootfs"`
	Volumes       []Volume    `json:"volumes,omitempty"`
	RootPlace     string      `json:"rootPlace,omitempty"`
	SystemdCgroup bool        `json:"systemdCgroup,omitempty"`
	Pause         bool        `json:"pause,omitempty"`
	BuiltIn       bool        `json:"builtIn,omitempty"`
	LogPath       string      `json:"logPath,omitempty"`
	LogDir        string      `json:"logDir,omitempty"`
	MaxLogLine    int         `json:"maxLogLine,omitempty"`
	Stdin         bool        `json:"stdin,omitempty"`
	StdinOnce     bool        `json:"stdinOnce,omitempty"`
	Terminal      bool        `json:"terminal,omitempty"`

	Runtime *ociruntime.Runtime `json:"runtime,omitempty"` // nil: libcontainer
}

// Volume is an image for the container to have as a volume (KEP-4639): like the root
// filesystem it is mounted in the launcher's mount namespace, and goes with the container.
type Volume struct {
	Path    string      `json:"path"`              // where it is mounted, below Dir; Source of its mounts in the spec
	Rootfs  rootfs.Spec `json:"rootfs"`            // without Upper: read-only
	SubPath string      `json:"subPath,omitempty"` // the file or directory of it that the container gets; empty: all
}

// Exec is shim.ExecRequest with the pool's settings. The files that come with it
// are those of Stdin, Stdout and Stderr that are true, in this order.
type Exec struct {
	StateRoot string         `json:"stateRoot"`
	ID        string         `json:"id"`
	ExecID    string         `json:"execID"`
	Process   *specs.Process `json:"process"`
	Stdin     bool           `json:"stdin,omitempty"`
	Stdout    bool           `json:"stdout,omitempty"`
	Stderr    bool           `json:"stderr,omitempty"`

	Runtime *ociruntime.Runtime `json:"runtime,omitempty"` // of the container; nil: libcontainer
	Dir     string              `json:"dir,omitempty"`     // the container's shim directory, for Runtime
}

// ExecName is what an exec's own cgroup is called, below its container's, and with a Runtime
// its directory in the shim directory.
func ExecName(execID string) string { return "exec-" + execID }

// ExecHierarchies are the hierarchies in one of which that cgroup is: "" is v2.
var ExecHierarchies = []string{"", "freezer", "pids"}

// Reply is a message from the launcher. Exactly one of Started, Exec, Exited and
// Error is set; Error ends the request.
type Reply struct {
	Started  *Started     `json:"started,omitempty"` // with the pidfd of the container's init
	Exec     *ExecStarted `json:"exec,omitempty"`    // with its pidfd; for a terminal the pty's master follows
	Exited   *Exited      `json:"exited,omitempty"`
	Error    *Error       `json:"error,omitempty"`
	Warnings []string     `json:"warnings,omitempty"` // what libcontainer had to say, for the daemon's log
}

// Started tells of a container that runs.
type Started struct {
	InitPID   int    `json:"initPID"`
	InitStart uint64 `json:"initStart"`
	ShimPID   int    `json:"shimPID"`
	ShimStart uint64 `json:"shimStart"`
	StartedAt int64  `json:"startedAt"`       // unix nanoseconds
	Again     bool   `json:"again,omitempty"` // the launcher waits for its next order; else it becomes the monitor, or ends

	Steps []trace.Step `json:"steps,omitempty"` // what its launch consisted of, one after the other
}

// ExecStarted tells of an exec that runs.
type ExecStarted struct {
	PID int `json:"pid"`
}

// Exited tells of the end of an exec.
type Exited struct {
	Code int32 `json:"code"` // exit code, or 128+signal
}

// Error is a failure with the code it has on the daemon's side. The launcher makes
// errors of this type and not of package errdefs, which would link gRPC and
// protobuf into every container's init and slow its start.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

// Code is a gRPC status code.
type Code uint32

// The codes that launchers give, with gRPC's numbers.
const (
	Canceled           Code = 1
	InvalidArgument    Code = 3
	FailedPrecondition Code = 9
	Internal           Code = 13
)

// Errorf returns an Error.
func Errorf(code Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (e *Error) Error() string { return e.Message }
