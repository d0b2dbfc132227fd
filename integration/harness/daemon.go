package harness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/cni/berthnet/conf"
	"berth/integration/fixture"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// callTimeout is kubelet's deadline for a call.
const callTimeout = 2 * time.Minute

// Daemon is one daemon with its own directories, and CRI clients to it.
type Daemon struct {
	Dir     string   // contains everything below; short, because the length of socket paths is limited
	Root    string   // --root
	State   string   // --state
	Socket  string   // --listen
	ConfDir string   // --cni-conf-dir
	DataDir string   // where host-local records addresses
	LogDir  string   // parent of the pods' log directories
	certs   string   // --registry-dir
	BinDirs []string // --cni-bin-dir

	Extra []string // lines of the configuration file
	env   []string
	bin   string // directory of the programs; empty: BinDir

	starter []string // command that starts the daemon; empty: the test itself
	enter   []string // command that enters the daemon's namespaces; empty: those of the test
	byUnit  bool     // systemd starts the daemon
	socket  *os.File // listening socket that the daemon gets; nil: it makes its own

	dirsInConfig bool // root and state are in the configuration file, not flags

	Cmd     *exec.Cmd
	exited  chan struct{} // closed after cmd.Wait
	Cri     internalapi.RuntimeService
	Images  internalapi.ImageManagerService
	Objects []string        // IDs of all created pods and containers, for the leak check
	naming  sync.Mutex      // for Parents while several goroutines make pods
	Parents []string        // the pods' cgroups
	Mounts  []string        // mounts that options made for the daemon
	Empty   inventory.Items // the daemon and the machine before the first pod
	pods    atomic.Int32

	tolerated []string // differences that the test causes, see Tolerate
}

type DaemonOption func(*testing.T, *Daemon)

// WithConfig adds lines to the configuration file.
func WithConfig(lines ...string) DaemonOption {
	return func(_ *testing.T, d *Daemon) { d.Extra = append(d.Extra, lines...) }
}

// WithCRIU makes a daemon use CRIU, also to restore all pods. It skips the test if there is none.
func WithCRIU(t *testing.T) DaemonOption {
	t.Helper()
	return WithConfig(useCRIU(t), TrustedRestores)
}

// WithUsernsCRIU makes a daemon use CRIU, and restore only pods with a user namespace. It skips the
// test if there is none.
func WithUsernsCRIU(t *testing.T) DaemonOption {
	t.Helper()
	return WithConfig(useCRIU(t), `checkpoint.restore = "userns"`)
}

// useCRIU is the configuration that names CRIU.
func useCRIU(t *testing.T) string {
	t.Helper()
	path := os.Getenv("BERTH_TEST_CRIU")
	if path == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	return fmt.Sprintf("checkpoint.criu = %q", path)
}

// TrustedRestores is the configuration that permits restores by CRIU.
const TrustedRestores = `checkpoint.restore = "trusted"`

// layerDriverEnv names the layer driver of all daemons of a test run; empty: the default.
const layerDriverEnv = "BERTH_TEST_LAYER_DRIVER"

// WithLayerDriver sets the layer driver. It puts root on a disk, because EROFS images on tmpfs
// cannot be mounted.
func WithLayerDriver(driver string) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		if !strings.HasPrefix(d.Root, diskDir) {
			root := Get(os.MkdirTemp(diskDir, "berth-it-"))(t)
			Must(t, os.Chmod(root, 0o711)) // same mode as Dir
			t.Cleanup(func() { Must(t, os.RemoveAll(root)) })
			d.Root = root
		}
		d.Extra = slices.DeleteFunc(d.Extra, func(line string) bool { return strings.HasPrefix(line, "image.layer_driver") }) // set by layerDriverEnv
		WithConfig(fmt.Sprintf("image.layer_driver = %q", driver))(t, d)
	}
}

const diskDir = "/var/tmp"

// OnDisk puts the root of all daemons of this process on a disk, if this machine has one, so that
// layers can be EROFS images. A TestMain calls it before Main. layerDriverEnv takes precedence.
func OnDisk() {
	var fs unix.Statfs_t
	if os.Getenv(layerDriverEnv) != "" || unix.Statfs(diskDir, &fs) != nil {
		return
	}
	switch fs.Type { // the kernel refuses an overlay as a layer of containers' overlays
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC:
		_ = os.Setenv(layerDriverEnv, "auto") // the value contains no NUL byte
	}
}

