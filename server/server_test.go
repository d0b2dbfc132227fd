package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/sandbox/stream"
)

func TestPanicReturnsInternal(t *testing.T) {
	pods := &fakePods{hook: func(_ context.Context, method string) error {
		if method == "StopPodSandbox" {
			panic("secret of the panic")
		}
		return nil
	}}
	h := start(t, testConfig, pods, &fakeImages{})
	_, err := h.runtime.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: "x"})
	if status.Code(err) != codes.Internal || strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v", err)
	}
	if _, err := h.runtime.Version(t.Context(), &runtimeapi.VersionRequest{}); err != nil {
		t.Errorf("after the panic: %v", err)
	}
	for _, want := range []string{"panic=\"secret of the panic\"", "method=StopPodSandbox", "fake_test.go", "code=Internal"} {
		if !strings.Contains(h.log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, h.log)
		}
	}
}

func TestErrorsKeepCodeAndText(t *testing.T) {
	var fail error
	pods := &fakePods{hook: func(context.Context, string) error { return fail }}
	h := start(t, testConfig, pods, &fakeImages{})
	for _, tc := range []struct {
		err  error
		code codes.Code
	}{
		{errdefs.NotFound("no pod"), codes.NotFound},
		{fmt.Errorf("stop pod x: %w", errdefs.FailedPrecondition("busy")), codes.FailedPrecondition},
		{errors.Join(errors.New("first"), errdefs.Unavailable("later")), codes.Unavailable},
		{fmt.Errorf("stop pod x: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		{context.Canceled, codes.Canceled},
		{errors.New("plain"), codes.Unknown},
	} {
		t.Run(fmt.Sprint(tc.err), func(t *testing.T) {
			fail = tc.err
			_, err := h.runtime.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: "x"})
			if s := status.Convert(err); s.Code() != tc.code || s.Message() != tc.err.Error() {
				t.Errorf("%v arrived as %v", tc.err, err)
			}
		})
	}
}

func TestDeadlineReachesTheManager(t *testing.T) {
	pods := &fakePods{hook: func(ctx context.Context, _ string) error {
		<-ctx.Done() // only the client's deadline ends this
		return ctx.Err()
	}}
	h := start(t, testConfig, pods, &fakeImages{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := h.runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: "x"})
	if status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("error %v", err)
	}
}

func TestMessageSizes(t *testing.T) {
	big := bytes.Repeat([]byte("x"), MaxMessage)
	pods := &fakePods{exec: stream.Result{Stdout: big, Stderr: big, ExitCode: -1}}
	h := start(t, testConfig, pods, &fakeImages{})

	resp, err := h.runtime.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: "c", Cmd: []string{"a"}})
	if err != nil {
		t.Fatalf("response with the maximum output: %v", err)
	}
	if n := len(resp.Stdout) + len(resp.Stderr); n != maxOutput || resp.ExitCode != -1 {
		t.Errorf("%d bytes of output, exit code %d", n, resp.ExitCode)
	}

	cfg := &runtimeapi.PodSandboxConfig{
		Metadata:    &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: "n"},
		Annotations: map[string]string{"a": ""},
	}
	req := &runtimeapi.RunPodSandboxRequest{Config: cfg}
	cfg.Annotations["a"] = string(big[:MaxMessage-proto.Size(req)-16])
	if _, err := h.runtime.RunPodSandbox(t.Context(), req); err != nil {
		t.Errorf("request of %d bytes: %v", proto.Size(req), err)
	}
	cfg.Annotations["a"] = string(big)
	if _, err := h.runtime.RunPodSandbox(t.Context(), req); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("request of %d bytes: %v", proto.Size(req), err)
	}
}

func TestFit(t *testing.T) {
	for _, tc := range []struct{ out, err, wantOut, wantErr int }{
		{0, 0, 0, 0}, {4, 6, 4, 6}, {10, 0, 10, 0}, {11, 0, 10, 0}, {0, 11, 0, 10},
		{20, 20, 5, 5}, {20, 3, 7, 3}, {3, 20, 3, 7}, {6, 5, 5, 5},
	} {
		t.Run(fmt.Sprintf("%d and %d", tc.out, tc.err), func(t *testing.T) {
			out, err := fit(make([]byte, tc.out), make([]byte, tc.err), 10)
			if len(out) != tc.wantOut || len(err) != tc.wantErr {
				t.Errorf("%d and %d bytes became %d and %d", tc.out, tc.err, len(out), len(err))
			}
		})
	}
}

