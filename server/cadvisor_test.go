package server

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image"
	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// cadvisorFake holds pods and containers, and one pod whose creation is in progress.
type cadvisorFake struct {
	pods       map[string]*state.Pod
	containers map[string]*state.Container
}

func (f cadvisorFake) PodOrPlanned(id string) (*state.Pod, error) {
	if p := f.pods[id]; p != nil {
		return p, nil
	}
	return nil, errdefs.NotFound("pod sandbox %q does not exist", id)
}

// Container also finds containers by a prefix of their ID, like the manager.
func (f cadvisorFake) Container(id string) (*state.Container, error) {
	for full, c := range f.containers {
		if id != "" && strings.HasPrefix(full, id) {
			return c, nil
		}
	}
	if id == "panic" {
		panic("of a test")
	}
	return nil, errdefs.NotFound("container %q does not exist", id)
}

// startCadvisor serves pods on a socket, and returns a connection and the log.
func startCadvisor(t *testing.T, cfg CadvisorConfig, pods CadvisorPods, images Images) (*grpc.ClientConn, string, *testutil.Buffer) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "run", "containerd.sock")
	l, err := ListenForCadvisor(path)
	testutil.Must(t, err)
	var log testutil.Buffer
	srv := NewCadvisor(cfg, pods, images, slog.New(slog.NewTextHandler(&log, nil)))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	conn := dial(t, path)
	t.Cleanup(func() { conn.Close() })
	return conn, path, &log
}

func inNamespace(t *testing.T, name string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), "containerd-namespace", name)
}

func observed() cadvisorFake {
	created := time.Unix(100, 0)
	labels := map[string]string{"io.kubernetes.pod.name": "p", "io.cri-containerd.kind": "sandbox"} // a user could set these labels
	container := func(id string, in runtimeapi.ContainerState, pid int, code int32) *state.Container {
		return testContainer{ID: id, PodID: "pod", CreatedAt: created, State: in, PID: pid, ExitCode: code, FinishedAt: created.Add(time.Second), ImageID: idA,
			Config:  &runtimeapi.ContainerConfig{Labels: labels, Annotations: map[string]string{"a": "b"}, Image: &runtimeapi.ImageSpec{Image: idA}},
			Process: &specs.Process{Args: []string{"sh"}, Env: []string{"A=B"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{Bounding: []string{"CAP_KILL"}}}}.snapshot()
	}
	pod := func(id string, pause int) *state.Pod {
		return testPod{ID: id, CreatedAt: created, PausePID: pause, Config: &runtimeapi.PodSandboxConfig{Labels: map[string]string{"io.kubernetes.pod.name": "p"}}}.snapshot()
	}
	return cadvisorFake{
		pods: map[string]*state.Pod{"pod": pod("pod", 7), "planned": pod("planned", 0)},
		containers: map[string]*state.Container{
			"created": container("created", runtimeapi.ContainerState_CONTAINER_CREATED, 0, 0),
			"running": container("running", runtimeapi.ContainerState_CONTAINER_RUNNING, 8, 0),
			"exited":  container("exited", runtimeapi.ContainerState_CONTAINER_EXITED, 0, 137),
		},
	}
}

func TestCadvisorContainers(t *testing.T) {
	for _, tc := range []struct {
		name, id, pauseImage string
		kind, image          string
		env                  []string
	}{
		{name: "a container", id: "running", kind: "container", image: idA, env: []string{"A=B"}},
		{name: "a container that was not started", id: "created", kind: "container", image: idA, env: []string{"A=B"}},
		{name: "a pod's pause", id: "pod", kind: "sandbox", image: "localhost/berth-pause:built-in"},
		{name: "a pause of an image", id: "pod", pauseImage: "registry.k8s.io/pause:3.10", kind: "sandbox", image: "registry.k8s.io/pause:3.10"},
		{name: "a pod that is starting", id: "planned", kind: "sandbox", image: "localhost/berth-pause:built-in"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			conn, _, _ := startCadvisor(t, CadvisorConfig{PauseImage: tc.pauseImage}, observed(), &fakeImages{})
			resp, err := containersapi.NewContainersClient(conn).Get(inNamespace(t, "k8s.io"), &containersapi.GetContainerRequest{ID: tc.id})
			testutil.Must(t, err)
			c := resp.Container
			if c.ID != tc.id || c.Labels["io.kubernetes.pod.name"] != "p" || c.Labels["io.cri-containerd.kind"] != tc.kind || c.Image != tc.image || c.CreatedAt.AsTime().Unix() != 100 {
				t.Errorf("got %v", c)
			}
			var spec specs.Spec
			if err := json.Unmarshal(c.Spec.GetValue(), &spec); err != nil || spec.Process == nil {
				t.Fatalf("spec %s: %v", c.Spec.GetValue(), err)
			}
			if fmt.Sprint(spec.Process.Env) != fmt.Sprint(tc.env) || spec.Process.Capabilities != nil {
				t.Errorf("the process is %+v", spec.Process)
			}
		})
	}
}