// SetConfig replaces a line of the configuration file. The daemon reads it at its next start.
func (d *Daemon) SetConfig(t *testing.T, old, line string) {
	t.Helper()
	d.Extra[slices.Index(d.Extra, old)] = line
	d.writeConfig(t, d.Extra)
}

// WithEnv adds variables to the daemon's environment.
func WithEnv(env ...string) DaemonOption {
	return func(_ *testing.T, d *Daemon) { d.env = append(d.env, env...) }
}

// WithNetwork replaces the default network configuration; "" removes it.
func WithNetwork(conflist string) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		if conflist == "" {
			Must(t, os.Remove(d.NetworkFile()))
			return
		}
		Must(t, os.WriteFile(d.NetworkFile(), []byte(conflist), 0o600))
	}
}

// WithBuiltInNetwork enables the built-in network, and removes the CNI configuration and plugins.
func WithBuiltInNetwork(lines ...string) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		Must(t, os.Remove(d.NetworkFile()))
		d.BinDirs = []string{d.Dir + "/no-plugins"}
		d.Extra = append(d.Extra, append([]string{`network.type = "berth-net"`}, lines...)...)
	}
}

// WithHosts writes a hosts.toml file for a registry host.
func WithHosts(host, content string) DaemonOption {
	return func(t *testing.T, d *Daemon) { d.writeHosts(t, host, content) }
}

func (d *Daemon) writeHosts(t *testing.T, host, content string) {
	t.Helper()
	dir := filepath.Join(d.certs, host)
	Must(t, os.MkdirAll(dir, 0o755))
	Must(t, os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(content), 0o600))
}

// WithNetworkIn uses the default network configuration, with addresses in another directory.
func WithNetworkIn(dataDir string) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		d.DataDir = dataDir
		WithNetwork(fixture.Conflist("test", dataDir, fixture.Range4))(t, d)
	}
}

// StartedBy starts the daemon by a command, such as prlimit. The daemon's command line follows its
// arguments.
func StartedBy(command ...string) DaemonOption {
	return func(_ *testing.T, d *Daemon) { d.starter = append(command, d.starter...) }
}

// WithHeldSocket makes the test listen on the daemon's socket and pass it on, as systemd does. So
// connections wait while no daemon runs.
func WithHeldSocket(t *testing.T, d *Daemon) {
	listener := Get(net.ListenUnix("unix", &net.UnixAddr{Name: d.Socket, Net: "unix"}))(t)
	d.socket = Get(listener.File())(t)
	listener.SetUnlinkOnClose(false)
	Must(t, listener.Close())
	t.Cleanup(func() { Must(t, d.socket.Close()) })
	d.starter = []string{"/bin/sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh"}
}

// InNamespaces starts the daemon, and checks of its state, by a command such as nsenter.
func InNamespaces(command ...string) DaemonOption {
	return func(t *testing.T, d *Daemon) {
		d.enter = command
		StartedBy(command...)(t, d)
	}
}

func (d *Daemon) NetworkFile() string { return filepath.Join(d.ConfDir, "10-test.conflist") }

var daemons atomic.Int32

// StartDaemon starts a daemon for this test. When the test ends, it removes the daemon's pods and
// images, stops the daemon and runs the leak check.
func StartDaemon(t *testing.T, opts ...DaemonOption) *Daemon {
	t.Helper()
	return StartDaemonIn(t, nextDir(), opts...)
}

// StartDaemonIn is StartDaemon with a given directory.
func StartDaemonIn(t *testing.T, dir string, opts ...DaemonOption) *Daemon {
	t.Helper()
	before := MachineSnapshot(nil)
	denials := machine.WatchDenials(t)
	d := newDaemonIn(t, dir, opts...)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", d.Tail())
		}
	})
	// Each step is a separate clean-up, so that a failed step does not prevent the others. They run
	// in reverse order.
	t.Cleanup(func() { d.noDenials(t, denials()) })
	t.Cleanup(func() { NoMachineLeaks(t, before, d) })
	t.Cleanup(func() { d.ForgetMounts(t) })
	t.Cleanup(func() { d.removeNetwork(t) })
	d.Start(t)
	t.Cleanup(func() { d.Stop(t) })
	if SystemdDriver() {
		d.connectToSystemd(t)
	}
	d.WaitWatched(t)
	d.waitSettled(t)
	d.Empty = d.Snapshot(t)
	t.Cleanup(func() { d.removePodCgroups(t) })
	t.Cleanup(func() { d.NoLeaks(t) })
	t.Cleanup(func() { d.StateSettles(t) })
	t.Cleanup(func() { d.Clean(t) })
	t.Cleanup(func() { d.StateSettles(t) })
	t.Cleanup(func() {
		if t.Failed() {
			machine.ContinueAll() // processes that a failed test has left stopped, so that its pods can be removed
		}
	})
	return d
}

