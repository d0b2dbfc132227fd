package crash

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// TestShimCrash kills the launcher or the monitor, but not the daemon, at each of its steps.
func TestShimCrash(t *testing.T) {
	if testing.Short() {
		t.Skip("runs for minutes")
	}
	for _, op := range slices.Concat(shimOperations, shimRestores) {
		if op.more && !everything {
			continue
		}
		t.Run(op.name, func(t *testing.T) {
			e := &shimEnumeration{enumeration: enumeration{op: op.operation}, shimOperation: op}
			e.run(t)
			t.Log(e.summary("launcher or monitor killed at each of"))
		})
	}
}

// shimOperation is an operation that involves launchers or monitors.
type shimOperation struct {
	operation
	next func(*testing.T, *world) error // kubelet's next requests after the crash; nil: the same request

	// noMonitor: the operation involves no launcher and no monitor.
	noMonitor bool
	// exits: the container exits during the operation, and its monitor reports the exit. If the
	// monitor is killed before it writes the report, the exit status differs.
	exits bool
	// execs: the operation is an exec. If both the daemon and the launcher are killed, no record of
	// the exec remains. Its processes then live until the container exits.
	execs bool
	// launches: a launcher does most of the operation.
	launches bool
	// limited: the operation may end before it reaches a point. It times out, or another one has
	// done a part of it.
	limited bool
	// criuRuns are the launcher's first and last point while CRIU runs. CRIU is killed, too. Empty:
	// the operation does not use it.
	criuRuns [2]string
	// crashed, if not nil, checks the machine after the death of a program and the operation's end.
	crashed func(t *testing.T, w *world, program string, err error)
}

