package launcher

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/opencontainers/runc/libcontainer/specconv"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/shim/proto"
)

// serveInspect answers what a container would get from this launcher.
func (l *launcher) serveInspect(r *proto.Inspect) error {
	answer, err := l.inspect(r)
	if err != nil {
		return l.reply(proto.Reply{Error: toReply(err)})
	}
	return l.reply(proto.Reply{Inspected: answer})
}

func (l *launcher) inspect(r *proto.Inspect) (*proto.Inspected, error) {
	answer := new(proto.Inspected)
	for _, name := range slices.Sorted(maps.Keys(rlimits)) {
		var limit unix.Rlimit
		if err := unix.Getrlimit(rlimits[name], &limit); err != nil {
			return nil, fmt.Errorf("read %s: %w", name, os.NewSyscallError("getrlimit", err))
		}
		answer.Rlimits = append(answer.Rlimits, specs.POSIXRlimit{Type: name, Soft: limit.Cur, Hard: limit.Max})
	}
	if r.Seccomp == nil {
		return answer, nil
	}
	profile, err := specconv.SetupSeccomp(r.Seccomp)
	if err != nil {
		return nil, proto.Errorf(proto.InvalidArgument, "seccomp profile: %v", err)
	}
	if profile == nil { // it allows everything
		return answer, nil
	}
	if answer.Seccomp, err = l.filters.Filters(profile); err != nil {
		return nil, err
	}
	if answer.Seccomp == nil {
		return nil, proto.Errorf(proto.FailedPrecondition, "the seccomp profile cannot be compiled here")
	}
	return answer, nil
}
