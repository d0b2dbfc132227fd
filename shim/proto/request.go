package proto

import (
	"errors"
	"fmt"
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/rootfs"
	"berth/internal/trace"
	"berth/shim/ociruntime"
)

// The file descriptors that a launcher inherits, besides stdio.
const (
	SocketFD  = 3 // its end of the socket pair
	MountNSFD = 4 // the daemon's mount namespace, where the monitor will run
	ExeFD     = 5 // the sealed copy of berth-shim that it executes
	FiltersFD = 6 // the seccomp filters that all launchers share
)

// The file descriptors that a monitor of a container on incomplete layers holds open, besides its
// own (MonitorParams): the files of rootfs.Spec.Keep. A launcher has them at these numbers, too.
// Neither process uses them. A later daemon gets them by pidfd_getfd(2), see shim.KeptFiles. The
// processes of the container do not inherit them.
const (
	FirstKeptFD = 200
	KeptFDs     = 2
)

// SlackEnv is set in a launcher's environment. C code reads it before Go's runtime starts (package
// shim/launcher/slack.c).
const SlackEnv = "BERTH_TIMER_SLACK"

// LauncherCommand is the first argument of berth-shim in a launcher.
const LauncherCommand = "launcher"

// LauncherSettings are the daemon's settings for a launcher. It gets them as arguments.
type LauncherSettings struct {
	StateRoot   string // libcontainer's state, a directory per container
	MonitorPath string // the monitor's executable
	LogFormat   string // of the lines that a launcher logs itself: "json", otherwise text
}

// Args returns the arguments that start a launcher with these settings.
func (s LauncherSettings) Args() []string {
	return []string{LauncherCommand, s.StateRoot, s.MonitorPath, s.LogFormat}
}

// RaiseLastPID is the first argument of berth-shim when a launcher runs it to reserve process IDs.
const RaiseLastPID = "raise-last-pid"

// ReplaceProc is the first argument of berth-shim when a launcher runs it to mount the proc
// filesystem of a restored container.
const ReplaceProc = "replace-proc"

// ParseLauncherArgs returns the settings that Args has encoded.
func ParseLauncherArgs(args []string) (LauncherSettings, error) {
	if len(args) != 4 || args[0] != LauncherCommand {
		return LauncherSettings{}, errors.New("berth starts berth-shim; it does not work by hand")
	}
	return LauncherSettings{StateRoot: args[1], MonitorPath: args[2], LogFormat: args[3]}, nil
}

// Request is a message to a launcher. Exactly one field is set.
//
// The daemon sends one request at a time. The launcher answers with one Reply. It answers an Exec
// with two: Reply.Exec when the process runs, and Reply.Exited when it has ended. The daemon may
// send Kill until it reads the second.
//
// The end of the connection cancels the request. An idle launcher exits. During a launch the
// launcher destroys the container. During an exec it kills the exec's processes. After the reply to
// a launch the container is independent of the daemon.
type Request struct {
	Launch *Launch `json:"launch,omitempty"`
	Exec   *Exec   `json:"exec,omitempty"`
	Kill   string  `json:"kill,omitempty"` // ExecID of the exec to kill; ignored when it has ended

	Dump    *Dump `json:"dump,omitempty"`
	DumpNow bool  `json:"dumpNow,omitempty"` // the container is frozen
}

// Launch asks a launcher to create and start one container or pause.
type Launch struct {
	ID        string      `json:"id"`                  // container or sandbox ID, also libcontainer's
	Dir       string      `json:"dir"`                 // the shim directory: exists, mode 0700, below the private state mount
	Spec      *specs.Spec `json:"spec"`                // the launcher sets Root.Path
	Rootfs    rootfs.Spec `json:"rootfs"`              // mounted in the launcher's own mount namespace at Dir/rootfs
	Volumes   []Volume    `json:"volumes,omitempty"`   // images mounted as volumes
	RootPlace string      `json:"rootPlace,omitempty"` // mount point instead of Dir/rootfs: an empty directory on a private mount that the root of a user namespace can reach

	SystemdCgroup bool                `json:"systemdCgroup,omitempty"` // cgroup driver
	Restore       *Restore            `json:"restore,omitempty"`       // the checkpoint that the container continues; nil: it starts anew
	Pause         PauseKind           `json:"pause,omitempty"`         // a sandbox's pause: no monitor, no log, no socket; empty: a container
	Runtime       *ociruntime.Runtime `json:"runtime,omitempty"`       // the OCI runtime that makes the container, recorded in Dir; nil: libcontainer, in the launcher

	// Lasts says that the launcher serves again after the launch. It needs Linux 6.15, libcontainer
	// and a PID namespace other than the host's.
	Lasts bool `json:"lasts,omitempty"`

	// For containers only.
	LogPath    string `json:"logPath,omitempty"`    // CRI log file; empty: output goes to attached clients only
	LogDir     string `json:"logDir,omitempty"`     // a parent of LogPath; symbolic links below it are refused; empty: the direct parent
	MaxLogLine int    `json:"maxLogLine,omitempty"` // maximum bytes of a log record's content; longer lines are split as partial
	Stdin      bool   `json:"stdin,omitempty"`      // keep stdin open for attach
	StdinOnce  bool   `json:"stdinOnce,omitempty"`  // close stdin when the first client that attached stdin disconnects
	Terminal   bool   `json:"terminal,omitempty"`   // a pty instead of pipes

	// Keep are the files to hold open at FirstKeptFD and after it. PassFiles sets Kept from the
	// files of the root filesystems, and TakeFiles sets Keep.
	Keep []*os.File `json:"-"`
	Kept bool       `json:"kept,omitempty"`
}