func TestLogHasIDsAndNoCredentials(t *testing.T) {
	images := &fakeImages{}
	h := start(t, testConfig, &fakePods{}, images)
	_, err := h.images.PullImage(t.Context(), &runtimeapi.PullImageRequest{
		Image: &runtimeapi.ImageSpec{Image: "registry.example/app"},
		Auth:  &runtimeapi.AuthConfig{Username: "u-s-e-r", Password: "p-a-s-s", Auth: "a-u-t-h", IdentityToken: "i-d", RegistryToken: "t-o-k"},
	})
	if status.Code(err) != codes.NotFound {
		t.Fatal(err)
	}
	if images.auth.GetPassword() != "p-a-s-s" {
		t.Error("the store did not get the credentials")
	}
	if _, err := h.runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: "ctr7"}); err != nil {
		t.Fatal(err)
	}
	log := h.log.String()
	for _, want := range []string{"msg=PullImage image=registry.example/app", "code=NotFound", "msg=StartContainer container=ctr7", "code=OK", "took=", fmt.Sprintf("peer=%d", os.Getpid())} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	for _, secret := range []string{"u-s-e-r", "p-a-s-s", "a-u-t-h", "i-d", "t-o-k"} {
		if strings.Contains(log, secret) {
			t.Errorf("the log has %q:\n%s", secret, log)
		}
	}
}

// Errors and log lines of requests have kubelet's names of the object.
func TestRequestsHaveNames(t *testing.T) {
	id := strings.Repeat("7", 64)
	cfg := testConfig
	cfg.Names = func(asked string) (state.Names, bool) {
		return state.Names{Namespace: "ns", Pod: "web", Container: "app"}, asked == id
	}
	h := start(t, cfg, &fakePods{hook: func(context.Context, string) error { return errdefs.FailedPrecondition("it has exited") }}, &fakeImages{})
	_, err := h.runtime.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	testutil.WantError(t, err, codes.FailedPrecondition, "pod ns/web: container app: it has exited")
	meta := &runtimeapi.PodSandboxMetadata{Namespace: "ns", Name: "new", Uid: "u"}
	_, err = h.runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{Metadata: meta}})
	testutil.WantError(t, err, codes.FailedPrecondition, "pod ns/new: it has exited")
	for _, want := range []string{"namespace=ns podName=web containerName=app took=", `error="it has exited"`, "namespace=ns podName=new took="} {
		if log := h.log.String(); !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

// wantMessage checks the whole text of an error with the code Unknown. kubelet compares its
// beginning.
func wantMessage(t *testing.T, err error, text string) {
	t.Helper()
	if s := status.Convert(err); s.Code() != codes.Unknown || s.Message() != text {
		t.Errorf("got %v; want %s", err, text)
	}
}

// kubelet expects the code Unknown for a registry that does not answer. Operators read Unavailable.
func TestUnavailableRegistryInTheLog(t *testing.T) {
	down := errdefs.New(codes.Unknown, "%w: pull x: connection refused", crierrors.ErrRegistryUnavailable)
	h := start(t, testConfig, &fakePods{}, &fakeImages{err: down})
	pod := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Namespace: "ns", Name: "web", Uid: "u"}}
	spec := &runtimeapi.ImageSpec{Image: "x"}
	_, err := h.images.PullImage(t.Context(), &runtimeapi.PullImageRequest{Image: spec, SandboxConfig: pod})
	wantMessage(t, err, "RegistryUnavailable: pull x: connection refused")
	_, err = h.images.PullSecurityProfile(t.Context(), &runtimeapi.PullSecurityProfileRequest{Image: spec, SandboxConfig: pod,
		ProfileKind: runtimeapi.SecurityProfileKind_Seccomp})
	wantMessage(t, err, "RegistryUnavailable: pull x: connection refused")
	if log := h.log.String(); !strings.Contains(log, "code=Unavailable") {
		t.Error(log)
	}
}

func TestNoReflection(t *testing.T) {
	h := start(t, testConfig, &fakePods{}, &fakeImages{})
	for _, service := range []string{"grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} {
		stream, err := h.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/"+service+"/ServerReflectionInfo")
		testutil.Must(t, err)
		if err := stream.RecvMsg(&runtimeapi.VersionResponse{}); status.Code(err) != codes.Unimplemented {
			t.Errorf("%s: %v", service, err)
		}
	}
}

