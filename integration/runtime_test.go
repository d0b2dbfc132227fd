package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

func TestVersionStatusAndRuntimeConfig(t *testing.T) {
	d := harness.StartDaemon(t)
	v := harness.Get(d.Cri.Version(t.Context(), "v1"))(t)
	harness.Equal(t, "runtime name", v.RuntimeName, "berth")
	harness.Equal(t, "API version", v.RuntimeApiVersion, "v1")
	if v.RuntimeVersion == "" {
		t.Error("the runtime's version is empty")
	}
	status := harness.Get(d.Cri.Status(t.Context(), false))(t)
	ready := map[string]bool{}
	for _, c := range status.Status.Conditions {
		ready[c.Type] = c.Status
	}
	if !ready[runtimeapi.RuntimeReady] || !ready[runtimeapi.NetworkReady] {
		t.Errorf("conditions are %v", status.Status.Conditions)
	}
	if len(status.Info) != 0 {
		t.Errorf("Status without verbose contains %v", status.Info)
	}
	handlers := map[string]*runtimeapi.RuntimeHandlerFeatures{}
	for _, h := range status.RuntimeHandlers {
		handlers[h.Name] = h.Features
	}
	if features, ok := handlers[""]; !ok || !features.GetRecursiveReadOnlyMounts() {
		t.Errorf("runtime handlers are %v", status.RuntimeHandlers)
	}
	if !status.Features.GetSupplementalGroupsPolicy() || !status.Features.GetMountOptions() {
		t.Errorf("features are %v", status.Features)
	}
	if len(harness.Get(d.Cri.Status(t.Context(), true))(t).Info) == 0 {
		t.Error("verbose Status contains no information")
	}
	driver := runtimeapi.CgroupDriver_CGROUPFS
	if harness.SystemdDriver() {
		driver = runtimeapi.CgroupDriver_SYSTEMD
	}
	harness.Equal(t, "cgroup driver", harness.Get(d.Cri.RuntimeConfig(t.Context()))(t).Linux.CgroupDriver, driver)
	harness.Must(t, d.Cri.UpdateRuntimeConfig(t.Context(), &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.88.0.0/24"}}))
}

func TestRuntimeHandlers(t *testing.T) {
	d := harness.StartDaemon(t)
	for _, handler := range []string{"", "berth"} {
		config := d.PodConfig(t, harness.HostNetwork)
		id := harness.Get(d.Cri.RunPodSandbox(t.Context(), config, handler))(t)
		d.Objects = append(d.Objects, id)
		harness.Equal(t, "handler", (&harness.Pod{D: d, Id: id}).Status(t).RuntimeHandler, handler)
	}
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t, harness.HostNetwork), "no-such-handler")
	harness.WantCode(t, err, codes.NotFound, "no-such-handler")
}

func TestSocket(t *testing.T) {
	d := harness.StartDaemon(t)
	info, err := os.Stat(d.Socket)
	harness.Must(t, err)
	harness.Equal(t, "mode", info.Mode().Perm(), os.FileMode(0o600))
	for _, dir := range []string{d.Root, d.State} {
		info := harness.Get(os.Stat(dir))(t)
		harness.Equal(t, "mode of "+dir, info.Mode().Perm(), os.FileMode(0o700))
	}
	// Invalid data on the socket has no effect.
	conn := harness.Get(net.Dial("unix", d.Socket))(t)
	_, err = conn.Write([]byte(strings.Repeat("garbage\r\n", 1000)))
	if err == nil {
		_, _ = conn.Read(make([]byte, 1))
	}
	harness.Must(t, conn.Close())
	harness.Get(d.Cri.Version(t.Context(), "v1"))(t)
}

// Messages of up to 16 MiB are accepted. Reflection is off.
func TestMessageLimits(t *testing.T) {
	d := harness.StartDaemon(t)
	runtime := harness.RawRuntime(t, d)
	large := func(size int) error {
		_, err := runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
			LabelSelector: map[string]string{"key": strings.Repeat("v", size)}}})
		return err
	}
	harness.Must(t, large(15<<20))
	harness.WantCode(t, large(17<<20), codes.ResourceExhausted)
	stream, err := harness.RawConn(t, d).NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
	harness.Must(t, err)
	harness.WantCode(t, stream.RecvMsg(&runtimeapi.VersionRequest{}), codes.Unimplemented)
}

// The daemon sends READY and STOPPING to systemd's notification socket.
func TestSystemdNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Must(t, notify.Close()) })
	d := harness.StartDaemon(t, harness.WithEnv("NOTIFY_SOCKET="+path))
	received := func() string {
		b := make([]byte, 4096)
		n := harness.Get(notify.Read(b))(t)
		return string(b[:n])
	}
	harness.WantText(t, "first message", received(), "READY=1")
	d.Stop(t)
	harness.WantText(t, "second message", received(), "STOPPING=1")
	d.Start(t)
}