// Restore is the checkpoint from which a launcher makes a container. The Spec is the same as for a
// new container. The processes, open files and memory come from the checkpoint.
//
// If the Runtime is sandboxed, it is the checkpoint of the whole sandbox. The sandbox's pause and
// its container are restored. No process runs before the container is restored.
type Restore struct {
	CRIU    string        `json:"criu,omitempty"` // path of the program; empty with a Runtime
	Images  string        `json:"images"`         // directory with the images; the launcher does not change it
	Timeout time.Duration `json:"limit"`          // of the restore; it is cancelled then
	// directories like Images, of containers that may be restored into the same PID namespace later
	Pending []string `json:"pending,omitempty"`
}

// Volume is an image that the launcher mounts as a volume of the container (KEP-4639). Like the
// root filesystem it is mounted in the launcher's own mount namespace.
type Volume struct {
	Path    string      `json:"path"`              // mount point below Dir; the source of its mounts in the spec
	Rootfs  rootfs.Spec `json:"rootfs"`            // without Upper: read-only
	SubPath string      `json:"subPath,omitempty"` // the file or directory in the image that the container gets; empty: all
}

// Exec asks a launcher to start one more process in a running container.
type Exec struct {
	ID      string         `json:"id"`      // the container
	ExecID  string         `json:"execID"`  // unique in the container; see ExecName
	Process *specs.Process `json:"process"` // complete: arguments, environment, directory, user, capabilities

	// The process's streams. A nil stream is /dev/null. If Process.Terminal is set, no stream is
	// used. The streams are sent beside the message, see PassFiles.
	Stdin  *os.File `json:"-"`
	Stdout *os.File `json:"-"`
	Stderr *os.File `json:"-"`
	Passed Streams  `json:"passed,omitempty"` // the streams whose files come with the message

	// Keep are the files to hold open while the process runs, as in Launch. There are none or
	// KeptFDs of them.
	Keep []*os.File `json:"-"`
	Kept bool       `json:"kept,omitempty"` // the files of Keep come with the message

	Runtime *ociruntime.Runtime `json:"runtime,omitempty"` // the container's; nil: libcontainer
	Dir     string              `json:"dir,omitempty"`     // the container's shim directory; needed with Runtime only

	// The daemon kills the remains of a lost launcher in this cgroup. It is not sent.
	CgroupsPath   string `json:"-"` // as in the container's spec
	SystemdCgroup bool   `json:"-"` // cgroup driver
}

// ExecName returns the name of an exec's own cgroup below the container's. With a Runtime it is
// also the name of the exec's directory in the shim directory.
func ExecName(execID string) string { return "exec-" + execID }

// ExecHierarchies are the cgroup hierarchies that may hold an exec's own cgroup, in order of
// preference. An exec has one cgroup. The empty name is cgroup v2.
var ExecHierarchies = []string{"", "freezer", "pids"}

// Reply is a message from a launcher. Exactly one of Started, Exec, Exited and Error is set. Error
// ends the request.
type Reply struct {
	Started  *Started     `json:"started,omitempty"` // with the pidfds of init and the monitor
	Exec     *ExecStarted `json:"exec,omitempty"`    // with the process's pidfd and, for a terminal, the pty's master
	Exited   *Exited      `json:"exited,omitempty"`
	Dump     *Dumped      `json:"dump,omitempty"`
	Error    *Error       `json:"error,omitempty"`
	Warnings []string     `json:"warnings,omitempty"` // from libcontainer, for the daemon's log
}

// Started reports a running container or pause. The caller of Launchers.Launch owns the files.
type Started struct {
	PIDs

	Init *os.File `json:"-"` // pidfd of the container's init, or of pause
	Shim *os.File `json:"-"` // pidfd of the monitor; nil for a pause

	Again bool         `json:"again,omitempty"` // the launcher waits for its next request
	Steps []trace.Step `json:"steps,omitempty"` // the parts of the launch, for traces
}

// ExecStarted reports that an exec runs.
type ExecStarted struct {
	PID int `json:"pid"`
}

// Exited reports the end of an exec.
type Exited struct {
	Code int32 `json:"code"` // exit code, or 128+signal
}

// Error is a failure with its code in the daemon. Launchers do not use package errdefs, because it
// would link gRPC and protobuf into every container's init and slow its start.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
}

// Code is a gRPC status code.
type Code uint32

// The codes that launchers return, with gRPC's numbers.
const (
	Canceled           Code = 1
	InvalidArgument    Code = 3
	ResourceExhausted  Code = 8
	FailedPrecondition Code = 9
	Internal           Code = 13
)

// Errorf returns an Error.
func Errorf(code Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func (e *Error) Error() string { return e.Message }