// NewDaemon prepares a daemon without starting it.
func NewDaemon(t *testing.T, opts ...DaemonOption) *Daemon {
	t.Helper()
	return newDaemonIn(t, nextDir(), opts...)
}

func nextDir() string { return fmt.Sprintf("/run/it%d", daemons.Add(1)) }

func newDaemonIn(t *testing.T, dir string, opts ...DaemonOption) *Daemon {
	t.Helper()
	d := &Daemon{
		Dir: dir, Root: dir + "/root", State: dir + "/state", Socket: dir + "/berth.sock",
		ConfDir: dir + "/net.d", DataDir: dir + "/addresses", LogDir: dir + "/logs", certs: dir + "/certs.d",
		BinDirs: []string{PluginDir},
		Extra: []string{ // separate from other daemons
			fmt.Sprintf("nri.socket = %q", dir+"/nri/nri.sock"), fmt.Sprintf("nri.plugin_dir = %q", dir+"/plugins"),
			fmt.Sprintf("nri.plugin_config_dir = %q", dir+"/plugins.d")},
	}
	Must(t, os.Mkdir(dir, 0o711)) // so that root filesystems of user namespaces can be reached
	for _, path := range []string{d.ConfDir, d.LogDir, d.certs} {
		Must(t, os.Mkdir(path, 0o700))
	}
	t.Cleanup(func() { Must(t, os.RemoveAll(dir)) })
	t.Cleanup(func() {
		d.end(t)
		if t.Failed() { // otherwise leftovers of an aborted test would fail the state checks of later tests
			d.KillAll(t)
			unpinNetworks(t)
		}
	})
	network := fixture.Conflist("test", d.DataDir, fixture.Range4)
	Must(t, os.WriteFile(d.NetworkFile(), []byte(network), 0o600))
	if driver := os.Getenv(layerDriverEnv); driver != "" {
		WithLayerDriver(driver)(t, d)
	}
	for _, opt := range opts {
		opt(t, d)
	}
	d.allowSlowPlugins()
	d.writeConfig(t, d.Extra)
	d.label(t)
	return d
}

// label gives the daemon's directories their SELinux labels, as packages do with the default
// directories.
func (d *Daemon) label(t *testing.T) {
	t.Helper()
	if selinux.GetEnabled() {
		for _, dir := range []string{d.Root, d.State, filepath.Join(d.Root, "bin")} {
			Must(t, os.MkdirAll(dir, 0o711))
		}
		machine.RestoreLabels(t, d.Dir, d.Root)
	}
}

func (d *Daemon) writeConfig(t *testing.T, lines []string) {
	t.Helper()
	Must(t, os.WriteFile(d.ConfigFile(), []byte(strings.Join(lines, "\n")+"\n"), 0o600))
}

// UseVersion makes the next Start run the programs of an earlier version in bin, which supports
// only the options in config. With bin "" it selects the tested version and its options again.
func (d *Daemon) UseVersion(t *testing.T, bin string, config ...string) {
	t.Helper()
	d.bin = bin
	if bin == "" {
		config = d.Extra
	}
	d.writeConfig(t, config)
}

// allowSlowPlugins raises nri.request_timeout. On a loaded machine a plugin could exceed the
// default of five seconds and be dropped.
func (d *Daemon) allowSlowPlugins() {
	for _, option := range []string{"nri.request_timeout", "nri.registration_timeout"} {
		if !slices.ContainsFunc(d.Extra, func(line string) bool { return strings.HasPrefix(line, option) }) {
			d.Extra = slices.Insert(d.Extra, 0, option+` = "20s"`) // first, because the test's last lines may belong to a table
		}
	}
}

func (d *Daemon) ConfigFile() string { return filepath.Join(d.Dir, "config.toml") }
func (d *Daemon) LogFile() string    { return filepath.Join(d.Dir, "log") }

// Command returns a command line of berth for this daemon.
func (d *Daemon) Command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(context.Background(), filepath.Join(cmp.Or(d.bin, BinDir), "berth"), args...)
	cmd.Env = append(os.Environ(), d.env...)
	return cmd
}

