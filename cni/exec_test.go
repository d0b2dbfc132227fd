package cni

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func TestPluginFailures(t *testing.T) {
	tests := []struct {
		name, body string
		code       codes.Code
		text       string // expected in the error
		cniCode    uint   // code of the *types.Error in the chain; 0: none
	}{
		{"CNI error", `printf %s '{"cniVersion":"1.0.0","code":110,"msg":"no address\nleft","details":"in 192.0.2.0/24"}'; exit 1`,
			codes.Internal, "no address left; in 192.0.2.0/24", 110},
		{"try again", `echo '{"code":11,"msg":"busy"}'; exit 1`, codes.Unavailable, "busy", 11},
		{"bad configuration", `echo '{"code":7,"msg":"no subnet"}'; exit 1`, codes.FailedPrecondition, "no subnet", 7},
		{"no CNI error", `echo oops >&2; echo '<html>'; exit 3`, codes.Internal, `exit status 3, without a CNI error; stdout "<html>\n", stderr "oops\n"`, 999},
		{"silent failure", `exit 1`, codes.Internal, `exit status 1, without a CNI error; stdout ""`, 999},
		{"died", `kill -9 $$`, codes.Internal, "signal: killed", 999},
		{"garbage", `echo 'Segmentation fault'`, codes.Internal, `it printed "Segmentation fault\n"`, 0},
		{"much garbage", `head -c 100000 /dev/zero | tr '\0' x`, codes.Internal, "and 99488 bytes more", 0},
		{"far too much", `head -c 3000000 /dev/zero`, codes.Internal, "printed a result of 3000000 bytes, the limit is 1048576", 0},
		{"nothing", `exit 0`, codes.Internal, "its result is invalid", 0},
		{"null", `echo null`, codes.Internal, "its result is invalid: null", 0},
		{"null address", `echo '{"cniVersion":"0.4.0","ips":[null]}'`, codes.Internal, `null in "ips"`, 0},
		{"bad address", `echo '{"cniVersion":"1.0.0","ips":[{"address":"300.1.2.3/24"}]}'`, codes.Internal, "300.1.2.3", 0},
		{"no address", `echo '{"cniVersion":"1.0.0","ips":[{}]}'`, codes.Internal, "invalid address", 0},
		{"bad interface", `echo '{"cniVersion":"1.0.0","ips":[{"interface":2,"address":"192.0.2.5/24"}]}'`, codes.Internal, "refers to interface 2 of 0", 0},
		{"unknown version", `echo '{"cniVersion":"9.0.0"}'`, codes.Internal, "9.0.0", 0},
	}
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b.plugin("a", tt.body)
			_, err := n.Add(context.Background(), b.plan(), testPod("p1"))
			if err == nil || errdefs.Code(err) != tt.code || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("error %v (%v), want %v with %q", err, errdefs.Code(err), tt.code, tt.text)
			}
			if err != nil && (!strings.Contains(err.Error(), `CNI ADD of pod p1 to network "n"`) || len(err.Error()) > 4096) {
				t.Errorf("error does not name the operation, or is long: %v", err)
			}
			reported, ok := errors.AsType[*types.Error](err)
			if ok != (tt.cniCode != 0) || ok && reported.Code != tt.cniCode {
				t.Errorf("CNI error %+v, want code %d", reported, tt.cniCode)
			}
		})
	}
}

// Ran gets each run with the plugin's type, the verb and the error. A verb that a plugin does not
// implement is no run.
func TestRunsAreReported(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `[ "$CNI_COMMAND" != DEL ] || { echo '{"code":11,"msg":"busy"}'; exit 1; }; `+okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	var runs []string
	n.plugins.ran = func(plugin, verb string, took time.Duration, err error) {
		if took <= 0 {
			t.Errorf("%s took %v", verb, took)
		}
		runs = append(runs, fmt.Sprintf("%s %s %v", plugin, verb, errdefs.Code(err)))
	}
	attachment := b.plan()
	if _, err := n.Add(t.Context(), attachment, testPod("p1")); err != nil {
		t.Fatal(err)
	}
	if err := n.Del(t.Context(), attachment, testPod("p1")); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("DEL: %v", err)
	}
	if got := strings.Join(runs, ", "); got != "a ADD OK, a DEL Unavailable" {
		t.Errorf("runs: %s", got)
	}
}

