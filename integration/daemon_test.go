package integration

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/integration/fixture"
)

// callTimeout is kubelet's deadline for a call.
const callTimeout = 2 * time.Minute

// daemon is one `berth serve` with directories of its own, and CRI clients to it.
type daemon struct {
	dir     string   // everything below is in it; short, because socket paths must be
	root    string   // --root
	state   string   // --state
	socket  string   // --listen
	confDir string   // --cni-conf-dir
	dataDir string   // host-local's addresses
	logDir  string   // parent of the pods' log directories
	certs   string   // --registry-dir
	binDirs []string // --cni-bin-dir

	extra []string // lines of the configuration file
	env   []string

	cmd     *exec.Cmd
	exited  chan struct{} // closed when cmd has been waited for
	cri     internalapi.RuntimeService
	images  internalapi.ImageManagerService
	objects []string // IDs of all pods and containers made, for the leak check
	parents []string // the pods' cgroups
	mounts  []string // made for the daemon by options
	empty   snapshot // the daemon and the machine before the first pod
	pods    atomic.Int32
}

type daemonOption func(*testing.T, *daemon)

// withConfig adds lines to the configuration file.
func withConfig(lines ...string) daemonOption {
	return func(_ *testing.T, d *daemon) { d.extra = append(d.extra, lines...) }
}

// withEnv adds variables to the daemon's environment.
func withEnv(env ...string) daemonOption {
	return func(_ *testing.T, d *daemon) { d.env = append(d.env, env...) }
}

// withNetwork replaces the default network configuration; "" is none at all.
func withNetwork(conflist string) daemonOption {
	return func(t *testing.T, d *daemon) {
		if conflist == "" {
			must(t, os.Remove(d.networkFile()))
			return
		}
		must(t, os.WriteFile(d.networkFile(), []byte(conflist), 0o600))
	}
}

// withHosts writes a hosts.toml for a registry host.
func withHosts(host, content string) daemonOption {
	return func(t *testing.T, d *daemon) { d.writeHosts(t, host, content) }
}

func (d *daemon) writeHosts(t *testing.T, host, content string) {
	t.Helper()
	dir := filepath.Join(d.certs, host)
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(content), 0o600))
}

func (d *daemon) networkFile() string { return filepath.Join(d.confDir, "10-test.conflist") }

var daemons atomic.Int32

// startDaemon starts a daemon for this test. When the test ends, its pods, images
// and the daemon itself are removed, and the leak check is run.
func startDaemon(t *testing.T, opts ...daemonOption) *daemon {
	t.Helper()
	before := machineSnapshot(nil)
	d := newDaemon(t, opts...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", d.tail())
		}
	})
	// Each is a clean-up of its own, so that a failing one does not keep the others
	// from their work. They run from the last to the first.
	t.Cleanup(func() { noMachineLeaks(t, before, d) })
	t.Cleanup(func() { d.forgetMounts(t) })
	t.Cleanup(func() { d.removeNetwork(t) })
	d.start(t)
	t.Cleanup(func() { d.stop(t) })
	if systemdDriver() {
		d.meetSystemd(t)
	}
	d.waitIdle(t)
	d.empty = d.snapshot(t)
	t.Cleanup(func() { d.removePodCgroups(t) })
	t.Cleanup(func() { d.noLeaks(t) })
	t.Cleanup(func() { d.clean(t) })
	return d
}

