package podrun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/client/clienttest"
	"berth/cmd/berth/podyaml"
	"berth/internal/testutil"
)

// bench is a fake runtime with a client and the output of a run.
type bench struct {
	*clienttest.Server
	t              *testing.T
	client         *client.Client
	config         Config
	stdout, stderr testutil.Buffer
	reports        testutil.Buffer
}

const image = "registry.test/app:1"

func newBench(t *testing.T, s *clienttest.Server) *bench {
	t.Helper()
	s.Registry = map[string]*runtimeapi.Image{image: {Id: "sha256:app", RepoTags: []string{image}}}
	c, err := client.Dial(t.Context(), clienttest.Start(t, s))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &bench{Server: s, t: t, client: c}
	b.config = Config{
		Dir: t.TempDir(), Stdout: &b.stdout, Stderr: &b.stderr,
		Report: func(format string, args ...any) { fmt.Fprintf(&b.reports, format+"\n", args...) },
	}
	return b
}

// run runs a manifest with the given spec, whose lines are not indented.
func (b *bench) run(ctx, now context.Context, spec string) ([]string, error) {
	b.t.Helper()
	return b.runFile(ctx, now, manifest(spec))
}

func (b *bench) runFile(ctx, now context.Context, text string) ([]string, error) {
	b.t.Helper()
	m, err := podyaml.Parse([]byte(text))
	if err != nil {
		b.t.Fatal(err)
	}
	return Run(ctx, now, b.client, m, b.config)
}

func manifest(spec string) string {
	return "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  " +
		strings.ReplaceAll(strings.TrimSpace(spec), "\n", "\n  ") + "\n"
}

func container(name string) string { return fmt.Sprintf("{name: %s, image: %q}", name, image) }

// sameCall reports whether a call is the wanted one. The grace period at the end of a StopContainer
// may be smaller, because on a loaded machine earlier steps take seconds of it.
func sameCall(got, want string) bool {
	at := strings.LastIndexByte(want, ' ')
	if !strings.HasPrefix(want, "StopContainer ") {
		return got == want
	}
	rest, ok := strings.CutPrefix(got, want[:at+1])
	left, err := strconv.Atoi(rest)
	most, wantErr := strconv.Atoi(want[at+1:])
	return ok && err == nil && wantErr == nil && left <= most && (left > 0 || most == 0)
}

// checkCalls compares the runtime's calls with the wanted ones. It sorts both where the order may
// vary.
func (b *bench) checkCalls(want ...string) {
	b.t.Helper()
	if got := b.Calls(); !slices.EqualFunc(got, want, sameCall) {
		b.t.Errorf("calls:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// checkNothingLeft checks that the run has removed everything.
func (b *bench) checkNothingLeft() {
	b.t.Helper()
	if left := b.Left(); len(left) > 0 {
		b.t.Errorf("left in the runtime: %q", left)
	}
	entries, err := os.ReadDir(b.config.Dir)
	if err != nil || len(entries) > 0 {
		b.t.Errorf("left of the files: %v, %v", entries, err)
	}
}

func TestRunStartsAndStopsInOrder(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"prepare": {Exits: []int32{0}, Output: []string{"stdout preparing"}},
		"one":     {Exits: []int32{0}, Output: []string{"stdout first", "stderr oops"}},
		"two":     {Exits: []int32{0}, Output: []string{"stdout second"}},
	}})
	_, err := b.run(t.Context(), t.Context(), `
terminationGracePeriodSeconds: 7
initContainers:
- `+container("prepare")+`
containers:
- `+container("one")+`
- `+container("two"))
	if err != nil {
		t.Fatal(err)
	}
	b.checkCalls(
		"PullImage "+image, "RunPodSandbox web",
		"CreateContainer prepare/0", "StartContainer prepare/0",
		"CreateContainer one/0", "StartContainer one/0",
		"CreateContainer two/0", "StartContainer two/0",
		"StopPodSandbox", "StopPodSandbox", "RemovePodSandbox",
	)
	for _, line := range []string{"[prepare] preparing\n", "[one] first\n", "[two] second\n"} {
		if !strings.Contains(b.stdout.String(), line) {
			t.Errorf("stdout %q lacks %q", b.stdout.String(), line)
		}
	}
	if got := b.stderr.String(); got != "[one] oops\n" {
		t.Errorf("stderr %q", got)
	}
	b.checkNothingLeft()
}

