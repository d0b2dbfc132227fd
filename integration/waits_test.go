package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// waitInfo is an entry of "waits" in verbose Status.
type waitInfo struct {
	What, Object          string
	Seconds, LimitSeconds float64
	Overdue               bool
}

func waitsOf(t *testing.T, info map[string]string) (waits []waitInfo) {
	t.Helper()
	harness.Must(t, json.Unmarshal([]byte(info["waits"]), &waits))
	return waits
}

// passesLimit waits until verbose Status shows an overdue wait for an object, with its age and
// limit in seconds. The log must contain the wait, with the stacks of all goroutines.
func passesLimit(t *testing.T, d *harness.Daemon, what, object string, limit int) {
	t.Helper()
	harness.Eventually(t, "a wait for "+what+" passes its limit", func() error {
		info := harness.Get(d.Cri.Status(t.Context(), true))(t).Info
		for _, w := range waitsOf(t, info) {
			if w.What == what && w.Object == object && w.Overdue && w.Seconds > w.LimitSeconds && w.LimitSeconds == float64(limit) {
				return nil
			}
		}
		return fmt.Errorf("waits are %s", info["waits"])
	})
	harness.Eventually(t, "the wait is logged", func() error {
		logged, stacks := false, false
		for _, line := range machine.ReadLines(d.LogFile()) {
			if strings.Contains(line, "a wait has passed its limit") {
				stacks = stacks || strings.Contains(line, "goroutine ") // stacks are logged once a minute, perhaps with an earlier wait
				logged = logged || strings.Contains(line, strconv.Quote(what)) && strings.Contains(line, object) && strings.Contains(line, fmt.Sprintf("limit=%d ", limit))
			}
		}
		if !logged || !stacks {
			return fmt.Errorf("the log has no line with stacks for the wait for %s:\n%s", what, d.Tail())
		}
		return nil
	})
	if n := harness.Get(d.Cri.Status(t.Context(), true))(t).Info["waitsPastLimit"]; n == "" || n == "0" {
		t.Errorf("verbose Status counts %q waits past their limits", n)
	}
	if scrape(t, d)["berth_waits_past_limit_total"] < 1 {
		t.Error("the metrics count no wait past its limit")
	}
}

const (
	shortWaits = `wait_limit = "1s"`
	// longWaits raises the limit for waits that follow others, because these take longer than a
	// second on a busy machine. The daemon logs stacks only with the first overdue wait of a
	// minute.
	longWaits = `wait_limit = "5s"`
)

// A wait for the exit of a container with a frozen monitor passes its limit, and ends when the
// monitor is killed.
func TestWaitForFrozenMonitor(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(shortWaits))
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	harness.Must(t, syscall.Kill(harness.MonitorOf(t, d, c), syscall.SIGSTOP))
	ended := harness.Go(func() error { return d.Cri.StopContainer(t.Context(), c.Id, 0) })
	passesLimit(t, d, "exit after SIGKILL", "container "+c.Id, 1)
	harness.Must(t, <-ended)
}

// A wait for a hanging CNI plugin passes its limit, and ends when the plugin is killed.
func TestWaitForHungPlugin(t *testing.T) {
	plugin := faults.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, harness.WithConfig(longWaits), plugin.Option)
	plugin.Inject(t, "ADD", faults.Hang)
	config, ended := d.PodConfig(t), make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { _, err := d.Cri.RunPodSandbox(ctx, config, ""); ended <- err }()
	plugin.AwaitChildren(t, 0)
	records := func() []string { return machine.ReadDir(filepath.Join(d.Root, "pods")) }
	id := strings.TrimSuffix(records()[0], ".record")
	passesLimit(t, d, "CNI ADD", "pod "+id, 5)
	if now := scrape(t, d); now["berth_waits_past_limit"] < 1 || now["berth_longest_wait_seconds"] < 5 {
		t.Errorf("metrics during the wait: %g past their limit, the longest %g s", now["berth_waits_past_limit"], now["berth_longest_wait_seconds"])
	}
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), id)) // never created, so unknown
	endHungPlugins(t)
	if err := <-ended; err == nil {
		t.Error("the pod runs although the plugin was killed")
	}
}