// DaemonCommand returns a command line of the daemon. Up to release 0.2 the daemon was a subcommand
// of berth.
func (d *Daemon) DaemonCommand(args ...string) *exec.Cmd {
	cmd := d.Command(args...)
	if program := filepath.Join(filepath.Dir(cmd.Path), DaemonProgram); fileExists(program) {
		cmd.Path, cmd.Args[0] = program, program
		return cmd
	}
	return d.Command(append([]string{"serve"}, args...)...)
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// ServeCommand returns the command line that starts this daemon.
func (d *Daemon) ServeCommand() *exec.Cmd { return d.DaemonCommand(d.Flags()...) }

// Flags returns the daemon's flags. Commands that read its configuration take them, too.
func (d *Daemon) Flags() []string {
	flags := []string{"--config", d.ConfigFile(), "--listen", d.Socket, "--cni-conf-dir", d.ConfDir,
		"--cni-bin-dir", strings.Join(d.BinDirs, ","), "--registry-dir", d.certs, "--cgroup-driver", cgroupDriver(), "--log-level", "debug"}
	if !d.dirsInConfig {
		flags = append(flags, "--root", d.Root, "--state", d.State)
	}
	return flags
}

// WithDirectoriesInConfig sets root and state in the configuration file instead of by flags, so
// that a reload can change them.
func WithDirectoriesInConfig(t *testing.T, d *Daemon) {
	d.dirsInConfig = true
	WithConfig(fmt.Sprintf("root = %q\nstate = %q", d.Root, d.State))(t, d)
}

// Start starts the daemon and waits until it answers.
func (d *Daemon) Start(t *testing.T) {
	t.Helper()
	d.launch(t)
	d.connect(t)
}

// StartUntilKilled starts a daemon that a failpoint kills, before or after it answers. It waits up
// to limit and reports whether the daemon was killed.
func (d *Daemon) StartUntilKilled(t *testing.T, limit time.Duration) bool {
	t.Helper()
	d.launch(t)
	_ = d.answers(t, limit) // or it has exited
	select {
	case <-d.exited:
	case <-time.After(limit):
		d.connect(t)
		return false
	}
	d.wasKilled(t)
	return true
}

// TryStart starts the daemon. If it ends before it answers, TryStart returns the last line of its
// log.
func (d *Daemon) TryStart(t *testing.T) (refusal string) {
	t.Helper()
	d.launch(t)
	if d.answers(t, Patience) == nil {
		d.connect(t)
		return ""
	}
	if !d.Gone() {
		t.Fatalf("the daemon neither answers nor ends\n%s", d.Tail())
	}
	if code := d.Cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("the daemon ended with %v, want exit code 1", d.Cmd.ProcessState)
	}
	lines := machine.ReadLines(d.LogFile())
	return lines[len(lines)-1]
}

