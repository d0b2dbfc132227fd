package launcher

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/capability"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/internal/pidfd"
	"berth/shim/launcher/criuimages"
	"berth/shim/proto"
)

// procStatus is the part of /proc/PID/status that describes the rights of a thread.
type procStatus struct {
	state      string // one letter
	tracer     int
	uids, gids []uint32 // real, effective, saved, filesystem
	groups     []uint32
	caps       map[string]uint64 // by field: CapInh, CapPrm, CapEff, CapBnd, CapAmb
	noNewPrivs bool
	seccomp    int // mode
	filters    int // number of seccomp filters; -1: before Linux 5.9
	inside     int // thread's ID in its PID namespace
	leader     int // the same of the process's first thread
}

// capFields are the capability sets of a thread.
var capFields = []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}

func readStatus(path string) (*procStatus, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseStatus(string(data))
}

// parseStatus refuses a status that lacks a field.
func parseStatus(text string) (*procStatus, error) {
	fields := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			fields[name] = strings.TrimSpace(value)
		}
	}
	var problems []error
	number := func(name, value string, base, bits int) uint64 {
		n, err := strconv.ParseUint(value, base, bits)
		if err != nil {
			problems = append(problems, fmt.Errorf("%s of a process: %w", name, err))
		}
		return n
	}
	list := func(name string) (ids []uint32) {
		for _, f := range strings.Fields(fields[name]) {
			ids = append(ids, uint32(number(name, f, 10, 32)))
		}
		return ids
	}
	last := func(name string) int {
		all := strings.Fields(fields[name])
		if len(all) == 0 {
			problems = append(problems, fmt.Errorf("%s of a process is missing", name))
			return 0
		}
		return int(number(name, all[len(all)-1], 10, 31))
	}
	s := &procStatus{
		tracer:     int(number("TracerPid", fields["TracerPid"], 10, 31)),
		uids:       list("Uid"),
		gids:       list("Gid"),
		groups:     list("Groups"),
		caps:       map[string]uint64{},
		noNewPrivs: number("NoNewPrivs", fields["NoNewPrivs"], 10, 8) == 1,
		seccomp:    int(number("Seccomp", fields["Seccomp"], 10, 8)),
		filters:    -1,
		inside:     last("NSpid"),
		leader:     last("NStgid"),
	}
	if count, has := fields["Seccomp_filters"]; has {
		s.filters = int(number("Seccomp_filters", count, 10, 31))
	}
	s.state, _, _ = strings.Cut(fields["State"], " ")
	for _, name := range capFields {
		s.caps[name] = number(name, fields[name], 16, 64)
	}
	if len(s.uids) != 4 || len(s.gids) != 4 || s.state == "" {
		problems = append(problems, errors.New("the status of a process is incomplete"))
	}
	return s, errors.Join(problems...)
}

// limits are the rights that a spec gives to the processes of a container, at most.
type limits struct {
	uid, gid           uint32
	groups             []uint32 // supplementary ones
	anyUser, anyGroup  bool     // they may have changed their IDs
	capable            bool     // the spec limits capabilities
	bounding, starting uint64   // capability sets: the limit, and of the first process
	noNewPrivs         bool
	seccomp            bool
	filters            criuimages.Filters // of the checkpoint, if seccomp
	label              string             // AppArmor profile or SELinux label; empty: not limited
}

// limitsOf returns the limits of a spec without user namespace. A process that has got rights from
// a set-user-ID program exceeds them.
func limitsOf(spec *specs.Spec) *limits {
	p := spec.Process
	l := &limits{
		uid:        p.User.UID,
		gid:        p.User.GID,
		groups:     p.User.AdditionalGids,
		noNewPrivs: p.NoNewPrivileges,
		seccomp:    spec.Linux.Seccomp != nil,
		label:      cmp.Or(p.SelinuxLabel, p.ApparmorProfile),
	}
	if p.Capabilities == nil {
		l.anyUser, l.anyGroup = p.User.UID == 0, p.User.UID == 0
		return l
	}
	l.capable = true
	l.bounding, l.starting = capMask(p.Capabilities.Bounding), capMask(p.Capabilities.Ambient)
	if p.User.UID == 0 {
		l.starting = l.bounding // execve by root gives it all
	}
	l.anyUser = l.starting&capMask([]string{"CAP_SETUID"}) != 0
	l.anyGroup = l.starting&capMask([]string{"CAP_SETGID"}) != 0
	return l
}

