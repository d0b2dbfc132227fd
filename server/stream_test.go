package server

import (
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/stream"
)

// All containers of fakePods run without a terminal.

func (f *fakePods) CheckExec(id string, _ []string) (string, error) {
	c, err := f.Container(id)
	if err != nil {
		return "", err
	}
	return c.ID, nil
}

func (f *fakePods) CheckAttach(id string, terminal bool) (string, error) {
	if terminal {
		return "", errdefs.InvalidArgument("no terminal")
	}
	return f.CheckExec(id, nil)
}

func (f *fakePods) CheckPortForward(podID string) (string, error) {
	p, err := f.Pod(podID)
	if err != nil {
		return "", err
	}
	return p.ID, nil
}

// fakeSessions records requests.
type fakeSessions struct {
	mu      sync.Mutex // guards the fields below
	exec    *runtimeapi.ExecRequest
	attach  *runtimeapi.AttachRequest
	forward *runtimeapi.PortForwardRequest
}

func (f *fakeSessions) ExecWith(req *runtimeapi.ExecRequest, _ stream.ExecOptions) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.exec = req
	return "http://here/exec/1", nil
}

func (f *fakeSessions) Attach(req *runtimeapi.AttachRequest) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.attach = req
	return "http://here/attach/1", nil
}

func (f *fakeSessions) PortForward(req *runtimeapi.PortForwardRequest) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forward = req
	return "http://here/portforward/1", nil
}

func TestSessionRequests(t *testing.T) {
	sessions := &fakeSessions{}
	cfg := testConfig
	cfg.Sessions = sessions
	h := start(t, cfg, &fakePods{}, &fakeImages{})
	pod, err := h.runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: "n", Uid: "u"}}})
	testutil.Must(t, err)
	ctr, err := h.runtime.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod.PodSandboxId, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: "i"}}})
	testutil.Must(t, err)
	id, cmd := ctr.ContainerId, []string{"sh"}
	exec := func(req *runtimeapi.ExecRequest) func() (string, error) {
		return func() (string, error) {
			resp, err := h.runtime.Exec(t.Context(), req)
			return resp.GetUrl(), err
		}
	}
	attach := func(req *runtimeapi.AttachRequest) func() (string, error) {
		return func() (string, error) {
			resp, err := h.runtime.Attach(t.Context(), req)
			return resp.GetUrl(), err
		}
	}
	forward := func(req *runtimeapi.PortForwardRequest) func() (string, error) {
		return func() (string, error) {
			resp, err := h.runtime.PortForward(t.Context(), req)
			return resp.GetUrl(), err
		}
	}
	for _, tt := range []struct {
		name string
		call func() (string, error)
		code codes.Code
		url  string
	}{
		{"exec", exec(&runtimeapi.ExecRequest{ContainerId: id, Cmd: cmd, Stdout: true, Stderr: true}), codes.OK, "http://here/exec/1"},
		{"exec with terminal", exec(&runtimeapi.ExecRequest{ContainerId: id, Cmd: cmd, Tty: true, Stdin: true, Stdout: true}), codes.OK, "http://here/exec/1"},
		{"exec without ID", exec(&runtimeapi.ExecRequest{Cmd: cmd, Stdout: true}), codes.InvalidArgument, ""},
		{"exec in unknown container", exec(&runtimeapi.ExecRequest{ContainerId: "no", Cmd: cmd, Stdout: true}), codes.NotFound, ""},
		{"exec without command", exec(&runtimeapi.ExecRequest{ContainerId: id, Stdout: true}), codes.InvalidArgument, ""},
		{"exec without streams", exec(&runtimeapi.ExecRequest{ContainerId: id, Cmd: cmd}), codes.InvalidArgument, ""},
		{"exec with terminal and stderr", exec(&runtimeapi.ExecRequest{ContainerId: id, Cmd: cmd, Tty: true, Stdout: true, Stderr: true}), codes.InvalidArgument, ""},
		{"attach", attach(&runtimeapi.AttachRequest{ContainerId: id, Stdin: true}), codes.OK, "http://here/attach/1"},
		{"attach without ID", attach(&runtimeapi.AttachRequest{Stdin: true}), codes.InvalidArgument, ""},
		{"attach to unknown container", attach(&runtimeapi.AttachRequest{ContainerId: "no", Stdout: true}), codes.NotFound, ""},
		{"attach without streams", attach(&runtimeapi.AttachRequest{ContainerId: id}), codes.InvalidArgument, ""},
		{"attach with a terminal to a container without", attach(&runtimeapi.AttachRequest{ContainerId: id, Tty: true, Stdout: true}), codes.InvalidArgument, ""},
		{"forward", forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.PodSandboxId}), codes.OK, "http://here/portforward/1"},
		{"forward ports", forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.PodSandboxId, Port: []int32{1, 65535}}), codes.OK, "http://here/portforward/1"},
		{"forward port 0", forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.PodSandboxId, Port: []int32{0}}), codes.InvalidArgument, ""},
		{"forward port 65536", forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.PodSandboxId, Port: []int32{65536}}), codes.InvalidArgument, ""},
		{"forward too many", forward(&runtimeapi.PortForwardRequest{PodSandboxId: pod.PodSandboxId, Port: make([]int32, 128)}), codes.InvalidArgument, ""},
		{"forward without ID", forward(&runtimeapi.PortForwardRequest{}), codes.InvalidArgument, ""},
		{"forward to unknown pod", forward(&runtimeapi.PortForwardRequest{PodSandboxId: "no"}), codes.NotFound, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if url, err := tt.call(); status.Code(err) != tt.code || url != tt.url {
				t.Errorf("got %q, %v; want %q, %v", url, err, tt.url, tt.code)
			}
		})
	}
	if e := sessions.exec; e.GetContainerId() != id || !e.GetTty() || !e.GetStdin() || !e.GetStdout() || e.GetStderr() {
		t.Errorf("the session that was made: %v", e)
	}
}
