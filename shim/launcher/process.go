package launcher

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"berth/shim/launcher/bpfcache"
	"berth/shim/proto"
)

// passFilter adds the container's seccomp filter to a process that is about to start.
func (l *launcher) passFilter(p *libcontainer.Process, config *configs.Config) error {
	err := l.filters.Pass(p, config)
	if errors.Is(err, bpfcache.ErrNoJoint) {
		return proto.Errorf(proto.FailedPrecondition, "%v", err)
	}
	if denied := (*bpfcache.Denied)(nil); errors.As(err, &denied) || errors.Is(err, bpfcache.ErrArgument) {
		return proto.Errorf(proto.InvalidArgument, "%v", err)
	}
	return err
}

// initLogLevel is the log level of libcontainer's init, the same as collectWarnings'. If no level
// is set, its C code sends some 25 debug lines, which the launcher would parse and discard.
var initLogLevel = strconv.Itoa(int(logrus.WarnLevel))

// newProcess converts a runtime-spec process to libcontainer's.
func newProcess(p *specs.Process) (*libcontainer.Process, error) {
	if p == nil || len(p.Args) == 0 {
		return nil, proto.Errorf(proto.InvalidArgument, "there is no command to run")
	}
	lp := &libcontainer.Process{
		Args:            p.Args,
		Env:             p.Env,
		Cwd:             p.Cwd,
		UID:             int(p.User.UID),
		GID:             int(p.User.GID),
		Label:           p.SelinuxLabel,
		AppArmorProfile: p.ApparmorProfile,
		NoNewPrivileges: &p.NoNewPrivileges,
		Scheduler:       p.Scheduler,
		IOPriority:      p.IOPriority,
		LogLevel:        initLogLevel,
	}
	for _, g := range p.User.AdditionalGids {
		lp.AdditionalGroups = append(lp.AdditionalGroups, int(g))
	}
	if s := p.ConsoleSize; s != nil {
		lp.ConsoleWidth, lp.ConsoleHeight = uint16(s.Width), uint16(s.Height)
	}
	if c := p.Capabilities; c != nil {
		lp.Capabilities = &configs.Capabilities{
			Bounding:    c.Bounding,
			Effective:   c.Effective,
			Inheritable: c.Inheritable,
			Permitted:   c.Permitted,
			Ambient:     c.Ambient,
		}
	}
	for _, r := range p.Rlimits {
		kind, ok := rlimits[r.Type]
		if !ok {
			return nil, proto.Errorf(proto.InvalidArgument, "unknown resource limit %q", r.Type)
		}
		lp.Rlimits = append(lp.Rlimits, configs.Rlimit{Type: kind, Hard: r.Hard, Soft: r.Soft})
	}
	var err error
	if lp.CPUAffinity, err = configs.ConvertCPUAffinity(p.ExecCPUAffinity); err != nil {
		return nil, fmt.Errorf("CPU affinity: %w", err)
	}
	return lp, nil
}

var rlimits = map[string]int{
	"RLIMIT_AS":         unix.RLIMIT_AS,
	"RLIMIT_CORE":       unix.RLIMIT_CORE,
	"RLIMIT_CPU":        unix.RLIMIT_CPU,
	"RLIMIT_DATA":       unix.RLIMIT_DATA,
	"RLIMIT_FSIZE":      unix.RLIMIT_FSIZE,
	"RLIMIT_LOCKS":      unix.RLIMIT_LOCKS,
	"RLIMIT_MEMLOCK":    unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE":   unix.RLIMIT_MSGQUEUE,
	"RLIMIT_NICE":       unix.RLIMIT_NICE,
	"RLIMIT_NOFILE":     unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC":      unix.RLIMIT_NPROC,
	"RLIMIT_RSS":        unix.RLIMIT_RSS,
	"RLIMIT_RTPRIO":     unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME":     unix.RLIMIT_RTTIME,
	"RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING,
	"RLIMIT_STACK":      unix.RLIMIT_STACK,
}