// newDaemon prepares a daemon without starting it.
func newDaemon(t *testing.T, opts ...daemonOption) *daemon {
	t.Helper()
	dir := fmt.Sprintf("/run/it%d", daemons.Add(1))
	d := &daemon{
		dir: dir, root: dir + "/root", state: dir + "/state", socket: dir + "/berth.sock",
		confDir: dir + "/net.d", dataDir: dir + "/addresses", logDir: dir + "/logs", certs: dir + "/certs.d",
		binDirs: []string{pluginDir},
		extra: []string{ // this daemon's own, beside others
			fmt.Sprintf("nri_socket = %q", dir+"/nri/nri.sock"), fmt.Sprintf("nri_plugin_dir = %q", dir+"/plugins"),
			fmt.Sprintf("nri_plugin_config_dir = %q", dir+"/plugins.d")},
	}
	must(t, os.Mkdir(dir, 0o711)) // to be passed on the way to the root filesystems of user namespaces
	for _, path := range []string{d.confDir, d.logDir, d.certs} {
		must(t, os.Mkdir(path, 0o700))
	}
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	t.Cleanup(func() { d.end(t) })
	network := fixture.Conflist("test", d.dataDir, fixture.Range4)
	must(t, os.WriteFile(d.networkFile(), []byte(network), 0o600))
	for _, opt := range opts {
		opt(t, d)
	}
	must(t, os.WriteFile(d.configFile(), []byte(strings.Join(d.extra, "\n")+"\n"), 0o600))
	return d
}

func (d *daemon) configFile() string { return filepath.Join(d.dir, "config.toml") }
func (d *daemon) logFile() string    { return filepath.Join(d.dir, "log") }

// command returns a berth command line for this daemon's operator commands.
func (d *daemon) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(context.Background(), filepath.Join(binDir, "berth"), args...)
	cmd.Env = append(os.Environ(), d.env...)
	return cmd
}

func (d *daemon) serveCommand() *exec.Cmd {
	return d.command("serve", "--config", d.configFile(), "--listen", d.socket, "--root", d.root, "--state", d.state,
		"--cni-conf-dir", d.confDir, "--cni-bin-dir", strings.Join(d.binDirs, ","), "--registry-dir", d.certs, "--cgroup-driver", cgroupDriver(), "--log-level", "debug")
}

// start starts the daemon and waits until it answers.
func (d *daemon) start(t *testing.T) {
	t.Helper()
	logFile, err := os.OpenFile(d.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	must(t, err)
	defer logFile.Close()
	d.cmd = d.serveCommand()
	d.cmd.Stdout, d.cmd.Stderr = logFile, logFile
	// A group of its own: Ctrl-C at the terminal must not look like a stopped daemon.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, d.cmd.Start())
	cmd, exited := d.cmd, make(chan struct{})
	d.exited = exited
	go func() {
		_ = cmd.Wait() // its result is in cmd.ProcessState
		close(exited)
	}()
	d.connect(t)
}

// idleLaunchers is the daemon's default.
const idleLaunchers = 2

// waitIdle waits until the daemon has all its idle launchers.
func (d *daemon) waitIdle(t *testing.T) {
	t.Helper()
	eventually(t, "idle launchers are ready", func() error {
		n := 0
		for _, pid := range childrenOf(d.cmd.Process.Pid) {
			if strings.HasPrefix(commandLine(pid), "berth-shim launcher") {
				n++
			}
		}
		if n < idleLaunchers {
			return unexpected("their number", n, idleLaunchers)
		}
		return nil
	})
}

func (d *daemon) connect(t *testing.T) {
	t.Helper()
	d.waitReady(t)
	endpoint := "unix://" + d.socket
	var err error
	d.cri, err = cri.NewRemoteRuntimeServiceBuilder().WithEndpoint(endpoint).WithConnectionTimeout(callTimeout).Build(t.Context())
	must(t, err)
	d.images, err = cri.NewRemoteImageServiceBuilder().WithEndpoint(endpoint).WithConnectionTimeout(callTimeout).Build(t.Context())
	must(t, err)
}

// waitReady waits for the daemon's first answer. cri-client does not wait, and
// leaves a connection behind when it fails.
func (d *daemon) waitReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	go func() { // ends with ctx
		select {
		case <-d.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := answers(ctx, d.socket); err != nil {
		t.Fatalf("the daemon does not answer: %v; its end: %v\n%s", err, d.cmd.ProcessState, d.tail())
	}
}

// answers returns nil when a runtime answers at the socket.
func answers(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, MaxDelay: 20 * time.Millisecond}, MinConnectTimeout: patience}))
	if err != nil {
		return err
	}
	_, err = runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	return errors.Join(err, conn.Close())
}

