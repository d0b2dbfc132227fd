package crash

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/checkpoint/record"
	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
	"berth/internal/failpoint/points"
	"berth/internal/testutil"
)

// everything selects all cases instead of a selection.
var everything = harness.Thorough()

// deathPatience limits the wait for a point. It is long because the daemon reaches some points in
// the background, after the operation has returned.
const deathPatience = 20 * time.Second

// TestCrash kills the daemon at each point of each operation.
func TestCrash(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for minutes")
	}
	killed, all := map[string]bool{}, everything
	for _, op := range slices.Concat(operations, profiles, restores, gvisors, variants, otherForm, starts) {
		if op.more && !everything {
			continue
		}
		ran := false
		t.Run(op.name, func(t *testing.T) {
			ran = true
			e := &enumeration{op: op, killed: killed}
			e.run(t)
			t.Log(e.summary("the daemon killed at each of"))
		})
		all = all && ran
	}
	if all {
		allKilled(t, killed)
	}
}

// enumeration is one operation with all its cases.
type enumeration struct {
	op    operation
	d     *harness.Daemon
	fp    harness.Failpoints
	idle  inventory.Items // state without pods
	after inventory.Items // state after the operation without a crash

	points, cases, failed, differences int
	missed                             int             // cases in which the daemon reached the point too few times to be killed
	killed                             map[string]bool // points that killed a daemon, in any operation
}

// summary returns the line that contrib/torture repeats at its end.
func (e *enumeration) summary(what string) string {
	return fmt.Sprintf("TRIED %s: %s %d points, %d cases, %d failed, %d differences, %d not reached again",
		e.op.name, what, e.points, e.cases, e.failed, e.differences, e.missed)
}

func (e *enumeration) run(t *testing.T) {
	options := []harness.DaemonOption{harness.WithFailpoints(&e.fp)}
	if e.op.daemon != nil {
		options = append(options, e.op.daemon(t))
	}
	e.d = harness.StartDaemon(t, options...)
	e.uncrashed(t) // creates the operation's permanent results before the enumeration
	trace := e.byDaemon(e.uncrashed(t))
	if e.op.ofStart() {
		trace = e.recovered(t)
	}
	cases := casesOf(trace)
	e.points = len(cases)
	for _, c := range selected(cases) {
		for _, again := range e.op.retries() {
			name := fmt.Sprintf("%s/%d/%s", c.point, c.n, again.name)
			e.cases++
			if !t.Run(name, func(t *testing.T) { e.crash(t, c, again) }) {
				e.failed++
				e.startOver(t)
			}
		}
	}
	e.mostReached(t)
}

// mostReached fails if too many cases missed their point.
func (e *enumeration) mostReached(t *testing.T) {
	if e.missed > e.cases {
		t.Errorf("of %d cases %d missed their point", e.cases+e.missed, e.missed)
	}
}

// byDaemon returns the points of a trace that the daemon reached.
func (e *enumeration) byDaemon(trace []harness.ReachedPoint) (names []string) {
	for _, p := range trace {
		if p.PID == e.d.Cmd.Process.Pid {
			names = append(names, p.Name)
		}
	}
	return names
}

// uncrashed runs the operation, records its result, and returns the points that it reaches.
func (e *enumeration) uncrashed(t *testing.T) (trace []harness.ReachedPoint) {
	t.Helper()
	w := &world{d: e.d}
	e.op.prepare(t, w)
	e.d.Settled(t)
	e.fp.Trace(t)
	if err := e.op.request(t, w); err != nil {
		t.Fatalf("%s without a crash: %v", e.op.name, err)
	}
	e.after = e.d.Settled(t)
	trace = e.fp.Traced(t)
	w.clean(t)
	e.idle = e.d.Settled(t)
	return trace
}

// end ends the daemon in the state from which the next daemon must recover.
func (e *enumeration) end(t *testing.T, w *world) {
	t.Helper()
	if e.op.first != nil {
		e.runUntilKilled(t, w, *e.op.first)
		return
	}
	e.d.Kill(t)
	e.op.spoil(t, w)
}

// recovered ends the daemon, starts a new one and returns the points that the new one reaches. If
// the operation damages the state, the result of this start is the expected state.
func (e *enumeration) recovered(t *testing.T) (trace []string) {
	t.Helper()
	w := &world{d: e.d}
	e.op.prepare(t, w)
	e.d.WaitIdle(t)
	e.end(t, w)
	e.fp.Trace(t)
	e.d.Start(t)
	e.d.Settled(t)
	trace = e.byDaemon(e.fp.Traced(t))
	if e.op.spoil != nil {
		do(e.op.request)(t, w)
		e.after = e.d.Settled(t)
	}
	w.clean(t)
	e.d.Settled(t)
	return trace
}

// runUntilKilled runs the operation until the daemon is killed at a point.
func (e *enumeration) runUntilKilled(t *testing.T, w *world, at point) {
	t.Helper()
	e.fp.Kill(t, e.d, at.point, at.n)
	err := e.op.request(t, w)
	if !e.d.WaitKilled(t, deathPatience) {
		e.notReached(t, w, at, err)
	}
}

// notReached ends a case in which the daemon was not killed. The case fails unless the point
// depends on timing. Examples are a point in a loop that polls for a process's exit, and a point at
// which recovery kills a process that may have exited.
func (e *enumeration) notReached(t *testing.T, w *world, at point, err error) {
	t.Helper()
	e.fp.Disarm()
	if err != nil || at.n == 1 && e.op.first == nil {
		t.Fatalf("the point %v was not reached; the operation returned %v", at, err)
	}
	e.cases--
	e.missed++
	w.clean(t)
	t.Skipf("the point %v was reached less often than in the first run", at)
}

