package integration

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/integration/harness"
	"berth/integration/machine"
)

// calledLine finds method, time taken and code in the daemon's log of a call.
var calledLine = regexp.MustCompile(`msg=(\w+) .*took=(\S+) code=(\w+)`)

// wasAsked reports whether a client has called a method.
func wasAsked(d *harness.Daemon, method string) bool {
	return slices.ContainsFunc(machine.ReadLines(d.LogFile()), func(line string) bool { return strings.Contains(line, "msg="+method+" ") })
}

// durations returns the sorted durations of all calls of a method so far.
func durations(t *testing.T, d *harness.Daemon, method string) []time.Duration {
	t.Helper()
	var all []time.Duration
	for _, line := range machine.ReadLines(d.LogFile()) {
		if m := calledLine.FindStringSubmatch(line); m != nil && m[1] == method {
			all = append(all, harness.Get(time.ParseDuration(m[2]))(t))
		}
	}
	if len(all) == 0 {
		t.Fatalf("the daemon's log has no line for %s", method)
	}
	slices.Sort(all)
	return all
}

// failedCalls returns the failed calls in the daemon's log. It leaves out NotFound, because kubelet
// asks for the status of objects that it has just removed.
func failedCalls(d *harness.Daemon) []string {
	var all []string
	for _, line := range machine.ReadLines(d.LogFile()) {
		if m := calledLine.FindStringSubmatch(line); m != nil && m[3] != "OK" && m[3] != "NotFound" {
			all = append(all, line)
		}
	}
	return all
}