// endHungPlugins kills the children for which hanging plugins wait.
func endHungPlugins(t *testing.T) {
	t.Helper()
	for _, line := range []string{"sleep 100000", "sleep 100001"} {
		for _, pid := range machine.ProcessesOf(line) {
			machine.KillProcess(t, pid)
		}
	}
}

// Limits, in seconds, of the waits that TestWaitsAreShown causes.
const (
	minutes      = 60
	margin       = 15  // the daemon adds it to a call's own limit
	generalLimit = 100 // wait_limit
	callLimit    = 4*minutes + margin
)

// waitTest causes waits and checks that verbose Status shows them.
type waitTest struct {
	d      *harness.Daemon
	plugin *faults.Plugin
	seen   map[string]string // maps waits to objects

	release chan struct{}  // closed when registries answer
	stopped []int          // processes stopped by SIGSTOP
	calls   sync.WaitGroup // waiting calls
	ctx     context.Context
}

// begin makes a call in the background, which waits until its cause is removed.
func (w *waitTest) begin(t *testing.T, what string, call func(ctx context.Context) error) {
	w.calls.Go(func() {
		if err := call(w.ctx); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	})
}

// shown waits until verbose Status shows a wait for an object, and checks its limit in seconds.
func (w *waitTest) shown(t *testing.T, what, object string, limit float64) {
	t.Helper()
	harness.Eventually(t, "verbose Status shows a wait for "+what, func() error {
		info := harness.Get(w.d.Cri.Status(t.Context(), true))(t).Info
		for _, wait := range waitsOf(t, info) {
			if wait.What == what && harness.Contains(wait.Object, object) && wait.Seconds > 0 {
				harness.Equal(t, "limit of the wait for "+what, wait.LimitSeconds, limit)
				w.seen[what] = wait.Object
				return nil
			}
		}
		return fmt.Errorf("waits are %s", info["waits"])
	})
}

// stop stops processes until end is called.
func (w *waitTest) stop(t *testing.T, pids ...int) {
	t.Helper()
	w.stopped = append(w.stopped, pids...)
	for _, pid := range pids {
		harness.Must(t, syscall.Kill(pid, syscall.SIGSTOP))
	}
}

// Verbose Status shows each wait with its object, age and limit, exactly as long as it lasts. All
// waits that a test can cause last at the same time here. docs/reliability.md lists them. Status
// shows an operation's wait even after its caller has disconnected.
func TestWaitsAreShown(t *testing.T) {
	plugin := faults.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, harness.WithConfig(`wait_limit = "100s"`, `pull.stall_timeout = "10m"`), plugin.Option)
	d.Pull(t, harness.BaseImage)
	host, victim := d.RunPod(t, harness.HostNetwork), d.RunPod(t)
	stubborn, frozen := host.Run(t, harness.Script("trap '' TERM; while :; do sleep 0.05; done")), host.Run(t)
	created := host.Create(t)
	config := d.PodConfig(t)
	stubborn.Pid(t) // waits until the container runs its program

	w := &waitTest{d: d, plugin: plugin, seen: map[string]string{}, release: make(chan struct{})}
	// end ends all waits. It must also run after a failure. Otherwise the test would wait for a
	// stop with a grace period of 100 minutes.
	end := sync.OnceFunc(func() {
		close(w.release)
		plugin.Inject(t, "ADD", "")
		plugin.Inject(t, "DEL", "")
		for _, pid := range w.stopped {
			_ = syscall.Kill(pid, syscall.SIGCONT) // fails if the process has exited
		}
		machine.KillProcess(t, stubborn.Pid(t))
	})
	var cancel context.CancelFunc
	w.ctx, cancel = context.WithCancel(t.Context())
	defer w.calls.Wait()
	defer cancel()
	defer end()

	w.pulls(t)
	w.pods(t, config, victim)
	w.containers(t, stubborn, frozen, created)

	end()
	w.calls.Wait()
	harness.Eventually(t, "all waits have ended", func() error {
		for _, wait := range waitsOf(t, harness.Get(d.Cri.Status(t.Context(), true))(t).Info) {
			if w.seen[wait.What] == wait.Object {
				return fmt.Errorf("verbose Status still shows the wait for %s of %s", wait.What, wait.Object)
			}
		}
		return nil
	})
}

