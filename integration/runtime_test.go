package integration

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// rawConn connects without cri-client, which hides some fields and codes.
func rawConn(t *testing.T, d *daemon) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+d.socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20)))
	must(t, err)
	t.Cleanup(func() { must(t, conn.Close()) })
	return conn
}

func rawRuntime(t *testing.T, d *daemon) runtimeapi.RuntimeServiceClient {
	t.Helper()
	return runtimeapi.NewRuntimeServiceClient(rawConn(t, d))
}

func TestVersionStatusAndRuntimeConfig(t *testing.T) {
	d := startDaemon(t)
	v := get(d.cri.Version(t.Context(), "v1"))(t)
	equal(t, "runtime name", v.RuntimeName, "berth")
	equal(t, "API version", v.RuntimeApiVersion, "v1")
	if v.RuntimeVersion == "" {
		t.Error("the runtime's version is empty")
	}
	status := get(d.cri.Status(t.Context(), false))(t)
	ready := map[string]bool{}
	for _, c := range status.Status.Conditions {
		ready[c.Type] = c.Status
	}
	if !ready[runtimeapi.RuntimeReady] || !ready[runtimeapi.NetworkReady] {
		t.Errorf("conditions are %v", status.Status.Conditions)
	}
	if len(status.Info) != 0 {
		t.Errorf("Status that is not verbose has %v", status.Info)
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
	if len(get(d.cri.Status(t.Context(), true))(t).Info) == 0 {
		t.Error("verbose Status tells nothing more")
	}
	equal(t, "cgroup driver", get(d.cri.RuntimeConfig(t.Context()))(t).Linux.CgroupDriver, runtimeapi.CgroupDriver_CGROUPFS)
	must(t, d.cri.UpdateRuntimeConfig(t.Context(), &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.88.0.0/24"}}))
}

func TestRuntimeHandlers(t *testing.T) {
	d := startDaemon(t)
	for _, handler := range []string{"", "berth"} {
		config := d.podConfig(t, hostNetwork)
		id, err := d.cri.RunPodSandbox(t.Context(), config, handler)
		must(t, err)
		d.objects = append(d.objects, id)
		equal(t, "handler", (&pod{d: d, id: id}).status(t).RuntimeHandler, handler)
	}
	_, err := d.cri.RunPodSandbox(t.Context(), d.podConfig(t, hostNetwork), "no-such-handler")
	wantCode(t, err, codes.NotFound, "no-such-handler")
}

func TestSocket(t *testing.T) {
	d := startDaemon(t)
	info, err := os.Stat(d.socket)
	must(t, err)
	equal(t, "mode", info.Mode().Perm(), os.FileMode(0o600))
	for _, dir := range []string{d.root, d.state} {
		info, err := os.Stat(dir)
		must(t, err)
		equal(t, "mode of "+dir, info.Mode().Perm(), os.FileMode(0o700))
	}
	// Garbage on the socket harms nobody.
	conn, err := net.Dial("unix", d.socket)
	must(t, err)
	_, err = conn.Write([]byte(strings.Repeat("garbage\r\n", 1000)))
	if err == nil {
		_, _ = conn.Read(make([]byte, 1))
	}
	must(t, conn.Close())
	get(d.cri.Version(t.Context(), "v1"))(t)
}

// Messages up to 16 MiB are accepted; reflection is off.
func TestMessageLimits(t *testing.T) {
	d := startDaemon(t)
	runtime := rawRuntime(t, d)
	large := func(size int) error {
		_, err := runtime.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
			LabelSelector: map[string]string{"key": strings.Repeat("v", size)}}})
		return err
	}
	must(t, large(15<<20))
	wantCode(t, large(17<<20), codes.ResourceExhausted)
	stream, err := rawConn(t, d).NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true},
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
	must(t, err)
	wantCode(t, stream.RecvMsg(&runtimeapi.VersionRequest{}), codes.Unimplemented)
}

// RPCs of later issues say so.
func TestUnimplementedRPCs(t *testing.T) {
	d := startDaemon(t)
	runtime := rawRuntime(t, d)
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"CheckpointContainer": func() error {
			_, err := runtime.CheckpointContainer(ctx, &runtimeapi.CheckpointContainerRequest{ContainerId: "x"})
			return err
		},
		"CheckpointPod": func() error {
			_, err := runtime.CheckpointPod(ctx, &runtimeapi.CheckpointPodRequest{PodSandboxId: "x"})
			return err
		},
		"RestorePod": func() error {
			_, err := runtime.RestorePod(ctx, &runtimeapi.RestorePodRequest{})
			return err
		},
	} {
		if code := codeOf(call()); code != codes.Unimplemented {
			t.Errorf("%s answers %s", name, code)
		}
	}
}