var shimOperations = []shimOperation{
	{operation: operation{name: "RunPodSandbox", prepare: withPod(hostPort), request: runPod}, launches: true},
	{operation: operation{name: "RunPodSandbox_crun", daemon: withCrun, prepare: with(byCrun, withPod(harness.HostNetwork)), request: runPod, more: true}, launches: true},
	{operation: operation{name: "RunPodSandbox_shim", daemon: withShim, prepare: with(byShim, withPod(harness.HostNetwork)), request: runPod, more: true}, launches: true},
	{operation: operation{name: "RunPodSandbox_userNamespace", prepare: withPod(podInUserNamespace), request: runPod, more: true}, launches: true},

	{operation: operation{name: "CreateContainer", prepare: with(podRuns(hostPort), withContainer()), request: createContainer}, noMonitor: true},

	{operation: operation{name: "StartContainer", prepare: with(podRuns(hostPort), withContainer(), created), request: startContainer}, next: startNext, launches: true},
	{operation: operation{name: "StartContainer_terminal", prepare: with(podRuns(hostPort), withContainer(terminal), created), request: startContainer, more: true}, next: startNext, launches: true},
	{operation: operation{name: "StartContainer_userNamespace_imageVolume", prepare: with(podRuns(podInUserNamespace), withContainer(containerInUserNamespace, imageVolume), created),
		request: startContainer, more: true}, next: startNext, launches: true},
	{operation: operation{name: "StartContainer_writableCgroups", prepare: with(podRuns(harness.HostNetwork), withContainer(writableCgroups, harness.RunAs(1001)), created),
		request: startContainer, more: !machine.Cgroup2()}, next: startNext, launches: true},
	{operation: operation{name: "StartContainer_crun", daemon: withCrun, prepare: with(byCrun, podRuns(harness.HostNetwork), withContainer(), created), request: startContainer, more: true},
		next: startNext, launches: true},
	{operation: operation{name: "StartContainer_shim", daemon: withShim, prepare: with(byShim, podRuns(harness.HostNetwork), withContainer(), created), request: startContainer, more: true},
		next: startNext, launches: true},
	{operation: operation{name: "StartContainer_fails", prepare: with(podRuns(harness.HostNetwork), withContainer(harness.Command("/no/such/program")), created), request: failToStart}, launches: true},

	{operation: operation{name: "Exec", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: execute}, execs: true, launches: true},
	{operation: operation{name: "Exec_crun", daemon: withCrun, prepare: with(byCrun, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: execute, more: true},
		execs: true, launches: true},
	{operation: operation{name: "Exec_shim", daemon: withShim, prepare: with(byShim, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: execute, more: true},
		execs: true, launches: true},
	{operation: operation{name: "Exec_timeout", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: executeTooLong}, execs: true, launches: true, limited: true},
	{operation: operation{name: "Exec_fails", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: failToExec, more: true}, execs: true, launches: true},

	{operation: operation{name: "StopContainer", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: stopContainer(30)}, exits: true},
	{operation: operation{name: "StopContainer_kill", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: stopContainer(0), more: true}, exits: true},
	{operation: operation{name: "StopContainer_sharedPIDs", prepare: with(podRuns(harness.SharedPID), withContainer(exitsOnTerm), started), request: stopContainer(30)}, exits: true},

	{operation: operation{name: "StopPodSandbox", prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: stopPod}, exits: true},
	{operation: operation{name: "RemoveContainer", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removeContainer}},
	{operation: operation{name: "RemovePodSandbox", prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: removePod}},
	{operation: operation{name: "RemovePodSandbox_shim", daemon: withShim, prepare: with(byShim, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removePod, more: true},
		limited: true},
	{operation: operation{name: "RemovePodSandbox_userNamespace", prepare: with(podRuns(podInUserNamespace), withContainer(exitsOnTerm, containerInUserNamespace), started),
		request: removePod, more: true}},
}

// shimEnumeration is one shimOperation with all its cases.
type shimEnumeration struct {
	enumeration
	shimOperation
	lost inventory.Items // like after, but the monitor was lost before it recorded the container's exit
}

// shimPoint is a failpoint, a program and a count. A launcher or monitor is killed there.
type shimPoint struct {
	program string
	point
}

func (e *shimEnumeration) run(t *testing.T) {
	e.start(t)
	e.uncrashed(t)
	cases := shimCases(e.uncrashed(t))
	if e.noMonitor != (len(cases) == 0) {
		t.Errorf("launchers and monitors reached only %d points", len(cases))
	}
	recorded := slices.Index(cases, shimPoint{harness.MonitorProgram, point{"monitor.exit-recorded", 1}})
	if e.exits && recorded < 0 {
		t.Fatal("no monitor records an exit")
	}
	e.points = len(cases)
	for _, c := range selected(cases) {
		for _, daemonToo := range []bool{false, true} {
			if daemonToo && (!everything || e.execs) {
				continue
			}
			e.cases++
			name := fmt.Sprintf("%s/%s/%d", c.program, c.point.point, c.n)
			if daemonToo {
				name += "/daemon-too"
			}
			how := atFailpoint(&e.fp, c)
			how.mayMiss = e.limited
			if !t.Run(name, func(t *testing.T) { e.crash(t, how, daemonToo, e.wanted(slices.Index(cases, c) < recorded)) }) {
				e.failed++
				e.startOver(t)
			}
		}
	}
	if e.criuRuns[0] != "" {
		e.runCRIU(t, cases)
	}
}

func (e *shimEnumeration) start(t *testing.T) {
	options := []harness.DaemonOption{harness.WithFailpoints(&e.fp)}
	if e.op.daemon != nil {
		options = append(options, e.op.daemon(t))
	}
	e.d = harness.StartDaemon(t, options...)
}

func (e *shimEnumeration) startOver(t *testing.T) {
	t.Helper()
	e.enumeration.startOver(t)
	e.lost = nil
}

// wanted returns the expected state after the operation.
func (e *shimEnumeration) wanted(unrecorded bool) inventory.Items {
	if !e.exits || !unrecorded {
		return e.after
	}
	if e.lost == nil {
		e.lost = asLost(e.after)
	}
	return e.lost
}

const exitedState = `"state":"CONTAINER_EXITED"`

var (
	exitCode   = regexp.MustCompile(`"exitCode":\d+`)
	exitReason = regexp.MustCompile(`"reason":"\w+"`)

	recordedExit = regexp.MustCompile(`"exit":\{"code":\d+,("finishedAt":"T",)"reason":"\w+"`)
)

const lostMessage = `"message":"the container's shim was lost, its exit code is unknown"`

// asLost returns the state with the exit status of containers that lost their monitors.
func asLost(s inventory.Items) inventory.Items {
	return s.Map(func(kind, name string) string {
		switch {
		case kind == "status of container" && strings.Contains(name, exitedState):
			name = exitCode.ReplaceAllString(name, `"exitCode":255`)
			return exitReason.ReplaceAllString(name, `"reason":"ShimLost",`+lostMessage)
		case strings.Contains(name, "/containers/"):
			return recordedExit.ReplaceAllString(name, `"exit":{"code":255,${1}`+lostMessage+`,"reason":"ShimLost"`)
		}
		return name
	})
}

// shimCases returns the points of a trace that launchers, monitors and berth-task reached.
func shimCases(trace []harness.ReachedPoint) (cases []shimPoint) {
	var names []string
	for _, p := range trace {
		if p.Program == harness.LauncherProgram || p.Program == harness.MonitorProgram || p.Program == harness.TaskProgram {
			names = append(names, p.Program+" "+p.Name)
		}
	}
	for _, c := range casesOf(names) {
		program, name, _ := strings.Cut(c.point, " ")
		cases = append(cases, shimPoint{program, point{name, c.n}})
	}
	return cases
}

// killing describes how a launcher or monitor is killed.
type killing struct {
	program string
	arm     func(*testing.T)
	reached func() bool // waits until the process is at the point
	disarm  func()
	mayMiss bool // the point depends on timing
}

func atFailpoint(fp *harness.Failpoints, at shimPoint) killing {
	return killing{
		program: at.program,
		arm:     func(t *testing.T) { fp.KillNext(t, at.program, at.point.point, at.n) },
		reached: func() bool { return fp.WaitReached(deathPatience) },
		disarm:  func() { fp.Disarm() },
	}
}

// notReached ends a case in which no process was killed.
func (e *shimEnumeration) notReached(t *testing.T, w *world, how killing, err error) {
	t.Helper()
	if !how.mayMiss || err != nil {
		t.Fatalf("the point was not reached; the operation returned %v", err)
	}
	e.cases--
	e.missed++
	w.clean(t)
	t.Skip("the point was not reached, which depends on timing")
}

func (e *shimEnumeration) crash(t *testing.T, how killing, daemonToo bool, want inventory.Items) {
	w := &world{d: e.d}
	e.op.prepare(t, w)
	e.d.WaitIdle(t)
	how.arm(t)
	ended := harness.Go(func() error { return e.request(t, w) })
	reached := how.reached()
	if reached && daemonToo {
		e.d.Kill(t)
	}
	err := <-ended
	how.disarm()
	if !reached {
		e.notReached(t, w, how, err)
	}
	if daemonToo {
		e.d.Start(t)
	}
	if harness.CodeOf(err) == codes.DeadlineExceeded {
		e.report(t, "the operation", []string{err.Error()})
	}
	if e.crashed != nil && !daemonToo {
		e.crashed(t, w, how.program, err)
	}
	e.report(t, "after trying again", e.repeated(t, w, want))
	e.report(t, "berth check --state", e.checked(t))
	w.clean(t)
	e.report(t, "after everything was removed", e.d.Becomes(t, e.idle))
}

// repeated repeats the request until the state is the expected one, as kubelet does. It returns the
// remaining differences.
func (e *shimEnumeration) repeated(t *testing.T, w *world, want inventory.Items) (differences []string) {
	t.Helper()
	next := e.next
	if next == nil {
		next = e.request
	}
	const looks = 4
	for range looks {
		if err := next(t, w); err != nil {
			differences = []string{err.Error()}
			continue
		}
		if differences = e.d.BecomesWithin(t, want, deathPatience/looks); len(differences) == 0 {
			return e.d.Becomes(t, want) // the state must not change again
		}
	}
	return differences
}

// --- requests -----------------------------------------------------------------

// failToStart starts a container without a program, checks that this fails, and removes it.
func failToStart(t *testing.T, w *world) error {
	if err := w.d.Cri.StartContainer(t.Context(), w.id); err == nil {
		return fmt.Errorf("container %s, which has no program, was started", w.id)
	}
	return removeContainer(t, w)
}

func execute(t *testing.T, w *world) error {
	stdout, _, err := w.d.Cri.ExecSync(t.Context(), w.id, []string{"echo", "done"}, 0)
	if err == nil && string(stdout) != "done\n" {
		return fmt.Errorf("it printed %q", stdout)
	}
	return err
}

// executeTooLong runs an exec that exceeds its timeout and must be killed with its children.
func executeTooLong(t *testing.T, w *world) error {
	_, _, err := w.d.Cri.ExecSync(t.Context(), w.id, []string{"sh", "-c", "sleep 100001 & sleep 100002"}, time.Second)
	return expectTimeout(err)
}

// expectTimeout returns nil for cri-client's form of an exec's DeadlineExceeded.
func expectTimeout(err error) error {
	if err == nil || !strings.Contains(err.Error(), "timed out after 1") { // 1 or 10 seconds
		return fmt.Errorf("exec beyond its timeout returned: %v", err)
	}
	return nil
}

func failToExec(t *testing.T, w *world) error {
	_, _, err := w.d.Cri.ExecSync(t.Context(), w.id, []string{"/no/such/program"}, 0)
	return expect(err, codes.InvalidArgument)
}

// expect returns nil for an error with that code.
func expect(err error, code codes.Code) error {
	if got := harness.CodeOf(err); got != code {
		return fmt.Errorf("gRPC code is %v, want %v: %v", got, code, err)
	}
	return nil
}