// pulls causes waits of pulls for a registry that does not answer.
func (w *waitTest) pulls(t *testing.T) {
	t.Helper()
	for what, path := range map[string]string{"layer download and unpack": "/blobs/", "registry manifest": "/manifests/"} {
		registry := harness.NewRegistry(t)
		img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("of", 0o644, registry.Host)})
		name, _ := harness.Push(t, registry, "app:latest", img)
		object := "image " + registry.Host
		if path == "/blobs/" { // requests for the layer, not for the config
			layers := harness.Get(img.Layers())(t)
			diffID := harness.Get(layers[1].DiffID())(t)
			path, object = path+harness.DigestOf(t, layers[1]), "layer "+diffID.String()
		}
		registry.Hook(untilClosed(w.release, path))
		w.begin(t, "pull", func(ctx context.Context) error {
			_, err := w.d.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: name}, nil, nil)
			return err
		})
		w.shown(t, what, object, 0)
	}
}

// pods causes waits of calls for pods whose CNI plugin does not return.
func (w *waitTest) pods(t *testing.T, config *runtimeapi.PodSandboxConfig, victim *harness.Pod) {
	t.Helper()
	w.plugin.Inject(t, "ADD", faults.WorkPause)
	run := func(ctx context.Context) error { _, err := w.d.Cri.RunPodSandbox(ctx, config, ""); return err }
	w.begin(t, "run", run)
	w.shown(t, "CNI ADD", "pod ", generalLimit)
	w.begin(t, "run, joined", run)
	w.shown(t, "concurrent creation", config.Metadata.Name, callLimit)
	w.shown(t, "run", config.Metadata.Name, callLimit)
	w.plugin.Inject(t, "DEL", faults.WorkPause)
	w.begin(t, "stop pod", func(ctx context.Context) error { return w.d.Cri.StopPodSandbox(ctx, victim.Id) })
	w.shown(t, "CNI DEL", "pod "+victim.Id, generalLimit)
	w.shown(t, "stop", "pod "+victim.Id, callLimit)
	w.begin(t, "remove pod", func(ctx context.Context) error { return w.d.Cri.RemovePodSandbox(ctx, victim.Id) })
	w.shown(t, "lock to remove", "pod "+victim.Id, callLimit)
	w.shown(t, "remove", "pod "+victim.Id, callLimit)
}

// containers causes waits of calls for containers. stubborn ignores SIGTERM, the monitor of frozen
// is stopped, and the launchers are stopped before the start of created.
func (w *waitTest) containers(t *testing.T, stubborn, frozen, created *harness.Container) {
	t.Helper()
	w.begin(t, "exec", func(ctx context.Context) error {
		_, err := harness.RawRuntime(t, w.d).ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: stubborn.Id, Cmd: []string{"sleep", "1000"}, Timeout: 10 * minutes})
		return err
	})
	w.shown(t, "end of exec", "container "+stubborn.Id, 10*minutes+margin)
	harness.EventuallyTrue(t, "the exec runs its command", func() bool { return len(machine.ProcessesOf("sleep 1000")) > 0 })
	w.begin(t, "stop container", func(ctx context.Context) error { return w.d.Cri.StopContainer(ctx, stubborn.Id, 100*minutes) })
	w.shown(t, "exit", "container "+stubborn.Id, 100*minutes+margin)
	w.stop(t, harness.MonitorOf(t, w.d, frozen))
	w.begin(t, "reopen", func(ctx context.Context) error { return w.d.Cri.ReopenContainerLog(ctx, frozen.Id) })
	w.shown(t, "reopening of its log", "container "+frozen.Id, generalLimit)
	w.d.WaitIdle(t)
	w.stop(t, w.d.Launchers()...)
	w.begin(t, "start", func(ctx context.Context) error { return w.d.Cri.StartContainer(ctx, created.Id) })
	w.shown(t, "container launch", "container "+created.Id, generalLimit)
	w.shown(t, "start", "container "+created.Id, callLimit)
}

