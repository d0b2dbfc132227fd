package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/cli"
	"berth/cmd/berth/client"
	"berth/cmd/berth/client/clienttest"
	"berth/cmd/berth/crilog"
	"berth/internal/testutil"
)

func TestMain(m *testing.M) {
	SilenceLibraries()
	os.Exit(m.Run())
}

var updateGolden = flag.Bool("update", false, "write the golden files of the operator commands")

// console runs operator commands against a fake runtime.
type console struct {
	*clienttest.Server
	t      *testing.T
	socket string
	runDir string
	stdin  string

	onOutput func() // called after a write to stdout, if not nil
}

// sink collects a command's output.
type sink struct {
	testutil.Buffer
	written func()
}

func (s *sink) Write(b []byte) (int, error) {
	n, err := s.Buffer.Write(b)
	if s.written != nil {
		s.written()
	}
	return n, err
}

const testImage = "registry.test/app:1"

func newConsole(t *testing.T, s *clienttest.Server) *console {
	t.Helper()
	s.Registry = map[string]*runtimeapi.Image{
		testImage: {
			Id: "sha256:0123456789abcdef", RepoTags: []string{testImage}, Size: 1_234_567,
			RepoDigests: []string{"registry.test/app@sha256:ff"},
		},
		"registry.test/bare": {Id: "sha256:fedcba9876543210", RepoDigests: []string{"registry.test/bare@sha256:ee"}, Size: 999},
	}
	return &console{Server: s, t: t, socket: clienttest.Start(t, s), runDir: t.TempDir()}
}

// do runs one command line and returns its output and exit code.
func (c *console) do(args ...string) (stdout, stderr string, code int) {
	c.t.Helper()
	out, errs := sink{written: c.onOutput}, sink{}
	root := &cobra.Command{Use: "berth", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(Commands()...)
	words := 1 // of the command's name
	if len(args) > 1 && args[0] == "checkpoint" && args[1] == "inspect" {
		words = 2
	}
	root.SetArgs(append(args[:words:words], append([]string{"--socket", c.socket}, args[words:]...)...))
	root.SetOut(&out)
	root.SetErr(&errs)
	root.SetIn(strings.NewReader(c.stdin))
	code = cli.ExitCode(root.ExecuteContext(c.t.Context()), &errs)
	return out.String(), errs.String(), code
}

// must runs a command that must succeed, and returns its output.
func (c *console) must(args ...string) string {
	c.t.Helper()
	stdout, stderr, code := c.do(args...)
	if code != 0 {
		c.t.Fatalf("%q: exit code %d: %s", args, code, stderr)
	}
	return stdout
}

// detach starts a pod with the given spec and returns its ID.
func (c *console) detach(spec string) string {
	c.t.Helper()
	c.stdin = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {" + spec + "}\n"
	return strings.TrimSpace(c.must("run", "--detach", "--run-dir", c.runDir, "-"))
}

func app(name string) string { return "{name: " + name + ", image: '" + testImage + "'}" }

func TestRunExitsWithCodeOfFailedContainer(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"good": {Exits: []int32{0}, Output: []string{"stdout hi"}}, "bad": {Exits: []int32{42}},
	}})
	run := func(spec string) (string, string, int) {
		c.stdin = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {" + spec + "}\n"
		return c.do("run", "--run-dir", c.runDir, "-")
	}
	stdout, stderr, code := run("restartPolicy: Never, containers: [" + app("good") + "]")
	if stdout != "[good] hi\n" || code != 0 || !strings.Contains(stderr, "berth: pulling "+testImage) {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
	_, stderr, code = run("restartPolicy: Never, containers: [" + app("good") + ", " + app("bad") + "]")
	if code != 42 || !strings.HasSuffix(stderr, "berth: container bad exited with code 42\n") {
		t.Errorf("%q, %d", stderr, code)
	}
	_, stderr, code = run("runtimeClassName: x, containers: [{name: a, image: b, volumeDevices: [{name: d}]}]")
	if code != 125 || !strings.Contains(stderr, "-: refused:\n  spec.containers[0].volumeDevices: ") || !strings.Contains(stderr, "\n  spec.runtimeClassName: ") {
		t.Errorf("%q, %d", stderr, code)
	}
	if _, stderr, code = c.do("run"); code == 0 || !strings.Contains(stderr, "name a file: berth run FILE.yaml") {
		t.Errorf("%q, %d", stderr, code)
	}
	if _, stderr, code = c.do("run", "/no/such/pod.yaml"); code != 125 || !strings.Contains(stderr, "/no/such/pod.yaml: no such file") {
		t.Errorf("%q, %d", stderr, code)
	}
}