// When the server stops, running requests get their answers and new requests are refused.
func TestStopWaitsForRunningRequests(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	pods := &fakePods{hook: func(context.Context, string) error {
		close(entered)
		<-release
		return nil
	}}
	h := start(t, testConfig, pods, &fakeImages{})
	answer := make(chan error, 1)
	go func() {
		_, err := h.runtime.StopPodSandbox(context.Background(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: "x"})
		answer <- err
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	for !refused(h.path) {
		runtime.Gosched()
	}
	select {
	case err := <-stopped:
		t.Fatalf("Serve returned %v while a request ran", err)
	default:
	}
	close(release)
	if err := <-answer; err != nil {
		t.Errorf("the running request: %v", err)
	}
	if err := <-stopped; err != nil {
		t.Errorf("Serve: %v", err)
	}
	if _, err := os.Lstat(h.path); !os.IsNotExist(err) {
		t.Errorf("the socket remains: %v", err)
	}
}

func refused(path string) bool {
	conn, err := net.Dial("unix", path)
	if err == nil {
		conn.Close()
	}
	return err != nil
}

func TestStopCancelsHungRequests(t *testing.T) {
	entered := make(chan struct{})
	pods := &fakePods{hook: func(ctx context.Context, _ string) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	}}
	h := start(t, testConfig, pods, &fakeImages{})
	h.server.grace = 20 * time.Millisecond
	answer := make(chan error, 1)
	go func() {
		_, err := h.runtime.StopPodSandbox(context.Background(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: "x"})
		answer <- err
	}()
	<-entered
	if err := h.stop(); err != nil {
		t.Errorf("Serve: %v", err)
	}
	if err := <-answer; err == nil {
		t.Error("the hung request succeeded")
	}
}

// A stop cuts requests that may take minutes, long before stopGrace. An ExecSync that ends soon is
// answered.
func TestStopCutsLongRequests(t *testing.T) {
	ctx := context.Background()
	for name, test := range map[string]struct {
		call func(*harness) error
		soon bool
	}{
		"StopContainer": {call: func(h *harness) error {
			_, err := h.runtime.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: "x", Timeout: 3600})
			return err
		}},
		"RemoveContainer": {call: func(h *harness) error {
			_, err := h.runtime.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: "x"})
			return err
		}},
		"long ExecSync":  {call: execSync},
		"short ExecSync": {call: execSync, soon: true},
	} {
		t.Run(name, func(t *testing.T) {
			entered := make(chan struct{})
			var h *harness
			pods := &fakePods{hook: func(ctx context.Context, _ string) error {
				close(entered)
				if test.soon {
					<-h.server.stopping.Done()
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			}}
			h = start(t, testConfig, pods, &fakeImages{})
			h.server.grace = time.Hour
			answer := make(chan error, 1)
			go func() { answer <- test.call(h) }()
			<-entered
			if err := h.stop(); err != nil {
				t.Errorf("Serve: %v", err)
			}
			want := codes.Unavailable
			if test.soon {
				want = codes.OK
			}
			if err := <-answer; status.Code(err) != want {
				t.Errorf("got %v, want %v", err, want)
			}
		})
	}
}

func execSync(h *harness) error {
	_, err := h.runtime.ExecSync(context.Background(), &runtimeapi.ExecSyncRequest{ContainerId: "x", Cmd: []string{"true"}})
	return err
}

func TestServeReportsBrokenListener(t *testing.T) {
	l, err := Listen(filepath.Join(t.TempDir(), "s"))
	testutil.Must(t, err)
	l.Close()
	err = New(withEvents(t, testConfig), &fakePods{}, &fakeImages{}, discardLog).Serve(t.Context(), l)
	if err == nil || !strings.Contains(err.Error(), "serve CRI on") {
		t.Errorf("Serve: %v", err)
	}
}

// The client runs as another user, and the socket's mode admits all users.
func TestOtherUsersAreRefused(t *testing.T) {
	testutil.NeedRoot(t)
	h := start(t, testConfig, &fakePods{}, &fakeImages{})
	for dir := filepath.Dir(h.path); dir != os.TempDir(); dir = filepath.Dir(dir) {
		testutil.Must(t, os.Chmod(dir, 0o755))
	}
	testutil.Must(t, os.Chmod(h.path, 0o666))
	conn := dial(t, h.path, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
		return dialAs(65534, h.path)
	}))
	defer conn.Close()
	_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(t.Context(), &runtimeapi.VersionRequest{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("uid nobody got %v", err)
	}
	if want := "msg=\"connection refused\""; !strings.Contains(h.log.String(), want) || !strings.Contains(h.log.String(), "uid=65534") {
		t.Errorf("the log lacks %s:\n%s", want, h.log)
	}
	if _, err := h.runtime.Version(t.Context(), &runtimeapi.VersionRequest{}); err != nil {
		t.Errorf("root: %v", err)
	}
}

// dialAs connects from a thread with another effective uid, which the kernel records in connect(2).
func dialAs(uid int, path string) (net.Conn, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	keep := ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, uintptr(uid), keep); errno != 0 {
		return nil, errno
	}
	conn, err := net.Dial("unix", path)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, keep); errno != 0 {
		panic(errno)
	}
	return conn, err
}