// A hung plugin is killed with its children, even if they hold its output open or have their own
// session.
func TestHungPluginIsKilledWithChildren(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", `sleep 1000 & echo $! >$record/child; setsid sh -c 'echo $$ >$record/apart; exec sleep 1000' & echo $$ >$record/self; wait`)
	r := &runner{log: testutil.Logger(t), runs: newRuns(b.runs, testutil.Logger(t))}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := r.ExecPlugin(ctx, b.bin+"/a", nil, []string{"CNI_COMMAND=DEL", "PATH=" + os.Getenv("PATH")})
		done <- err
	}()
	self, child, apart := b.readPID("self"), b.readPID("child"), b.readPID("apart")
	cancel()
	err := <-done
	if errdefs.Code(err) != codes.Canceled || !strings.Contains(err.Error(), "CNI plugin a did not finish in time and was killed") {
		t.Errorf("error %v (%v)", err, errdefs.Code(err))
	}
	testutil.Eventually(t, "plugin and child are gone", func() bool { return isGone(self) && isGone(child) && isGone(apart) })
	if left := readDir(t, b.runs); len(left) > 0 {
		t.Errorf("still noted as running: %v", left)
	}
}

// waits makes a plugin run until the test creates the file "go".
const waits = `echo $$ >$record/self; while [ ! -e $record/go ]; do sleep 0.01; done; ` + okResult

func TestCanceledCallerWaitsForPlugin(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run(verb, func(t *testing.T) {
			b := newBed(t)
			b.plugin("a", waits)
			b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
			n := b.start()
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- runOperation(ctx, n, verb, b.plan(), testPod("p1")) }()
			b.readPID("self")
			cancel()
			testutil.Must(t, os.WriteFile(b.record+"/go", nil, 0o600))
			testutil.Must(t, <-done)
			if err := runOperation(ctx, n, verb, b.plan(), testPod("p2")); !errors.Is(err, context.Canceled) {
				t.Errorf("an operation started after its caller was cancelled: %v", err)
			}
		})
	}
}

func TestLeaveKeepsPluginRunning(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", waits)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	done := make(chan error, 1)
	go func() { done <- n.Del(context.Background(), b.plan(), testPod("p1")) }()
	plugin := b.readPID("self")
	n.Leave()
	if err := <-done; errdefs.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "the plugin continues") {
		t.Errorf("error %v (%v)", err, errdefs.Code(err))
	}
	if isGone(plugin) || len(readDir(t, b.runs)) != 1 {
		t.Error("the plugin was killed or has no note")
	}
	for _, verb := range []string{"ADD", "DEL"} {
		if err := runOperation(context.Background(), n, verb, b.plan(), testPod("p2")); errdefs.Code(err) != codes.Unavailable {
			t.Errorf("%s started: %v", verb, err)
		}
	}
	if err := n.GC(context.Background(), nil); errdefs.Code(err) != codes.Unavailable {
		t.Errorf("GC started: %v", err)
	}
	testutil.Must(t, os.WriteFile(b.record+"/go", nil, 0o600))
	testutil.Eventually(t, "the plugin has exited", func() bool { return isGone(plugin) && len(readDir(t, b.runs)) == 0 })
	if calls := b.calls(); len(calls) != 1 {
		t.Errorf("calls: %v", calls)
	}
}

