package verify

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Status compares the content of /proc/PID/status of a restored process with what is expected. A
// field that is missing or malformed is a difference.
func Status(status []byte, e Expected) []Difference {
	r := new(Report)
	s := statusFields{Report: r, values: map[string]string{}}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		s.values[name] = strings.TrimSpace(value)
	}
	s.process = "process " + s.values["Pid"]
	id := identity{
		uids: s.numbers("Uid", 4), gids: s.numbers("Gid", 4), groups: s.numbers("Groups", -1),
		noNewPrivs: s.values["NoNewPrivs"] == "1",
		caps:       capabilities{s.set("CapInh"), s.set("CapPrm"), s.set("CapEff"), s.set("CapBnd"), s.set("CapAmb")},
	}
	r.checkIdentity(s.process, id, e)
	const filtered = "2"
	if e.Spec.Linux.Seccomp != nil && s.values["Seccomp"] != filtered {
		r.differ(s.process+": seccomp", "mode "+quoted(s.values["Seccomp"]), "a filter")
	}
	return r.Differences
}

// statusFields are the fields of /proc/PID/status.
type statusFields struct {
	*Report
	process string
	values  map[string]string
}

// numbers returns the numbers of a field that has n of them; -1: any number.
func (s statusFields) numbers(name string, n int) (all []uint32) {
	value, ok := s.values[name]
	for field := range strings.FieldsSeq(value) {
		number, err := strconv.ParseUint(field, 10, 32)
		if err != nil {
			ok = false
		}
		all = append(all, uint32(number))
	}
	if !ok || n >= 0 && len(all) != n {
		s.differ(s.process+": "+name, quoted(value), "numbers")
	}
	return all
}

// set returns a set of capabilities.
func (s statusFields) set(name string) uint64 {
	set, err := strconv.ParseUint(s.values[name], 16, 64)
	if err != nil {
		s.differ(s.process+": "+name, quoted(s.values[name]), "a set of capabilities")
	}
	return set
}

// AbsentPaths returns those of the spec's masked and read-only paths below /proc and /sys that this
// kernel does not have, for Expected. It looks at the node's own /proc and /sys.
func AbsentPaths(masked, readOnly []string) (absent []string) {
	for _, p := range slices.Concat(masked, readOnly) {
		if !strings.HasPrefix(p, "/proc/") && !strings.HasPrefix(p, "/sys/") {
			continue
		}
		if _, err := os.Lstat(p); errors.Is(err, fs.ErrNotExist) {
			absent = append(absent, p)
		}
	}
	return absent
}