func TestDetachedPodIsListedAndRemoved(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"done": {Exits: []int32{3}}}})
	id := c.detach("terminationGracePeriodSeconds: 3, containers: [" + app("app") + ", " + app("done") + "]")

	table := c.must("ps")
	if lines := strings.Split(table, "\n"); len(lines) != 3 || !slices.Equal(strings.Fields(lines[1])[1:5], []string{"app", "web", testImage, "running"}) {
		t.Errorf("ps:\n%s", table)
	}
	if all := c.must("ps", "-a"); !strings.Contains(all, "exited (3)") {
		t.Errorf("ps -a:\n%s", all)
	}
	if pods := c.must("ps", "--pods"); !strings.Contains(pods, "default     ready   10.0.0.2,fd00::2") {
		t.Errorf("ps --pods:\n%s", pods)
	}
	var rows []containerRow
	if err := json.Unmarshal([]byte(c.must("ps", "-a", "-o", "json")), &rows); err != nil || len(rows) != 2 {
		t.Fatalf("%+v, %v", rows, err)
	}
	for _, row := range rows {
		if row.PodID != id || (row.Name == "done") != (row.ExitCode != nil) {
			t.Errorf("%+v", row)
		}
	}

	if _, stderr, code := c.do("rm", "--run-dir", c.runDir, "web"); code != 1 || !strings.Contains(stderr, "default/web is running; stop it with crictl, or use --force") {
		t.Errorf("rm of a running pod: %q, %d", stderr, code)
	}
	if _, stderr, code := c.do("rm", "app", "nothing"); code != 1 || !strings.Contains(stderr, "container") || !strings.Contains(stderr, `no container or pod "nothing"`) {
		t.Errorf("rm of a running container: %q, %d", stderr, code)
	}
	c.must("rm", "--run-dir", c.runDir, "--force", id[:12])
	asManifestSays := func(call string) bool { // part of the grace period may be over
		left, ok := strings.CutPrefix(call, "StopContainer app/0 ")
		return ok && slices.Contains([]string{"1", "2", "3"}, left)
	}
	if calls := c.Calls(); !slices.ContainsFunc(calls, asManifestSays) {
		t.Errorf("the manifest's grace period was not used: %q", calls)
	}
	if left := c.Left(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if entries, err := os.ReadDir(c.runDir); err != nil || len(entries) > 0 {
		t.Errorf("files left: %v, %v", entries, err)
	}
	if empty := c.must("ps", "-o", "json"); empty != "[]\n" {
		t.Errorf("nothing as JSON: %q", empty)
	}
}

func TestRemoveContainer(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"a": {Exits: []int32{0}}}})
	c.detach("containers: [" + app("a") + ", " + app("b") + "]")
	c.must("rm", "a")
	c.must("rm", "--force", "web/b")
	for _, want := range []string{"RemoveContainer a/0", "RemoveContainer b/0"} {
		if calls := c.Calls(); !slices.Contains(calls, want) {
			t.Errorf("calls %q lack %q", calls, want)
		}
	}
}

// A file whose pod exists is refused.
func TestRunRefusesSecondPodOfOneName(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	id := c.detach("containers: [" + app("a") + "]")
	_, stderr, code := c.do("run", "--detach", "--run-dir", c.runDir, "-")
	if want := "pod default/web exists already; remove it with: berth rm --force " + client.ShortID(id); code != 125 || !strings.Contains(stderr, want) {
		t.Errorf("%q, %d, want %q", stderr, code, want)
	}
}

func TestLogsPrintsSelectedLines(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{
		"app": {Exits: []int32{0}, Output: []string{"stdout one", "stderr two", "stdout three"}},
	}})
	c.detach("containers: [" + app("app") + "]")
	stdout, stderr, code := c.do("logs", "app")
	if stdout != "one\nthree\n" || stderr != "two\n" || code != 0 {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
	if got := c.must("logs", "-f", "--tail", "1", "app"); got != "three\n" {
		t.Errorf("logs -f --tail 1: %q", got)
	}
	stamp, line, _ := strings.Cut(c.must("logs", "-t", "--tail=1", "--since=1h", "app"), " ")
	if _, err := time.Parse(time.RFC3339Nano, stamp); err != nil || line != "three\n" {
		t.Errorf("logs -t: %q %q, %v", stamp, line, err)
	}
	if _, stderr, code := c.do("logs", "--since", "soon", "app"); code != 1 || !strings.Contains(stderr, "want a time like") {
		t.Errorf("%q, %d", stderr, code)
	}
}