// systemd passes its listening socket to the daemon, also to one that an old unit starts as
// "berth serve".
func TestSocketActivation(t *testing.T) {
	for _, program := range []string{"berthd", "berth serve"} {
		t.Run(program, func(t *testing.T) {
			d := harness.NewDaemon(t)
			before := harness.MachineSnapshot(d)
			serve := d.ServeCommand().Args
			if program == "berth serve" {
				serve = d.Command(append([]string{"serve"}, d.Flags()...)...).Args
			}
			testSocketActivation(t, d, serve)
			d.ForgetMounts(t)
			harness.NoMachineLeaks(t, before, d)
		})
	}
}

func testSocketActivation(t *testing.T, d *harness.Daemon, serve []string) {
	path := d.Dir + "/activated.sock"
	listener := harness.Get(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	defer listener.Close()
	file := harness.Get(listener.File())(t)
	defer file.Close()
	// As with systemd, the socket is descriptor 3, and LISTEN_PID is the daemon's process ID.
	cmd := exec.Command("/bin/sh", append([]string{"-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh"}, serve...)...)
	cmd.ExtraFiles = []*os.File{file}
	harness.Must(t, cmd.Start())
	conn := harness.Get(grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(t.Context(), &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	harness.Must(t, err)
	harness.Must(t, conn.Close())
	running := harness.Get(os.Readlink(fmt.Sprintf("/proc/%d/exe", cmd.Process.Pid)))(t)
	harness.Equal(t, "the process's program", running, filepath.Join(harness.BinDir, harness.DaemonProgram))
	harness.Must(t, cmd.Process.Signal(os.Interrupt))
	harness.Must(t, cmd.Wait())
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the daemon removed systemd's socket: %v", err)
	}
}

func TestConfigFile(t *testing.T) {
	d := harness.NewDaemon(t)
	harness.Must(t, os.WriteFile(d.ConfigFile(), []byte("log.level = \"info\"\nmax_log_lines = 3\n"), 0o600))
	out, err := d.ServeCommand().CombinedOutput()
	if err == nil {
		t.Fatal("an unknown key is accepted")
	}
	harness.WantText(t, "error", string(out), "max_log_lines", "line 2", "container.max_log_line\"")
	// `config default` prints a valid configuration with a comment for every option.
	out, err = d.Command("config", "default").Output()
	harness.Must(t, err)
	for _, option := range []string{"listen", "root", "state", "cgroup_driver", "conf_dir", "bin_dirs", "config_dirs", "pause"} {
		if !strings.Contains(string(out), "\n"+option+" = ") {
			t.Errorf("`berth config default` lacks %s", option)
		}
	}
	harness.Must(t, os.WriteFile(d.ConfigFile(), out, 0o600))
	d.Start(t)
	d.Stop(t)
	d.ForgetMounts(t)
}

// With log.format "json" every line of the log is JSON, with pods and containers as fields.
func TestJSONLog(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Stop(t)
	harness.Must(t, os.Remove(d.LogFile()))
	harness.Must(t, os.WriteFile(d.ConfigFile(), []byte("log.format = \"json\"\n"), 0o600))
	d.Start(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	seen := map[string]bool{}
	for _, line := range machine.ReadLines(d.LogFile()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Errorf("not JSON: %s", line)
		}
		for _, key := range []string{"pod", "container"} {
			if id, ok := fields[key].(string); ok {
				seen[id] = true
			}
		}
	}
	if !seen[pod.Id] || !seen[c.Id] {
		t.Errorf("no line has the pod or the container as a field:\n%s", d.Tail())
	}
}

// A client that disconnects during a call leaves nothing behind.
func TestCanceledCalls(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		done := harness.Go(func() error { _, _, err := d.Cri.ExecSync(ctx, c.Id, []string{"sleep", "6661"}, 0); return err })
		harness.EventuallyTrue(t, "the command runs", func() bool { return len(machine.CommandLines("sleep 6661")) > 0 })
		cancel()
		<-done
		awaitNoProcesses(t, "sleep 6661")
	}
}

// Signals that make other daemons reload or report do not stop berth.
func TestSignalsThatDoNotEndTheDaemon(t *testing.T) {
	tests := []struct {
		name   string
		signal syscall.Signal
		said   string // text in the log; empty: none
	}{
		{"SIGHUP", syscall.SIGHUP, "configuration reloaded"},
		{"SIGUSR1", syscall.SIGUSR1, "goroutine 1 ["},
		{"SIGUSR2", syscall.SIGUSR2, ""},
		{"SIGPIPE", syscall.SIGPIPE, ""},
	}
	d := harness.StartDaemon(t)
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			harness.Must(t, d.Cmd.Process.Signal(test.signal))
			harness.Eventually(t, "the daemon logs the signal", func() error {
				log, err := os.ReadFile(d.LogFile())
				if err == nil && !strings.Contains(string(log), test.said) {
					err = errors.New("not in the daemon's log: " + test.said)
				}
				return err
			})
			if _, err := d.Cri.Version(t.Context(), ""); err != nil || d.Gone() {
				t.Errorf("the daemon no longer answers: %v", err)
			}
		})
	}
}