// launch starts the daemon without waiting.
func (d *Daemon) launch(t *testing.T) {
	t.Helper()
	if d.byUnit {
		d.startUnit(t)
		return
	}
	logFile, err := os.OpenFile(d.LogFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	Must(t, err)
	defer logFile.Close()
	d.Cmd = d.ServeCommand()
	startBy(t, d.Cmd, d.starter)
	d.Cmd.Stdout, d.Cmd.Stderr = logFile, logFile
	if d.socket != nil {
		d.Cmd.ExtraFiles = []*os.File{d.socket} // descriptor 3
	}
	// A separate process group, so that Ctrl-C at the terminal does not stop the daemon.
	d.Cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	Must(t, d.Cmd.Start())
	cmd, exited := d.Cmd, make(chan struct{})
	d.exited = exited
	go func() {
		_ = cmd.Wait() // the result is in cmd.ProcessState
		close(exited)
	}()
}

// startBy makes another command start cmd, unless it is empty.
func startBy(t *testing.T, cmd *exec.Cmd, command []string) {
	t.Helper()
	if len(command) > 0 {
		cmd.Args = append(slices.Clone(command), cmd.Args...)
		cmd.Path = Get(exec.LookPath(command[0]))(t)
	}
}

// idleLaunchers is the daemon's default number of idle launchers.
const idleLaunchers = 2

// WaitIdle waits until the daemon has all its idle launchers.
func (d *Daemon) WaitIdle(t *testing.T) {
	t.Helper()
	EventuallyGot(t, "idle launchers are ready", func() (bool, any) { n := len(d.Launchers()); return n >= idleLaunchers, n })
}

// WaitWatched waits until the launchers are idle and the daemon watches them, each with a goroutine
// and a second pidfd. WaitIdle also counts launchers that are not ready yet.
func (d *Daemon) WaitWatched(t *testing.T) {
	t.Helper()
	d.WaitIdle(t)
	Eventually(t, "idle launchers are watched", func() error {
		for _, pid := range d.Launchers() {
			if n := machine.PidfdsOf(d.Cmd.Process.Pid, pid); n < 2 {
				return fmt.Errorf("the daemon has %d pidfds of launcher %d", n, pid)
			}
		}
		return nil
	})
}

// waitSettled waits until the daemon's number of goroutines is the same in ten calls. The daemon
// answers before it has started all of them, and on a busy machine the leak check would take a late
// one for a leak.
func (d *Daemon) waitSettled(t *testing.T) {
	t.Helper()
	last, same := 0, 0
	EventuallyGot(t, "the daemon has started its goroutines", func() (bool, any) {
		n := d.Goroutines(t)
		if n != last {
			last, same = n, 0
		}
		same++
		return same == 10, n
	})
}

// Launchers returns the daemon's launchers, idle or busy.
func (d *Daemon) Launchers() []int {
	return slices.DeleteFunc(machine.ChildrenOf(d.Cmd.Process.Pid), func(pid int) bool {
		return !strings.HasPrefix(machine.CommandLine(pid), "berth-shim launcher")
	})
}

func (d *Daemon) connect(t *testing.T) {
	t.Helper()
	d.waitReady(t)
	d.Connect(t)
}

// Connect makes the clients to the runtime at the socket, which may be another than berth. It waits
// until the runtime answers.
func (d *Daemon) Connect(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	Must(t, answers(ctx, d.Socket))
	endpoint := "unix://" + d.Socket
	var err error
	d.Cri, err = cri.NewRemoteRuntimeServiceBuilder().WithEndpoint(endpoint).WithConnectionTimeout(callTimeout).Build(t.Context())
	Must(t, err)
	d.Images, err = cri.NewRemoteImageServiceBuilder().WithEndpoint(endpoint).WithConnectionTimeout(callTimeout).Build(t.Context())
	Must(t, err)
}

// waitReady waits for the daemon's first answer. It does not use cri-client, which does not wait
// and leaks a connection when it fails.
func (d *Daemon) waitReady(t *testing.T) {
	t.Helper()
	if err := d.answers(t, Patience); err != nil {
		t.Fatalf("the daemon does not answer: %v; state of its process: %v\n%s", err, d.Cmd.ProcessState, d.Tail())
	}
}

// answers returns nil when the daemon answers. It returns an error when the daemon has exited or
// the limit has passed.
func (d *Daemon) answers(t *testing.T, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	exited := d.exited // this daemon's channel, not the next one's
	go func() {        // ends with ctx
		select {
		case <-exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	return answers(ctx, d.Socket)
}

// answers returns nil when a runtime answers at the socket.
func answers(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 20 * time.Millisecond, MaxDelay: 20 * time.Millisecond}, MinConnectTimeout: Patience}))
	if err != nil {
		return err
	}
	_, err = runtimeapi.NewRuntimeServiceClient(conn).Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	return errors.Join(err, conn.Close())
}

func (d *Daemon) Disconnect(t *testing.T) {
	t.Helper()
	Must(t, d.Cri.Close(context.Background()))
	Must(t, d.Images.Close(context.Background()))
}

// Stop stops the daemon by SIGTERM, as systemd does, and expects exit code 0.
func (d *Daemon) Stop(t *testing.T) {
	t.Helper()
	if d.Gone() {
		return
	}
	d.Disconnect(t)
	if d.byUnit {
		d.stopUnit(t)
		return
	}
	d.Signal(t, syscall.SIGTERM)
	if code := d.Cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("after SIGTERM the daemon exited with %v, want exit code 0", d.Cmd.ProcessState)
	}
}

// WaitKilled waits up to limit for a failpoint to kill the daemon, and reports whether it did.
func (d *Daemon) WaitKilled(t *testing.T, limit time.Duration) bool {
	t.Helper()
	select {
	case <-d.exited:
	case <-time.After(limit):
		return false
	}
	d.wasKilled(t)
	d.Disconnect(t)
	return true
}

func (d *Daemon) wasKilled(t *testing.T) {
	t.Helper()
	if state := d.Cmd.ProcessState; state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the daemon was not killed: %v\n%s", state, d.Tail())
	}
}

// Kill kills the daemon with SIGKILL.
func (d *Daemon) Kill(t *testing.T) {
	t.Helper()
	d.Disconnect(t)
	d.Signal(t, syscall.SIGKILL)
}