// The race detector fails this test if the plugin's late result races with Add's return. So no
// operation between the two may synchronize the goroutines, not even a write.
func TestResultAfterLeave(t *testing.T) {
	b := newBed(t)
	b.plugin("a", waits)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	done := make(chan error, 1)
	go func() { done <- runOperation(context.Background(), n, "ADD", b.plan(), testPod("p1")) }()
	b.readPID("self")
	n.Leave()
	if <-done == nil {
		t.Error("Add waited for the plugin")
	}
	testutil.Must(t, os.Mkdir(b.record+"/go", 0o700))
	testutil.Must(t, n.gate.Acquire(t.Context(), wholeGate)) // waits for the result
}

func TestCanceledGCStartsNoPlugin(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	b.add(testPod("p1"))
	b.add(testPod("p2"))
	b.forget()
	b.plugin("a", waits)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.GC(ctx, nil) }()
	b.readPID("self")
	cancel()
	testutil.Must(t, os.WriteFile(b.record+"/go", nil, 0o600))
	if err := <-done; !errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "killed") {
		t.Errorf("error %v", err)
	}
	if calls := b.calls(); len(calls) != 1 || !strings.HasPrefix(calls[0], "a DEL") {
		t.Errorf("calls: %v", calls)
	}
}

func runOperation(ctx context.Context, n *Network, verb string, att Attachment, pod Pod) error {
	if verb == "DEL" {
		return n.Del(ctx, att, pod)
	}
	_, err := n.Add(ctx, att, pod)
	return err
}

func TestOperationHasDeadline(t *testing.T) {
	b := newBed(t)
	b.plugin("a", `sleep 1000`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n, err := New(Config{ConfDir: b.conf, BinDirs: []string{b.bin}, CacheDir: b.cache, Timeout: 1}, testutil.Logger(t))
	testutil.Must(t, err)
	defer n.Close()
	b.n = n
	if _, err := n.Add(context.Background(), b.plan(), testPod("p1")); errdefs.Code(err) != codes.DeadlineExceeded {
		t.Errorf("error %v (%v)", err, errdefs.Code(err))
	}
}

// A plugin run ends with the plugin's exit, not with the end of its output.
func TestChildOutlivesPlugin(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", `if [ "$CNI_COMMAND" = ADD ]; then sleep 1000 & echo $! >$record/child; fi; `+okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	r, err := n.Add(context.Background(), b.plan(), testPod("p1"))
	testutil.Must(t, err)
	if len(r.IPs) != 1 || r.IPs[0].String() != "192.0.2.5" {
		t.Errorf("addresses %v", r.IPs)
	}
	child := b.readPID("child")
	b.start() // another daemon
	if isGone(child) {
		t.Error("the child of a plugin that succeeded was killed")
	}
	if left := readDir(t, b.runs); len(left) != 1 || !strings.HasSuffix(left[0], overMark) {
		t.Errorf("noted: %v", left)
	}
	testutil.Must(t, unix.Kill(child, unix.SIGKILL))
	testutil.Eventually(t, "child is gone", func() bool { return isGone(child) })
	testutil.Eventually(t, "its cgroup is removed with a later run", func() bool {
		testutil.Must(t, b.n.Del(context.Background(), b.plan(), testPod("p1")))
		return len(readDir(t, b.runs)) == 0
	})
}

func TestChildrenOfKilledPluginAreKilled(t *testing.T) {
	testutil.NeedRoot(t)
	const stay = `echo $$ >$record/child; exec sleep 1000`
	tests := []struct{ name, start string }{
		{"session of its own", `setsid sh -c '` + stay + `' &`},
		{"second fork", `(setsid sh -c '` + stay + `' &)`},
		{"emptied environment", `env -i record=$record /usr/bin/setsid sh -c 'exec env -i /bin/sh -c "echo \$\$ >'$record'/child; exec /bin/sleep 1000"' &`},
		{"always in execve", `printf '#!/bin/sh\n[ -e '$record'/child ] || echo $$ >'$record'/child\nexec $0\n' >$record/again; chmod +x $record/again; setsid $record/again &`},
		{"stopped", `setsid sh -c 'echo $$ >$record/child; kill -STOP $$' &`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			b := newBed(t)
			b.plugin("a", test.start+`
while [ ! -s $record/child ]; do sleep 0.01; done
kill -9 $$`)
			b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
			n := b.start()
			if _, err := n.Add(context.Background(), b.plan(), testPod("p1")); err == nil || !strings.Contains(err.Error(), "signal: killed") {
				t.Errorf("ADD: %v", err)
			}
			if !isGone(b.readPID("child")) {
				t.Error("the child still runs")
			}
			if left := readDir(t, b.runs); len(left) > 0 {
				t.Errorf("still noted as running: %v", left)
			}
		})
	}
}

