package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// examples has the expected result of each manifest in contrib/examples.
var examples = map[string]struct {
	runs bool     // until it is stopped
	want []string // texts of the output
}{
	"config.yaml":      {want: []string{"[show] level info, connects to postgres://web:not-a-secret@db.example/web"}},
	"hostnetwork.yaml": {want: []string{"[interfaces] on "}},
	"hostpath.yaml":    {want: []string{"all types work"}},
	"init.yaml":        {want: []string{"[work] did item 3", "[work] all 3 done"}},
	"web.yaml":         {runs: true, want: []string{"serving on port 8080", "[client] hello from web"}},
}

// Every manifest in contrib/examples runs under the names that users write: docker.io is a mirror.
func TestExamplesRun(t *testing.T) {
	r := harness.NewRegistry(t)
	img := harness.Get(fixture.Image(v1.Config{Env: []string{"PATH=/bin"}}))(t)
	for _, tag := range []string{"latest", "1.37"} {
		harness.Push(t, r, "library/busybox:"+tag, img)
	}
	d := harness.StartDaemon(t, harness.WithHosts("docker.io",
		fmt.Sprintf("server = \"https://registry.invalid\"\n[host.%q]\n", "http://"+r.Host)))
	paths := harness.Get(filepath.Glob("../contrib/examples/*.yaml"))(t)
	harness.Equal(t, "number of examples", len(paths), len(examples))
	t.Cleanup(func() { harness.Must(t, os.RemoveAll("/tmp/berth-example")) })
	for _, path := range paths {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".yaml"), func(t *testing.T) { runExample(t, d, path) })
	}
	harness.Equal(t, "pods", strings.Count(runBerth(t, d, "ps", "--all", "--pods"), "\n"), 1)
	harness.Equal(t, "files of berth run", fmt.Sprint(machine.ReadDir(d.Dir+"/run")), "[]")
}

// runExample runs a manifest in the foreground until its result, and stops it if it does not end.
func runExample(t *testing.T, d *harness.Daemon, path string) {
	want, known := examples[filepath.Base(path)]
	if !known {
		t.Fatal("the test has no expected result for this example")
	}
	run := startRun(t, d, runArgs(d, path)...)
	code := 0
	if want.runs {
		run.waitFor(t, want.want...)
		harness.Must(t, run.cmd.Process.Signal(syscall.SIGINT))
		code = 130
	}
	_ = run.cmd.Wait() // the exit code tells
	harness.Equal(t, "exit code", run.cmd.ProcessState.ExitCode(), code)
	out := run.output(t)
	harness.WantText(t, "output", out, want.want...)
	if want.runs {
		harness.WantText(t, "output", out, "Ctrl-C again kills")
	}
	if t.Failed() {
		t.Logf("output:\n%s", out)
	}
}

// foregroundRun is a berth run in the foreground.
type foregroundRun struct {
	cmd *exec.Cmd
	log string
}

func startRun(t *testing.T, d *harness.Daemon, args ...string) *foregroundRun {
	t.Helper()
	log := harness.Get(os.Create(filepath.Join(t.TempDir(), "out")))(t)
	defer log.Close()
	r := &foregroundRun{cmd: operatorCommand(d, args...), log: log.Name()}
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	harness.Must(t, r.cmd.Start())
	t.Cleanup(func() {
		if r.cmd.ProcessState == nil { // the test has failed
			_ = r.cmd.Process.Signal(syscall.SIGTERM)
			_ = r.cmd.Wait()
		}
	})
	return r
}

func (r *foregroundRun) output(t *testing.T) string {
	t.Helper()
	return string(harness.Get(os.ReadFile(r.log))(t))
}

// waitFor waits until the output has all texts.
func (r *foregroundRun) waitFor(t *testing.T, texts ...string) {
	t.Helper()
	harness.Eventually(t, "the output has all texts", func() error {
		out := harness.Get(os.ReadFile(r.log))(t)
		for _, text := range texts {
			if !bytes.Contains(out, []byte(text)) {
				return fmt.Errorf("no %q in the output: %s", text, out)
			}
		}
		return nil
	})
}