// untilClosed returns a registry hook that blocks requests of paths that contain part until end is
// closed.
func untilClosed(end chan struct{}, part string) func(http.ResponseWriter, *http.Request) bool {
	return func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, part) {
			<-end
		}
		return false
	}
}

// The daemon sends READY to systemd, then WATCHDOG as long as it answers at its socket, and finally
// STOPPING.
func TestSystemdWatchdog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	systemd := harness.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	defer systemd.Close()
	d := harness.StartDaemon(t, harness.WithEnv("NOTIFY_SOCKET="+path, "WATCHDOG_USEC=1500000", "WATCHDOG_PID="))
	next := func() string {
		harness.Must(t, systemd.SetReadDeadline(time.Now().Add(harness.Patience)))
		message := make([]byte, 100)
		return string(message[:harness.Get(systemd.Read(message))(t)])
	}
	harness.Equal(t, "first message", next(), "READY=1")
	for range 3 {
		harness.Equal(t, "next message", next(), "WATCHDOG=1")
	}
	harness.Must(t, os.Rename(d.Socket, d.Socket+".away"))
	harness.EventuallyTrue(t, "the daemon finds that it is unhealthy", func() bool { return strings.Contains(d.Tail(), "the daemon is unhealthy") })
	harness.Must(t, os.Rename(d.Socket+".away", d.Socket))
	for next() != "WATCHDOG=1" { // those before it was unhealthy
		t.Error("another message than WATCHDOG=1")
	}
	d.Stop(t)
	for message := next(); message != "STOPPING=1"; message = next() {
		harness.Equal(t, "message before the last", message, "WATCHDOG=1")
	}
	d.Start(t)
}

// If a volume's server is dead, CreateContainer returns at the caller's deadline, and the daemon's
// list of waits shows the call. Repeated attempts block only one stat of the volume. Meanwhile the
// pod can be removed without leftovers, and other pods work.
func TestCreateWithDeadVolumeEndsAtDeadline(t *testing.T) {
	volume := faults.NewVolume(t)
	d := harness.StartDaemon(t)
	defer volume.Answer()
	dead := harness.Mount(&runtimeapi.Mount{HostPath: volume.Path(), ContainerPath: "/v", SelinuxRelabel: true})
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	looks := func() (looks, waiting int) {
		for _, w := range waitsOf(t, harness.Get(d.Cri.Status(t.Context(), true))(t).Info) {
			switch {
			case w.What == "answer" && w.Object == "volume "+volume.Path():
				looks++
			case w.What == "answer of volumes":
				waiting++
			}
		}
		return looks, waiting
	}
	image := d.Pull(t, harness.BaseImage)
	for i, in := range []*harness.Pod{pod, pod, other} {
		ctx, giveUp := context.WithCancel(t.Context())
		config := in.ContainerConfig(dead)
		config.Image = &runtimeapi.ImageSpec{Image: image}
		ended := harness.Go(func() error { _, err := d.Cri.CreateContainer(ctx, in.Id, config, in.Config); return err })
		harness.Eventually(t, "CreateContainer waits for its volume", func() error {
			if hang, waiting := looks(); hang != 1 || waiting != i+1 {
				return fmt.Errorf("%d lookups hang, want 1; %d containers wait, want %d", hang, waiting, i+1)
			}
			return nil
		})
		giveUp()
		harness.WantCode(t, <-ended, codes.Canceled)
	}
	volume.AwaitLookups(t, 1)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	harness.Equal(t, "output of a container of another pod", other.Sh(t, "echo fine"), "fine\n")
	d.StateMatches(t)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), other.Id))
	if hang, waiting := looks(); hang != 1 || waiting != 0 {
		t.Errorf("after the removal of the pods %d lookups hang, want 1; %d containers wait, want 0", hang, waiting)
	}
}