// startOver makes the leftovers of a failed case the new initial state.
func (e *enumeration) startOver(t *testing.T) {
	t.Helper()
	e.fp.Disarm()
	machine.ContinueAll()
	if e.d.Gone() {
		e.d.Start(t)
	}
	(&world{d: e.d}).clean(t)
	e.uncrashed(t)
	if e.op.spoil != nil {
		e.recovered(t)
	}
}

// point is a failpoint and a count. The daemon is killed when it reaches the failpoint for the nth
// time.
type point struct {
	point string
	n     int // counts from 1
}

// answered is the failpoint before each answer of the daemon.
const answered = "server.answer"

// casesOf returns the points of a trace: each occurrence if everything is set, otherwise the first
// occurrence of each point.
func casesOf(trace []string) (cases []point) {
	count := map[string]int{}
	for _, name := range trace {
		count[name]++
		if name == answered && count[name] > 1 {
			continue // answers to the inventory, after the operation
		}
		if count[name] == 1 || everything {
			cases = append(cases, point{name, count[name]})
		}
	}
	return cases
}

// selected returns the cases to run: all of them with testutil.AllTests, otherwise one
// in caseStride.
func selected[T any](cases []T) []T {
	if everything || testutil.AllTests() {
		return cases
	}
	var some []T
	for i := caseStride / 2; i < len(cases); i += caseStride {
		some = append(some, cases[i])
	}
	return some
}

const caseStride = 5

func (e *enumeration) crash(t *testing.T, at point, again retry) {
	w := &world{d: e.d}
	e.op.prepare(t, w)
	e.d.WaitIdle(t)
	e.killed[at.point] = true
	if !e.op.ofStart() {
		e.runUntilKilled(t, w, at)
	} else {
		e.end(t, w)
		e.fp.KillNext(t, harness.DaemonProgram, at.point, at.n)
		if !e.d.StartUntilKilled(t, deathPatience) {
			e.notReached(t, w, at, nil)
		}
	}
	if e.op.dead != nil {
		e.op.dead(t, w)
	}
	e.d.Start(t)
	if e.op.restarted != nil {
		e.op.restarted(t, w)
	}
	if err := again.request(t, w); err != nil {
		e.report(t, "trying again", []string{err.Error()})
	}
	e.report(t, "after trying again", e.d.Becomes(t, e.after))
	e.report(t, "berth check --state", e.checked(t))
	w.clean(t)
	e.report(t, "after everything was removed", e.d.Becomes(t, e.idle))
}

// checked returns the differences that `berth check --state` reports.
func (e *enumeration) checked(t *testing.T) (differences []string) {
	t.Helper()
	for _, found := range e.d.StateCheck(t) {
		if e.op.named == "" || !strings.Contains(found.Text(), e.op.named) {
			differences = append(differences, found.Text())
		}
	}
	return differences
}

func (e *enumeration) report(t *testing.T, when string, differences []string) {
	t.Helper()
	e.differences += len(differences)
	if len(differences) > 0 {
		t.Errorf("%s:\n  %s", when, strings.Join(inventory.Summary(differences), "\n  "))
	}
	if t.Failed() {
		t.Logf("the daemon's log:\n%s", e.d.Tail())
	}
}

// clean removes all pods and security profiles, and the images of the operations.
func (w *world) clean(t *testing.T) {
	t.Helper()
	for _, p := range harness.Get(w.d.Cri.ListPodSandbox(t.Context(), nil))(t) {
		harness.Must(t, w.d.Cri.StopPodSandbox(t.Context(), p.Id))
		harness.Must(t, w.d.Cri.RemovePodSandbox(t.Context(), p.Id))
	}
	w.removeImages(t)
	w.removeProfiles(t)
	w.d.RemovePartial(t)
	for _, records := range []string{"pods", "containers", "images/records", "images/profiles"} { // removed by an operator
		harness.Must(t, os.RemoveAll(filepath.Join(w.d.Root, records, record.SetAsideDir)))
	}
	harness.Must(t, os.RemoveAll(w.d.LogDir)) // removed by kubelet
	harness.Must(t, os.Mkdir(w.d.LogDir, 0o700))
}

// The daemon also starts this program as an NRI plugin.
func TestMain(m *testing.M) {
	if !isPlugin() {
		harness.MainWithFailpoints(m)
	}
	if err := runPlugin(); err != nil {
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
}

// Released binaries contain neither the names of failpoints nor the code for them.
func TestReleasedBinariesHaveNoFailpoints(t *testing.T) {
	all := harness.Get(points.Below("../.."))(t)
	traces := []string{"BERTH_FAILPOINTS"}
	for _, p := range all {
		if strings.Contains(p.Name, "-") { // shorter names may be parts of function names
			traces = append(traces, p.Name)
		}
	}
	released, with := programs(t, harness.ReleasedBinaries()), programs(t, harness.BinDir)
	for _, name := range traces {
		if bytes.Contains(released, []byte(name)) {
			t.Errorf("a released binary contains %q", name)
		}
		if !bytes.Contains(with, []byte(name)) {
			t.Errorf("no binary with failpoints contains %q, so this test would not find it", name)
		}
	}
}

// programs returns the concatenated content of the programs in a directory.
func programs(t *testing.T, dir string) (all []byte) {
	t.Helper()
	for _, name := range []string{"berthd", "berth-shim", "berth-unpack", "berth-task", "berth-stream"} {
		content := harness.Get(os.ReadFile(filepath.Join(dir, name)))(t)
		all = append(all, content...)
	}
	return all
}