func TestCadvisorImageNames(t *testing.T) {
	for _, tc := range []struct{ name, image, user, want string }{
		{"name from the user", idA, "busybox", "docker.io/library/busybox:latest"},
		{"with a digest", idA, "reg.example/a@" + idB, "reg.example/a@" + idB},
		{"requested by name", "reg.example/a:1", "", "reg.example/a:1"},
		{"by ID, image with names", idB, "", "reg.example/b:1"},
		{"by ID, image without name", idA, "", idA},
		{"no name", idA, "UPPER CASE", idA},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := &cadvisorService{images: &fakeImages{images: []*image.Image{{ID: idB, RepoTags: []string{"reg.example/b:1"}}}}}
			id := idA
			if tc.image == idB {
				id = idB
			}
			c := testContainer{ImageID: id, Config: &runtimeapi.ContainerConfig{Image: &runtimeapi.ImageSpec{Image: tc.image, UserSpecifiedImage: tc.user}}}.snapshot()
			if got := s.fullImageName(c); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestCadvisorTasks(t *testing.T) {
	conn, _, _ := startCadvisor(t, CadvisorConfig{}, observed(), &fakeImages{})
	for _, tc := range []struct {
		id     string
		code   codes.Code
		status tasktypes.Status
		pid    uint32
		exit   uint32
	}{
		{id: "running", status: tasktypes.Status_RUNNING, pid: 8},
		{id: "exited", status: tasktypes.Status_STOPPED, exit: 137},
		{id: "created", code: codes.NotFound},
		{id: "pod", status: tasktypes.Status_RUNNING, pid: 7},
		{id: "planned", code: codes.NotFound},
		{id: "unknown", code: codes.NotFound},
		{id: "runn", code: codes.NotFound},
		{id: "", code: codes.NotFound},
		{id: "panic", code: codes.Internal},
	} {
		t.Run("id "+tc.id, func(t *testing.T) {
			resp, err := tasksapi.NewTasksClient(conn).Get(inNamespace(t, "k8s.io"), &tasksapi.GetRequest{ContainerID: tc.id})
			p := resp.GetProcess()
			if status.Code(err) != tc.code || p.GetStatus() != tc.status || p.GetPid() != tc.pid || p.GetExitStatus() != tc.exit {
				t.Errorf("got %v, %v", p, err)
			}
		})
	}
}

// Only cAdvisor's calls work, so that berth cannot be mistaken for containerd.
func TestCadvisorRefusesEverythingElse(t *testing.T) {
	conn, _, _ := startCadvisor(t, CadvisorConfig{Version: "1.2.3"}, observed(), &fakeImages{})
	ctx := inNamespace(t, "k8s.io")
	for _, method := range []string{
		"/containerd.services.containers.v1.Containers/List", "/containerd.services.containers.v1.Containers/Delete", "/containerd.services.containers.v1.Containers/ListStream",
		"/containerd.services.tasks.v1.Tasks/Kill", "/containerd.services.tasks.v1.Tasks/Exec", "/containerd.services.tasks.v1.Tasks/Create",
		"/containerd.services.images.v1.Images/List", "/containerd.services.namespaces.v1.Namespaces/List",
		"/runtime.v1.RuntimeService/Version", "/runtime.v1.RuntimeService/ListContainers", "/grpc.health.v1.Health/Check",
	} {
		t.Run(method, func(t *testing.T) {
			if err := conn.Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{}); status.Code(err) != codes.Unimplemented {
				t.Errorf("got %v", err)
			}
		})
	}
	containers := containersapi.NewContainersClient(conn)
	for namespace, code := range map[string]codes.Code{"k8s.io": codes.OK, "default": codes.NotFound, "": codes.NotFound} {
		if _, err := containers.Get(inNamespace(t, namespace), &containersapi.GetContainerRequest{ID: "running"}); status.Code(err) != code {
			t.Errorf("namespace %q: %v", namespace, err)
		}
	}
	if _, err := containers.Get(t.Context(), &containersapi.GetContainerRequest{ID: "running"}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without namespace: %v", err)
	}
	resp, err := versionapi.NewVersionClient(conn).Version(t.Context(), &emptypb.Empty{})
	if err != nil || resp.Version != "1.2.3" || resp.Revision != "berth" {
		t.Errorf("version %v, %v", resp, err)
	}
}

func TestCadvisorSocketAdmitsRootOnly(t *testing.T) {
	testutil.NeedRoot(t)
	conn, path, log := startCadvisor(t, CadvisorConfig{}, observed(), &fakeImages{})
	for p, want := range map[string]fs.FileMode{path: fs.ModeSocket | 0o600, filepath.Dir(path): fs.ModeDir | 0o711} {
		if info, err := os.Stat(p); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v, want %s", p, info.Mode(), err, want)
		}
	}
	for dir := filepath.Dir(filepath.Dir(path)); dir != os.TempDir(); dir = filepath.Dir(dir) {
		testutil.Must(t, os.Chmod(dir, 0o755))
	}
	testutil.Must(t, os.Chmod(path, 0o666)) // as an operator could
	others := dial(t, path, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialAs(65534, path) }))
	defer others.Close()
	if _, err := versionapi.NewVersionClient(others).Version(t.Context(), &emptypb.Empty{}); status.Code(err) != codes.Unavailable {
		t.Errorf("uid nobody got %v", err)
	}
	if !strings.Contains(log.String(), "uid=65534") {
		t.Errorf("the log lacks the refusal:\n%s", log)
	}
	if _, err := versionapi.NewVersionClient(conn).Version(t.Context(), &emptypb.Empty{}); err != nil {
		t.Errorf("root: %v", err)
	}
}

func TestCadvisorKeepsForeignSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	live, err := net.Listen("unix", path)
	testutil.Must(t, err)
	defer live.Close()
	_, err = ListenForCadvisor(path)
	if want := fmt.Sprintf("process %d serves it", os.Getpid()); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "cadvisor_socket") {
		t.Errorf("got %v", err)
	}
	if conn, err := net.Dial("unix", path); err != nil {
		t.Errorf("socket of the other process: %v", err)
	} else {
		conn.Close()
	}
}