func (d *daemon) disconnect(t *testing.T) {
	t.Helper()
	must(t, d.cri.Close(context.Background()))
	must(t, d.images.Close(context.Background()))
}

// stop ends the daemon as systemd does. It must exit with 0.
func (d *daemon) stop(t *testing.T) {
	t.Helper()
	if d.gone() {
		return
	}
	d.disconnect(t)
	d.signal(t, syscall.SIGTERM)
	if code := d.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("after SIGTERM the daemon ended with %v, want exit code 0", d.cmd.ProcessState)
	}
}

// kill ends the daemon with SIGKILL.
func (d *daemon) kill(t *testing.T) {
	t.Helper()
	d.disconnect(t)
	d.signal(t, syscall.SIGKILL)
}

func (d *daemon) restart(t *testing.T) {
	t.Helper()
	d.stop(t)
	d.start(t)
}

func (d *daemon) gone() bool {
	select {
	case <-d.exited:
		return true
	default:
		return false
	}
}

// signal sends a signal that ends the daemon, and waits for its end.
func (d *daemon) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	must(t, d.cmd.Process.Signal(sig))
	select {
	case <-d.exited:
	case <-time.After(time.Minute):
		must(t, d.cmd.Process.Signal(syscall.SIGQUIT)) // its goroutines, into the log
		<-d.exited
		t.Fatalf("the daemon did not end within a minute of %s", sig)
	}
}

// quietCall matches log lines of calls that only read, of which tests make many.
var quietCall = regexp.MustCompile(`level=DEBUG msg=(Version|ImageFsInfo|List\w+|\w*Status) .*code=OK`)

// end kills a daemon that a test could not stop as it should.
func (d *daemon) end(t *testing.T) {
	t.Helper()
	if d.cmd != nil && !d.gone() {
		d.signal(t, syscall.SIGKILL)
		d.forgetMounts(t)
	}
}

// tail returns the end of the daemon's log.
func (d *daemon) tail() string {
	const limit = 60
	var lines []string
	for _, line := range readLines(d.logFile()) {
		if !quietCall.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-limit):], "\n")
}

// clean removes all pods and images, as kubelet would.
func (d *daemon) clean(t *testing.T) {
	t.Helper()
	ctx := context.Background() // the test's own has ended
	pods, err := d.cri.ListPodSandbox(ctx, nil)
	must(t, err)
	for _, p := range pods {
		must(t, d.cri.StopPodSandbox(ctx, p.Id))
		must(t, d.cri.RemovePodSandbox(ctx, p.Id))
	}
	images, err := d.images.ListImages(ctx, nil)
	must(t, err)
	for _, i := range images {
		must(t, d.images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: i.Id}))
	}
}

// removeNetwork removes the bridge, so that the next daemon's pods, which get the
// same addresses, meet no old neighbour entries.
func (d *daemon) removeNetwork(t *testing.T) {
	t.Helper()
	removeLink(t, "berth0")
}

func removeLink(t *testing.T, name string) {
	t.Helper()
	if out, err := exec.Command("ip", "link", "delete", name).CombinedOutput(); err != nil &&
		!strings.Contains(string(out), "Cannot find device") {
		t.Errorf("delete %s: %v: %s", name, err, out)
	}
}

// forgetMounts removes the two mounts a stopped daemon leaves for its running containers.
func (d *daemon) forgetMounts(t *testing.T) {
	t.Helper()
	for _, path := range d.mounts {
		must(t, syscall.Unmount(path, 0))
	}
	mounts := mountpoints(t, os.Getpid())
	for i := len(mounts) - 1; i >= 0; i-- {
		if strings.HasPrefix(mounts[i], d.state) {
			must(t, syscall.Unmount(mounts[i], 0))
		}
	}
}