func TestRunReturnsFirstFailure(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"one": {Exits: []int32{0}}, "two": {Exits: []int32{3}},
	}})
	_, err := b.run(t.Context(), t.Context(), "restartPolicy: Never\ncontainers: ["+container("one")+", "+container("two")+"]")
	var failed *ContainerFailed
	if !errors.As(err, &failed) || failed.Container != "two" || failed.Code != 3 {
		t.Errorf("error %v, want that two exited with 3", err)
	}
	b.checkNothingLeft()
}

func TestRunFailsWithInitContainer(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{"init": {Exits: []int32{9}}}})
	_, err := b.run(t.Context(), t.Context(),
		"restartPolicy: Never\ninitContainers: ["+container("init")+"]\ncontainers: ["+container("main")+"]")
	var failed *ContainerFailed
	if !errors.As(err, &failed) || failed.Code != 9 {
		t.Errorf("error %v, want exit code 9", err)
	}
	if slices.Contains(b.Calls(), "CreateContainer main/0") {
		t.Error("main was created after its init container failed")
	}
	b.checkNothingLeft()
}

// Pods of one file run at the same time. A failed container does not stop the other pod.
func TestRunSeveralPods(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"bad": {Exits: []int32{4}}, "good": {Exits: []int32{0}, Output: []string{"stdout fine"}},
	}})
	text := strings.Replace(manifest("containers: ["+container("bad")+"]"), "name: web", "name: first", 1) + "---\n" +
		manifest("containers: ["+container("good")+"]")
	_, err := b.runFile(t.Context(), t.Context(), text)
	var failed *ContainerFailed
	if !errors.As(err, &failed) || failed.Code != 4 {
		t.Errorf("error %v, want exit code 4", err)
	}
	if got := b.stdout.String(); got != "[web/good] fine\n" {
		t.Errorf("stdout %q", got)
	}
	b.checkNothingLeft()
}

// If one of several detached pods cannot run, none stays.
func TestDetachedPodsStayTogether(t *testing.T) {
	b := newBench(t, &clienttest.Server{Hook: failAt("StartContainer bad/0", codes.Internal, "out of luck")})
	b.config.Detach = true
	text := strings.Replace(manifest("containers: ["+container("bad")+"]"), "name: web", "name: first", 1) + "---\n" +
		manifest("containers: ["+container("good")+"]")
	ids, err := b.runFile(t.Context(), t.Context(), text)
	if err == nil || !strings.Contains(err.Error(), "out of luck") || len(ids) > 0 {
		t.Errorf("%q, %v", ids, err)
	}
	b.checkNothingLeft()
}

func TestRunInterruptStopsWithGrace(t *testing.T) {
	interrupt := errors.New("Ctrl-C")
	for _, at := range []string{"PullImage " + image, "RunPodSandbox web", "StartContainer init/0", "StartContainer main/0"} {
		t.Run(at, func(t *testing.T) {
			ctx, stop := context.WithCancelCause(t.Context())
			b := newBench(t, &clienttest.Server{Hook: func(_ context.Context, call string) error {
				if call == at {
					stop(interrupt)
				}
				return nil
			}})
			if at == "StartContainer main/0" {
				b.Programs = map[string]clienttest.Program{"init": {Exits: []int32{0}}}
			}
			_, err := b.run(ctx, t.Context(), "terminationGracePeriodSeconds: 5\ninitContainers: ["+container("init")+"]\n"+
				"containers: ["+container("main")+"]")
			if !errors.Is(err, interrupt) {
				t.Errorf("error %v, want the interrupt", err)
			}
			if at == "StartContainer main/0" && !slices.ContainsFunc(b.Calls(), func(call string) bool { return sameCall(call, "StopContainer main/0 5") }) {
				t.Errorf("main did not get its grace period: %q", b.Calls())
			}
			b.checkNothingLeft()
		})
	}
}