// After a restart, logs prints the log of the new attempt, and with -p that of the one before.
func TestLogsOfPreviousAttempt(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"app": {Exits: []int32{1}, Output: []string{"stdout hi"}}}})
	pod := c.detach("containers: [" + app("app") + "]")
	if _, stderr, code := c.do("logs", "-p", "web/app"); code != 1 || stderr != "berth: container web/app has no previous attempt\n" {
		t.Errorf("%q, %d", stderr, code)
	}
	first := strings.TrimSpace(c.must("ps", "-aq", "--no-trunc"))
	conn, err := client.Dial(t.Context(), c.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	again, err := conn.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod,
		Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "app", Attempt: 1},
			Image: &runtimeapi.ImageSpec{Image: testImage}}})
	if err != nil {
		t.Fatal(err)
	}
	newest, _, err := conn.Find(t.Context(), again.GetContainerId())
	if err != nil {
		t.Fatal(err)
	}
	if old, err := previousOf(t.Context(), conn, newest); err != nil || old.GetId() != first {
		t.Errorf("%v, %v", old, err)
	}
}

// Ctrl-C is the normal way to stop following, so berth prints no error.
func TestInterruptEndsLogsSilently(t *testing.T) {
	c := newConsole(t, &clienttest.Server{Programs: map[string]clienttest.Program{"app": {Output: []string{"stdout one"}}}})
	c.detach("containers: [" + app("app") + "]")
	c.onOutput = func() { raise(t, syscall.SIGINT) }
	if stdout, stderr, code := c.do("logs", "-f", "app"); stdout != "one\n" || stderr != "" || code != 130 {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
}

func TestInterruptedPullExitsWithSignal(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	c.Hook = func(ctx context.Context, call string) error {
		if strings.HasPrefix(call, "PullImage") {
			raise(t, syscall.SIGTERM)
			<-ctx.Done()
		}
		return nil
	}
	if stdout, stderr, code := c.do("pull", testImage); stdout != "" || stderr != "berth: interrupted\n" || code != 143 {
		t.Errorf("%q, %q, %d", stdout, stderr, code)
	}
}

func raise(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(os.Getpid(), s); err != nil {
		t.Error(err)
	}
}

func TestLogPrinterKeepsPartialLinesOpen(t *testing.T) {
	var out bytes.Buffer
	p := &logPrinter{stdout: &out, stderr: &out}
	for _, r := range []crilog.Record{{Content: []byte("a"), Partial: true}, {Content: []byte("b")}} {
		if err := p.print(r); err != nil {
			t.Fatal(err)
		}
	}
	if out.String() != "ab\n" {
		t.Errorf("%q", out.String())
	}
}

func TestImagesAsTableAndJSON(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	c.must("pull", testImage)
	c.must("pull", "registry.test/bare")
	testutil.Golden(t, *updateGolden, "images.txt", c.must("images"))
	testutil.Golden(t, *updateGolden, "images.json", c.must("images", "--output=json"))
}

func TestPullPrintsImageID(t *testing.T) {
	c := newConsole(t, &clienttest.Server{})
	if got := c.must("pull", testImage); got != "sha256:0123456789abcdef\n" {
		t.Errorf("pull: %q", got)
	}
	if _, stderr, code := c.do("pull", "registry.test/none"); code != 1 || stderr != "berth: pull registry.test/none: not found: registry.test/none: manifest unknown\n" {
		t.Errorf("%q, %d", stderr, code)
	}
	if _, stderr, code := c.do("pull", "--creds", "user", testImage); code != 1 || !strings.Contains(stderr, "want user:password") {
		t.Errorf("%q, %d", stderr, code)
	}
}

func TestErrorWithoutDaemon(t *testing.T) {
	c := &console{t: t, socket: "/run/nothing/here.sock"}
	if _, stderr, code := c.do("ps"); code != 1 || stderr != "berth: no runtime listens on /run/nothing/here.sock (is berthd running?)\n" {
		t.Errorf("%q, %d", stderr, code)
	}
}