// End is Kill for a daemon that may have exited.
func (d *Daemon) End(t *testing.T) {
	t.Helper()
	d.Disconnect(t)
	if err := d.Cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
	<-d.exited
}

func (d *Daemon) Restart(t *testing.T) {
	t.Helper()
	d.Stop(t)
	d.Start(t)
}

// Gone reports whether the daemon has exited.
func (d *Daemon) Gone() bool {
	select {
	case <-d.exited:
		return true
	default:
		return false
	}
}

// Signal sends a signal that ends the daemon, and waits until it has exited.
func (d *Daemon) Signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	Must(t, d.Cmd.Process.Signal(sig))
	select {
	case <-d.exited:
	case <-time.After(time.Minute):
		Must(t, d.Cmd.Process.Signal(syscall.SIGQUIT)) // writes its goroutines to the log
		<-d.exited
		t.Fatalf("the daemon did not exit within a minute of %s", sig)
	}
}

// quietCall matches log lines of read-only calls, of which tests make many.
var quietCall = regexp.MustCompile(`level=DEBUG msg=(Version|ImageFsInfo|List\w+|\w*Status) .*code=OK`)

// end kills a daemon that a failed test has left running.
func (d *Daemon) end(t *testing.T) {
	t.Helper()
	if d.Cmd != nil && d.Cmd.Process != nil && !d.Gone() { // no process: it could not be started
		d.Signal(t, syscall.SIGKILL)
		d.ForgetMounts(t)
	}
}

// Tail returns the end of the daemon's log.
func (d *Daemon) Tail() string {
	const limit = 60
	log := machine.ReadLines(d.LogFile())
	if d.byUnit {
		log = strings.Split(Journal(), "\n")
	}
	var lines []string
	for _, line := range log {
		if !quietCall.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines[max(0, len(lines)-limit):], "\n")
}

// Clean removes all pods, images and security profiles, as kubelet would.
func (d *Daemon) Clean(t *testing.T) {
	t.Helper()
	ctx := context.Background() // the test's own context is cancelled
	pods := Get(d.Cri.ListPodSandbox(ctx, nil))(t)
	for _, p := range pods {
		Must(t, d.Cri.StopPodSandbox(ctx, p.Id))
		Must(t, d.Cri.RemovePodSandbox(ctx, p.Id))
	}
	images := Get(d.Images.ListImages(ctx, nil))(t)
	for _, i := range images {
		Must(t, d.Images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: i.Id}))
	}
	profiles, err := d.Images.ListSecurityProfiles(ctx)
	if status.Code(err) != codes.Unimplemented { // as in an older berth
		Must(t, err)
	}
	for _, p := range profiles {
		Must(t, d.Images.RemoveSecurityProfile(ctx, p.GetDigest()))
	}
}

// NetworkKey returns the key of the built-in network.
func (d *Daemon) NetworkKey() string {
	n := conf.Net{NetConf: types.NetConf{Name: "berth-net"}, DataDir: filepath.Join(d.Root, "network")}
	return n.Key()
}

// removeNetwork removes the bridge. Otherwise pods of the next daemon, which get the same
// addresses, would meet stale neighbour entries.
func (d *Daemon) removeNetwork(t *testing.T) {
	t.Helper()
	RemoveLink(t, "berth0")
}

func RemoveLink(t *testing.T, name string) {
	t.Helper()
	if out, err := exec.Command("ip", "link", "delete", name).CombinedOutput(); err != nil &&
		!strings.Contains(string(out), "Cannot find device") {
		t.Errorf("delete %s: %v: %s", name, err, out)
	}
}

// ForgetMounts removes the mounts of options, and the two mounts that a stopped daemon leaves for
// its running containers.
func (d *Daemon) ForgetMounts(t *testing.T) {
	t.Helper()
	d.forgetOwnMounts(t)
	for _, path := range d.Mounts {
		Must(t, syscall.Unmount(path, 0))
	}
	d.Mounts = nil
}

// forgetOwnMounts ends the processes of sessions, whose sockets are in the state directory.
func (d *Daemon) forgetOwnMounts(t *testing.T) {
	t.Helper()
	d.EndSessions(t)
	for _, point := range slices.Backward(machine.Mountpoints(t, os.Getpid())) {
		if strings.HasPrefix(point, d.State) {
			Must(t, WaitUpTo(leakPatience, func() error { return syscall.Unmount(point, 0) }))
		}
	}
}