func TestRunSecondInterruptKills(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	now, kill := context.WithCancelCause(t.Context())
	b := newBench(t, &clienttest.Server{
		Programs: map[string]clienttest.Program{"main": {Stubborn: true}},
		Hook: func(_ context.Context, call string) error {
			switch {
			case call == "StartContainer main/0":
				stop()
			case sameCall(call, "StopContainer main/0 30"):
				kill(errors.New("second Ctrl-C"))
			}
			return nil
		},
	})
	_, err := b.run(ctx, now, "containers: ["+container("main")+"]")
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that it was cancelled", err)
	}
	if !slices.Contains(b.Calls(), "StopContainer main/0 0") {
		t.Errorf("main was not killed: %q", b.Calls())
	}
	if reports := b.reports.String(); strings.Contains(reports, "Ctrl-C") {
		t.Errorf("the second interrupt is reported as an error of a log:\n%s", reports)
	}
	b.checkNothingLeft()
}

// --pull replaces the policy of the manifest. A failed pull of a present image names it.
func TestPullPolicyOfCommand(t *testing.T) {
	const spec = "restartPolicy: Never\ncontainers: [{name: main, image: '" + image + "', imagePullPolicy: Always}]"
	var offline atomic.Bool
	unreachable := failAt("PullImage "+image, codes.Unknown, "RegistryUnavailable: no route")
	b := newBench(t, &clienttest.Server{
		Programs: map[string]clienttest.Program{"main": {Exits: []int32{0}}},
		Hook: func(ctx context.Context, call string) error {
			if offline.Load() {
				return unreachable(ctx, call)
			}
			return nil
		},
	})
	run := func() error {
		_, err := b.run(t.Context(), t.Context(), spec)
		return err
	}
	if err := run(); err != nil {
		t.Fatal(err)
	}
	offline.Store(true)
	if err := run(); err == nil || !strings.HasSuffix(err.Error(), "the image is on this node, and --pull=missing uses it") {
		t.Errorf("%v", err)
	}
	for _, policy := range []corev1.PullPolicy{corev1.PullIfNotPresent, corev1.PullNever} {
		b.config.Pull = policy
		if err := run(); err != nil {
			t.Errorf("%s: %v", policy, err)
		}
	}
}

func TestRunFailuresLeaveNothing(t *testing.T) {
	one := "restartPolicy: Never\ncontainers: [" + container("main") + "]"
	tests := []struct {
		name   string
		server clienttest.Server
		spec   string
		want   string
	}{
		{"unknown image", clienttest.Server{}, "containers: [{name: main, image: 'registry.test/none:1'}]", "not found: registry.test/none:1: manifest unknown"},
		{"image never pulled", clienttest.Server{}, "containers: [{name: main, image: '" + image + "', imagePullPolicy: Never}]", "imagePullPolicy is Never"},
		{"sandbox refused", clienttest.Server{Hook: failAt("RunPodSandbox web", codes.FailedPrecondition, "no CNI config")}, one, "no CNI config"},
		{"sandbox in doubt", clienttest.Server{LoseSandbox: true}, one, "timed out"},
		{"create refused", clienttest.Server{Hook: failAt("CreateContainer main/0", codes.InvalidArgument, "no such user")}, one, "create container main: invalid request: no such user"},
		{"command not found", clienttest.Server{Programs: map[string]clienttest.Program{
			"main": {StartErr: status.Error(codes.InvalidArgument, "exec: \"nope\": not found")}}}, one, "start container main"},
		{"runs as root", clienttest.Server{},
			"securityContext: {runAsNonRoot: true}\ncontainers: [" + container("main") + "]", "the image runs as root"},
		{"hostPath", clienttest.Server{}, "volumes: [{name: v, hostPath: {path: /nowhere/at/all}}]\ncontainers: [" + container("main") + "]",
			"spec.volumes[0]: hostPath /nowhere/at/all does not exist"},
	}
	for i := range tests {
		test := &tests[i]
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, &test.server)
			_, err := b.run(t.Context(), t.Context(), test.spec)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			b.checkNothingLeft()
		})
	}
}