// The search for a plugin's processes must not read other processes' memory through /proc. Here an
// unprivileged process has an environment of 1 GiB.
func TestHugeEnvironmentIsNotRead(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", `kill -9 $$`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	hostile := b.startHugeEnvironment()
	n := b.start()
	testutil.Must(t, os.WriteFile("/proc/self/clear_refs", []byte("5"), 0)) // resets the peak to the current usage
	before := peakMemory(t)
	if _, err := n.Add(context.Background(), b.plan(), testPod("p1")); err == nil {
		t.Error("ADD succeeded")
	}
	n.Close()
	testutil.Must(t, os.WriteFile(filepath.Join(b.runs, runPrefix+"LEFT"), []byte("/sys/fs/cgroup/"+runPrefix+"LEFT\nADD\n"), 0o600))
	b.start() // searches for runs of an earlier daemon
	if grown := peakMemory(t) - before; grown > 128<<20 {
		t.Errorf("peak memory grew by %d MiB", grown>>20)
	}
	if isGone(hostile) {
		t.Error("a process that no plugin started was killed")
	}
}

func TestAddWaitsForPluginFile(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	waiting := make(chan string, busyRetries)
	r := &runner{runs: newRuns("", testutil.Logger(t)), log: slog.New(slog.NewTextHandler(sink(waiting), &slog.HandlerOptions{Level: slog.LevelDebug}))}
	f, err := os.OpenFile(b.bin+"/a", os.O_WRONLY, 0)
	testutil.Must(t, err)
	defer f.Close()

	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	run := func() {
		_, err := r.ExecPlugin(ctx, b.bin+"/a", nil, []string{"CNI_COMMAND=ADD", "PATH=" + os.Getenv("PATH")})
		done <- err
	}
	go run()
	<-waiting
	cancel()
	if err := <-done; errdefs.Code(err) != codes.Canceled {
		t.Errorf("error %v (%v), want Canceled", err, errdefs.Code(err))
	}
	ctx = context.Background()
	go run()
	<-waiting
	testutil.Must(t, f.Close())
	testutil.Must(t, <-done)
}

// sink is a writer that sends its input to a channel.
type sink chan<- string

func (s sink) Write(b []byte) (int, error) {
	s <- string(b)
	return len(b), nil
}

// The next daemon kills the hung plugin's children when it starts. If they continued after its DEL,
// their changes would never be undone.
func TestNewKillsHungPluginOfKilledDaemon(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", `setsid sh -c 'echo $$ >$record/apart; exec sleep 1000' & sleep 1000 & echo $! >$record/child; echo $$ >$record/self; wait`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	daemon := b.killableDaemon()
	plugin, child, apart := b.readPID("self"), b.readPID("child"), b.readPID("apart")
	daemon.kill()
	b.start()
	if !isGone(plugin) || !isGone(child) || !isGone(apart) {
		t.Error("the next daemon started while the plugin's child runs")
	}
	if left := readDir(t, b.runs); len(left) > 0 {
		t.Errorf("still noted as running: %v", left)
	}
}

func TestNewWaitsForPluginOfKilledDaemon(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", `echo $$ >$record/self; while [ ! -e $record/killed ]; do sleep 0.01; done; sleep 0.5; echo $$ >$record/done`)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	daemon := b.killableDaemon()
	plugin := b.readPID("self")
	daemon.kill()
	testutil.Must(t, os.WriteFile(filepath.Join(b.record, "killed"), nil, 0o600))
	b.start()
	if b.readPID("done") != plugin || !isGone(plugin) {
		t.Error("the plugin was interrupted, or not waited for")
	}
}