// capMask returns the bits of capabilities. Unknown names have none.
func capMask(names []string) (mask uint64) {
	for _, c := range capability.ListKnown() {
		if slices.Contains(names, "CAP_"+strings.ToUpper(c.String())) {
			mask |= 1 << uint(c)
		}
	}
	return mask
}

// compare refuses a process if one of its threads exceeds the limits, or is not held by the process
// tracer. A zombie has no rights.
func (l *limits) compare(pid, tracer int) error {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	threads, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list threads of %d: %w", pid, err)
	}
	for _, t := range threads {
		s, err := readStatus(dir + "/" + t.Name() + "/status")
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("restored thread %s ended before it was compared with the spec", t.Name())
		}
		if err != nil {
			return err
		}
		if s.state == "Z" || s.state == "X" {
			continue
		}
		if s.tracer != tracer {
			return proto.Errorf(proto.FailedPrecondition, "restored thread %s is not held by CRIU", t.Name())
		}
		problem := l.exceeded(s)
		if problem == "" {
			problem, err = l.otherLabel(dir + "/" + t.Name())
		}
		if err != nil {
			return err
		}
		if problem != "" {
			return proto.Errorf(proto.FailedPrecondition, "restored thread %s exceeds its container's spec: %s", t.Name(), problem)
		}
	}
	return nil
}

// otherLabel names the label of a thread if it is not that of the spec. AppArmor adds the mode to
// it.
func (l *limits) otherLabel(thread string) (string, error) {
	if l.label == "" {
		return "", nil
	}
	content, err := os.ReadFile(thread + "/attr/current")
	if err != nil {
		return "", fmt.Errorf("read label of a process: %w", err)
	}
	label := strings.TrimRight(string(content), "\x00\n")
	if name, _, _ := strings.Cut(label, " ("); name != l.label {
		return fmt.Sprintf("label %q, required is %q", label, l.label), nil
	}
	return "", nil
}

// exceeded names the first right that the limits do not include, or returns "".
func (l *limits) exceeded(s *procStatus) string {
	other := func(allowed ...uint32) func(uint32) bool {
		return func(id uint32) bool { return !slices.Contains(allowed, id) }
	}
	switch {
	case !l.anyUser && slices.ContainsFunc(s.uids, other(l.uid)):
		return fmt.Sprintf("user IDs %v, allowed is %d", s.uids, l.uid)
	case !l.anyGroup && slices.ContainsFunc(s.gids, other(append([]uint32{l.gid}, l.groups...)...)):
		return fmt.Sprintf("group IDs %v, allowed is %d", s.gids, l.gid)
	case !l.anyGroup && slices.ContainsFunc(s.groups, other(append([]uint32{l.gid}, l.groups...)...)):
		return fmt.Sprintf("supplementary groups %v, allowed are %v", s.groups, l.groups)
	case l.noNewPrivs && !s.noNewPrivs:
		return "no_new_privs is not set"
	case l.seccomp && s.seccomp != 2:
		return fmt.Sprintf("seccomp mode %d, required is a filter", s.seccomp)
	case l.seccomp && s.filters >= 0 && s.filters != l.filtersOf(s):
		return fmt.Sprintf("%d seccomp filters, the checkpoint has %d", s.filters, l.filtersOf(s))
	}
	if !l.capable {
		return ""
	}
	for _, name := range capFields {
		allowed := l.starting
		if name == "CapBnd" || name == "CapInh" {
			allowed = l.bounding
		}
		if s.caps[name]&^allowed != 0 {
			return fmt.Sprintf("%s %#x, allowed is %#x", name, s.caps[name], allowed)
		}
	}
	return ""
}

// filtersOf returns the number of filters that a thread has in the checkpoint.
func (l *limits) filtersOf(s *procStatus) int {
	if n, own := l.filters[s.inside]; own {
		return n
	}
	return l.filters[s.leader] // CRIU stores filters that all threads share only there
}

// descendants returns a process and those that it has started, directly or not.
func descendants(pid int) ([]int, error) {
	below, err := pidfd.Below(pid)
	if err != nil {
		return nil, fmt.Errorf("list descendants of %d: %w", pid, err)
	}
	return append(below, pid), nil
}