// READY and STOPPING are sent to systemd's notification socket.
func TestSystemdNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	must(t, err)
	t.Cleanup(func() { must(t, notify.Close()) })
	d := startDaemon(t, withEnv("NOTIFY_SOCKET="+path))
	received := func() string {
		b := make([]byte, 4096)
		n, err := notify.Read(b)
		must(t, err)
		return string(b[:n])
	}
	if m := received(); !strings.Contains(m, "READY=1") {
		t.Errorf("the first message is %q", m)
	}
	d.stop(t)
	if m := received(); !strings.Contains(m, "STOPPING=1") {
		t.Errorf("the second message is %q", m)
	}
	d.start(t)
}

// systemd hands over the socket it listens on.
func TestSocketActivation(t *testing.T) {
	d := newDaemon(t)
	path := d.dir + "/activated.sock"
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	defer listener.Close()
	file, err := listener.File()
	must(t, err)
	defer file.Close()
	cmd := d.serveCommand()
	// As systemd does: the socket is descriptor 3, and LISTEN_PID the daemon's own.
	cmd.Args = append([]string{"sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh"}, append([]string{cmd.Path}, cmd.Args[1:]...)...)
	cmd.Path = "/bin/sh"
	cmd.ExtraFiles = []*os.File{file}
	before := machineSnapshot(d)
	must(t, cmd.Start())
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	_, err = runtimeapi.NewRuntimeServiceClient(conn).Version(t.Context(), &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	must(t, err)
	must(t, conn.Close())
	must(t, cmd.Process.Signal(os.Interrupt))
	must(t, cmd.Wait())
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the daemon removed systemd's socket: %v", err)
	}
	d.forgetMounts(t)
	noMachineLeaks(t, before, d)
}

func TestConfigFile(t *testing.T) {
	d := newDaemon(t)
	must(t, os.WriteFile(d.configFile(), []byte("log_level = \"info\"\nmax_log_lines = 3\n"), 0o600))
	out, err := d.serveCommand().CombinedOutput()
	if err == nil {
		t.Fatal("an unknown key is accepted")
	}
	for _, want := range []string{"max_log_lines", "line 2", "max_log_line\""} {
		if !strings.Contains(string(out), want) {
			t.Errorf("the message lacks %q:\n%s", want, out)
		}
	}
	// What `config default` prints is a configuration, and has a comment for every option.
	out, err = d.command("config", "default").Output()
	must(t, err)
	for _, option := range []string{"listen", "root", "state", "cgroup_driver", "cni_conf_dir", "cni_bin_dirs", "registry_dirs", "pause_image"} {
		if !strings.Contains(string(out), "\n"+option+" = ") {
			t.Errorf("`berth config default` lacks %s", option)
		}
	}
	must(t, os.WriteFile(d.configFile(), out, 0o600))
	d.start(t)
	d.stop(t)
	d.forgetMounts(t)
}

// Every line of the log is JSON if that is asked for, with pods and containers as fields.
func TestJSONLog(t *testing.T) {
	d := startDaemon(t)
	d.stop(t)
	must(t, os.Remove(d.logFile()))
	must(t, os.WriteFile(d.configFile(), []byte("log_format = \"json\"\n"), 0o600))
	d.start(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.run(t)
	seen := map[string]bool{}
	for _, line := range readLines(d.logFile()) {
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
	if !seen[pod.id] || !seen[c.id] {
		t.Errorf("no line has the pod or the container as a field:\n%s", d.tail())
	}
}

// A client that goes away in the middle of a call leaves nothing.
func TestCanceledCalls(t *testing.T) {
	d := startDaemon(t)
	c := d.runPod(t, hostNetwork).run(t)
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, _, err := d.cri.ExecSync(ctx, c.id, []string{"sleep", "6661"}, 0)
			done <- err
		}()
		eventually(t, "the command runs", func() error {
			if len(commandLines("sleep 6661")) == 0 {
				return context.DeadlineExceeded
			}
			return nil
		})
		cancel()
		<-done
		eventually(t, "the command ends", func() error {
			if left := commandLines("sleep 6661"); len(left) > 0 {
				return unexpected("the number of processes", len(left), 0)
			}
			return nil
		})
	}
}