// testDaemon is another process that adds a pod in a bed.
type testDaemon struct {
	t *testing.T
	*exec.Cmd
}

func (b *bed) killableDaemon() testDaemon {
	b.t.Helper()
	d := testDaemon{b.t, exec.Command("/proc/self/exe")}
	d.Env = append(os.Environ(), daemonVar+"="+filepath.Dir(b.conf))
	testutil.Must(b.t, d.Start())
	return d
}

func (d testDaemon) kill() {
	d.t.Helper()
	testutil.Must(d.t, d.Process.Kill())
	if d.Wait() == nil {
		d.t.Error("the daemon was not killed")
	}
}

// ADD needs a note. DEL does not, because it may free space on a full disk.
func TestRunWithoutNote(t *testing.T) {
	testutil.NeedRoot(t)
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	testutil.Must(t, os.RemoveAll(b.runs))
	testutil.Must(t, os.WriteFile(b.runs, nil, 0o600)) // instead of the directory
	if _, err := n.Add(context.Background(), b.plan(), testPod("p1")); err == nil || !strings.Contains(err.Error(), "write note of a CNI plugin run") {
		t.Errorf("ADD: %v", err)
	}
	testutil.Must(t, n.Del(context.Background(), b.plan(), testPod("p1")))
	if calls := b.calls(); len(calls) != 1 || !strings.HasPrefix(calls[0], "a DEL") {
		t.Errorf("calls: %v", calls)
	}
}

func readDir(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	testutil.Must(t, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestPluginEnvironment(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "/run/notify")
	t.Setenv("LISTEN_FDS", "1")
	t.Setenv("CNI_ARGS", "from=outside")
	t.Setenv("HTTPS_PROXY", "kept")
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	b.start("/opt/other")
	b.add(testPod("p1"))
	env := strings.Split(b.saw("a.ADD.env"), "\n")
	for _, kv := range env {
		if strings.HasPrefix(kv, "NOTIFY_SOCKET=") || strings.HasPrefix(kv, "LISTEN_") {
			t.Errorf("the plugin sees %s", kv)
		}
	}
	for name, want := range map[string]string{
		"CNI_COMMAND":     "ADD",
		"CNI_CONTAINERID": "p1",
		"CNI_NETNS":       "/proc/self/ns/net",
		"CNI_IFNAME":      "eth0",
		"CNI_PATH":        b.bin + ":/opt/other",
		"CNI_ARGS":        "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_INFRA_CONTAINER_ID=p1;K8S_POD_UID=uid-1",
		"HTTPS_PROXY":     "kept",
	} {
		if got := getenv(env, name); got != want {
			t.Errorf("%s=%q, want %q", name, got, want)
		}
	}
}

// A damaged or forged note must not name a cgroup, because its processes would be killed.
func TestReadRun(t *testing.T) {
	const name = runPrefix + "ID"
	tests := []struct{ name, file, content, group string }{
		{"whole", name, "/sys/fs/cgroup/x/" + name + "\nADD\n", "/sys/fs/cgroup/x/" + name},
		{"over", name + overMark, "/sys/fs/cgroup/" + name + "\nADD\n", "/sys/fs/cgroup/" + name},
		{"empty", name, "", ""},
		{"cut off", name, "/sys/fs/cgroup/" + name, ""},
		{"another cgroup", name, "/sys/fs/cgroup/\nADD\n", ""},
		{"relative", name, name + "\nADD\n", ""},
		{"of an earlier version", "ID", "ADD /bin/ID ID\n", ""},
		{"too long", name, "/" + name + "\n" + strings.Repeat("x", maxNote), ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), test.file)
			testutil.Must(t, os.WriteFile(path, []byte(test.content), 0o600))
			if got := readRun(path); got != (run{name: test.file, group: test.group}) {
				t.Errorf("read %+v", got)
			}
		})
	}
}
