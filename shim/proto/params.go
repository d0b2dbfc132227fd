package proto

import (
	"os"
	"strconv"
	"syscall"
)

// IgnoredSignals are ignored by the monitor. A launcher that becomes a monitor ignores them, too,
// after its container's init has started with its own signal settings.
var IgnoredSignals = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
	syscall.SIGALRM, syscall.SIGVTALRM, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU,
	syscall.SIGXCPU, syscall.SIGXFSZ, syscall.SIGIO, syscall.SIGPWR,
}

// MonitorParams are the parameters of a monitor. File descriptors that it does not have are -1.
type MonitorParams struct {
	ID        string // the container, for people who read ps
	Dir       string // the shim directory
	LogPath   string // for reopening; empty: no log
	LogDir    string // a parent of LogPath; symbolic links below it are refused
	MaxLine   int    // bytes of one log record's content
	InitPID   int    // the container's init, the monitor's child unless there is a Gate
	StdinOnce bool   // close stdin when the first client that attached stdin disconnects
	Orphans   bool   // orphans of the container become this process's children, because it runs in the host's PID namespace
	KillDir   string // cgroup directory whose processes the monitor kills after init's end; empty, if the kernel kills them

	Init      int // pidfd of InitPID
	Listen    int // listening socket, Dir/sock
	Log       int // the log file, append mode
	Stdin     int // write end of the container's stdin; the same as Console with a terminal
	Stdout    int // read ends of its output
	Stderr    int
	Console   int // pty master, instead of Stdout and Stderr
	Verdict   int // pipe with the container's exit status, if it differs from Init's; see ociruntime.Waiter
	OOM       int // memory.events (v2) or memory.oom_control (v1)
	OOMNotify int // v1: eventfd that becomes readable when OOM has changed
	OOMParent int // v2: memory.events of the parent cgroup, which also counts this one's kills and outlives it
	Gate      int // pipe from a launcher that lasts: a byte starts the monitor, its end ends it
}

// field is one parameter: its name on the command line and its place. Exactly one of text, number
// and flag is set.
type field struct {
	name   string
	text   *string
	number *int
	flag   *bool
}

func (p *MonitorParams) fields() []field {
	return []field{
		{name: "id", text: &p.ID},
		{name: "dir", text: &p.Dir},
		{name: "log-dir", text: &p.LogDir},
		{name: "log-path", text: &p.LogPath},
		{name: "max-line", number: &p.MaxLine},
		{name: "init", number: &p.InitPID},
		{name: "stdin-once", flag: &p.StdinOnce},
		{name: "orphans", flag: &p.Orphans},
		{name: "kill-dir", text: &p.KillDir},
		{name: "init-fd", number: &p.Init},
		{name: "listen-fd", number: &p.Listen},
		{name: "log-fd", number: &p.Log},
		{name: "stdin-fd", number: &p.Stdin},
		{name: "stdout-fd", number: &p.Stdout},
		{name: "stderr-fd", number: &p.Stderr},
		{name: "console-fd", number: &p.Console},
		{name: "verdict-fd", number: &p.Verdict},
		{name: "oom-fd", number: &p.OOM},
		{name: "oom-notify-fd", number: &p.OOMNotify},
		{name: "oom-parent-fd", number: &p.OOMParent},
		{name: "gate-fd", number: &p.Gate},
	}
}

// FDs returns the file descriptors that the monitor inherits.
func (p *MonitorParams) FDs() []int {
	var fds []int
	for _, fd := range []int{p.Init, p.Listen, p.Log, p.Stdin, p.Stdout, p.Stderr, p.Console, p.Verdict, p.OOM,
		p.OOMNotify, p.OOMParent, p.Gate} {
		if fd >= 0 {
			fds = append(fds, fd)
		}
	}
	return fds
}

// Args returns the command line, without the program's name. The monitor requires every parameter,
// in this order.
func (p *MonitorParams) Args() []string {
	var args []string
	for _, f := range p.fields() {
		args = append(args, f.name+"="+f.value())
	}
	return args
}

func (f field) value() string {
	switch {
	case f.text != nil:
		return *f.text
	case f.number != nil:
		return strconv.Itoa(*f.number)
	}
	return strconv.FormatBool(*f.flag)
}