func failAt(call string, code codes.Code, message string) func(context.Context, string) error {
	return func(_ context.Context, got string) error {
		if got == call {
			return status.Error(code, message)
		}
		return nil
	}
}

func TestDetachedPodIsStoppedWithItsGrace(t *testing.T) {
	b := newBench(t, &clienttest.Server{})
	b.config.Detach = true
	ids, err := b.run(t.Context(), t.Context(), "terminationGracePeriodSeconds: 11\ncontainers: ["+container("main")+"]")
	if err != nil {
		t.Fatal(err)
	}
	pod, err := b.client.FindPod(t.Context(), ids[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := Stop(t.Context(), b.client, pod.GetId()); err != nil {
		t.Fatal(err)
	}
	b.checkCalls("PullImage "+image, "RunPodSandbox web", "CreateContainer main/0", "StartContainer main/0",
		"StopContainer main/0 11", "StopPodSandbox")
	if err := b.client.RemovePod(t.Context(), pod.GetId()); err != nil {
		t.Fatal(err)
	}
	if err := RemoveFiles(b.config.Dir, pod.GetMetadata().GetUid()); err != nil {
		t.Fatal(err)
	}
	b.checkNothingLeft()
}

func TestRemoveFilesStaysBelowItsDirectory(t *testing.T) {
	parent := t.TempDir()
	keep := filepath.Join(parent, "keep")
	if err := os.MkdirAll(filepath.Join(parent, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(keep, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"../keep", "", ".", "..", "keep"} {
		if err := RemoveFiles(filepath.Join(parent, "run"), uid); err != nil {
			t.Errorf("uid %q: %v", uid, err)
		}
	}
	for _, dir := range []string{keep, filepath.Join(parent, "run")} {
		if _, err := os.Stat(dir); err != nil {
			t.Error(err)
		}
	}
}

// closedPipe is an output whose reader is gone.
type closedPipe struct{}

func (closedPipe) Write([]byte) (int, error) { return 0, os.ErrClosed }

func TestRunEndsWhenOutputIsClosed(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{"main": {Output: []string{"stdout hello"}}}})
	b.config.Stdout = closedPipe{}
	if _, err := b.run(t.Context(), t.Context(), "containers: ["+container("main")+"]"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("error %v, want that of the write", err)
	}
	b.checkNothingLeft()
}

func TestRunReportsBadLogAndGoesOn(t *testing.T) {
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"main": {Exits: []int32{0}, Output: []string{"nowhere lost", "stdout found"}},
	}})
	if _, err := b.run(t.Context(), t.Context(), "restartPolicy: Never\ncontainers: ["+container("main")+"]"); err != nil {
		t.Fatal(err)
	}
	if b.stdout.String() != "[main] found\n" || !strings.Contains(b.reports.String(), "1 malformed record") {
		t.Errorf("stdout %q, reports %q", b.stdout.String(), b.reports.String())
	}
}

func TestRunReportsFailedStopWithoutHanging(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	b := newBench(t, &clienttest.Server{Hook: func(ctx context.Context, call string) error {
		switch {
		case call == "StartContainer main/0":
			stop()
		case strings.HasPrefix(call, "StopContainer"):
			return status.Error(codes.Internal, "cannot be killed")
		}
		return nil
	}})
	_, err := b.run(ctx, t.Context(), "containers: ["+container("main")+"]")
	if err == nil || !strings.Contains(err.Error(), "cannot be killed") {
		t.Errorf("error %v", err)
	}
	b.checkNothingLeft() // stopping the pod removed it after all
}
