package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/client/clienttest"
	"berth/internal/errdefs"
	"berth/internal/testutil"
)

func dial(t *testing.T, s *clienttest.Server) *client.Client {
	t.Helper()
	c, err := client.Dial(t.Context(), clienttest.Start(t, s))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestDialErrors(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	listener, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	for socket, want := range map[string]string{
		"unix://" + dir + "/none":  "no runtime listens on " + dir + "/none",
		stale:                      "no runtime listens on",
		"run/berth.sock":           "want unix:///absolute/path",
		"tcp://127.0.0.1:1":        "want unix:///absolute/path",
		"unix:///" + dir + "/none": "no runtime listens on",
	} {
		_, err := client.Dial(t.Context(), socket)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", socket, err, want)
		}
	}
}

func TestExplainDropsTheRuntimesPrefix(t *testing.T) {
	t.Parallel()
	id := strings.Repeat("ab12", 16)
	for _, tt := range []struct{ what, text, want string }{
		{"exec in container web/c", "exec in container " + id + `: exec: "x": not found`, `exec in container web/c: exec: "x": not found`},
		{"start container c", "invalid request: start container " + id[:12] + ": no space", "start container c: no space"},
		{"start container c", "container " + id + " is gone", "start container c: container ab12ab12ab12 is gone"},
		{"pull a", "RegistryUnavailable: pull a: no route", "RegistryUnavailable: pull a: no route"},
		{"pull a", "image a@sha256:" + id + " is bad", "pull a: image a@sha256:" + id + " is bad"},
		{"trace", "no pod", "trace: no pod"},
	} {
		cause := errors.New(tt.text)
		if err := client.Explain(tt.what, cause); err.Error() != tt.want || !errors.Is(err, cause) {
			t.Errorf("%v, want %s", err, tt.want)
		}
	}
}

func TestErrorsExplainTheirCode(t *testing.T) {
	t.Parallel()
	tests := []struct {
		err  error
		want string
	}{
		{status.Error(codes.NotFound, "container x not found"), "container x not found"},
		{status.Error(codes.NotFound, "no container x"), "not found: no container x"},
		{status.Error(codes.FailedPrecondition, "pod is not ready"), "not possible in this state: pod is not ready"},
		{status.Error(codes.Internal, "first line\nsecond line\r\n"), "internal error of the runtime: first line; second line"},
		{status.Error(codes.Unimplemented, ""), "not supported by this runtime"},
		{status.Error(codes.Unknown, "plain"), "plain"},
		{status.Error(codes.Unknown, ""), "unknown error"},
	}
	for _, test := range tests {
		c := dial(t, &clienttest.Server{Hook: func(context.Context, string) error { return test.err }})
		err := c.StopPod(t.Context(), "0123456789abcdef")
		if want := "stop pod 0123456789ab: " + test.want; err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
		if errdefs.Code(err) != status.Code(test.err) {
			t.Errorf("%v: code %v", err, errdefs.Code(err))
		}
	}
}

func TestCancelledCallIsCancelled(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	c := dial(t, &clienttest.Server{Hook: func(ctx context.Context, _ string) error {
		cancel()
		<-ctx.Done()
		return ctx.Err()
	}})
	if err := c.StopPod(ctx, "p"); !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v is not context.Canceled", err)
	}
}

// populate creates pods and containers, named "pod" or "pod/container", and returns their IDs.
func populate(t *testing.T, c *client.Client, s *clienttest.Server, names ...string) map[string]string {
	t.Helper()
	ids, ctx := map[string]string{}, t.Context()
	s.Registry = map[string]*runtimeapi.Image{"i": {Id: "sha256:i"}}
	if _, err := c.Pull(ctx, "i", nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		podName, ctrName, isContainer := strings.Cut(name, "/")
		if !isContainer {
			reply, err := c.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
				Metadata: &runtimeapi.PodSandboxMetadata{Name: podName, Namespace: "ns", Uid: podName}, LogDirectory: t.TempDir()}})
			if err != nil {
				t.Fatal(err)
			}
			ids[name] = reply.GetPodSandboxId()
			continue
		}
		ctrName, attempt, _ := strings.Cut(ctrName, ":")
		reply, err := c.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: ids[podName], Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: ctrName, Attempt: uint32(len(attempt))}, LogPath: strings.ReplaceAll(name, "/", "-"),
			Image: &runtimeapi.ImageSpec{Image: "sha256:i"}, Labels: map[string]string{"io.kubernetes.pod.name": podName}}})
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = reply.GetContainerId()
	}
	return ids
}

func TestFindByNameIDOrPrefix(t *testing.T) {
	t.Parallel()
	s := &clienttest.Server{}
	c := dial(t, s)
	ids := populate(t, c, s, "web", "web/app", "web/log", "db", "db/log", "db/once", "db/once:+", "c000", "web/a000", "web/b000")
	find := func(ref string) (string, error) {
		container, pod, err := c.Find(t.Context(), ref)
		if container != nil {
			return container.GetId(), err
		}
		return pod.GetId(), err
	}
	app := ids["web/app"]
	for ref, want := range map[string]string{
		app: app, app[:63]: app, "app": app, "web/app": app, "web": ids["web"], "ns/db": ids["db"],
		"db/log": ids["db/log"], "once": ids["db/once:+"], ids["db"]: ids["db"],
		// Names that are also prefixes of IDs.
		"c000": ids["c000"], "a000": ids["web/a000"], "b000": ids["web/b000"],
	} {
		if got, err := find(ref); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", ref, got, err, want)
		}
	}
	for ref, want := range map[string]codes.Code{
		"log": codes.InvalidArgument, "c0000": codes.InvalidArgument, "a0000": codes.InvalidArgument, app[:3]: codes.NotFound, "nothing": codes.NotFound, "": codes.InvalidArgument,
	} {
		if got, err := find(ref); errdefs.Code(err) != want {
			t.Errorf("%q: %s, %v; want %v", ref, got, err, want)
		}
	}
	_, err := find("log")
	for _, name := range []string{"web/log", "db/log"} {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%v does not name %s", err, name)
		}
	}
}

// A name of a container and of a pod means neither. A command for containers takes the container of
// the pod with its name.
func TestNameOfContainerAndPodIsAmbiguous(t *testing.T) {
	t.Parallel()
	s := &clienttest.Server{}
	c := dial(t, s)
	ids := populate(t, c, s, "web", "web/web", "web/log", "db", "web/db")
	for ref, inside := range map[string]string{"web": ids["web/web"], "db": ""} {
		_, _, err := c.Find(t.Context(), ref)
		testutil.WantError(t, err, codes.InvalidArgument, "container "+client.ShortID(ids["web/"+ref])+" (web/"+ref+")", "pod "+client.ShortID(ids[ref])+" (ns/"+ref+")")
		container, pod, err := c.FindForContainer(t.Context(), ref)
		if container.GetId() != inside || pod != nil || (err == nil) != (inside != "") {
			t.Errorf("%s for a container: %v, %v, %v", ref, container, pod, err)
		}
	}
	for ref, want := range map[string]string{"ns/web": ids["web"], "web/web": ids["web/web"]} {
		container, pod, err := c.Find(t.Context(), ref)
		if err != nil || container.GetId()+pod.GetId() != want {
			t.Errorf("%s: %v, %v, %v", ref, container, pod, err)
		}
	}
}

func TestListsAreNewestFirst(t *testing.T) {
	t.Parallel()
	s := &clienttest.Server{}
	c := dial(t, s)
	ids := populate(t, c, s, "a", "a/1", "b", "a/2", "b/3")
	list, err := c.Containers(t.Context())
	if err != nil || len(list) != 3 || list[0].GetId() != ids["b/3"] || list[2].GetId() != ids["a/1"] {
		t.Errorf("%v, %v", list, err)
	}
	own, err := c.ContainersOf(t.Context(), ids["a"])
	if err != nil || len(own) != 2 || own[0].GetId() != ids["a/2"] {
		t.Errorf("%v, %v", own, err)
	}
}

func TestWaitContainerSurvivesRestartOfRuntime(t *testing.T) {
	t.Parallel()
	s := &clienttest.Server{}
	c := dial(t, s)
	ids := populate(t, c, s, "p", "p/c")
	go func() {
		for range 3 {
			s.Unavailable(true)
		}
		s.Unavailable(false)
		_, _ = s.StopContainer(context.Background(), &runtimeapi.StopContainerRequest{ContainerId: ids["p/c"], Timeout: 1})
	}()
	state, err := c.WaitContainer(t.Context(), ids["p/c"])
	if err != nil || state.GetExitCode() != 143 {
		t.Errorf("%v, %v", state, err)
	}
	if _, err := c.WaitContainer(t.Context(), "none"); !errdefs.IsNotFound(err) {
		t.Errorf("unknown container: %v", err)
	}
}

func TestPullReportsProgress(t *testing.T) {
	t.Parallel()
	layers := []client.Layer{{Digest: "sha256:a", State: "downloading", Done: 5, Total: 10}}
	info, err := json.Marshal([]client.Pull{
		{Ref: "docker.io/library/other:latest"}, {Ref: "docker.io/library/busybox:latest", Started: time.Now(), Layers: layers},
	})
	if err != nil {
		t.Fatal(err)
	}
	seen := make(chan struct{})
	c := dial(t, &clienttest.Server{
		PullsInfo: string(info), Registry: map[string]*runtimeapi.Image{"busybox": {Id: "sha256:bb"}},
		Hook: func(context.Context, string) error { <-seen; return nil }, // the pull continues until its progress has been reported
	})
	var got []client.Layer
	id, err := c.PullWithProgress(t.Context(), "busybox", nil, func(l []client.Layer) {
		if got == nil {
			got = l
			close(seen)
		}
	})
	if err != nil || id != "sha256:bb" || !slices.Equal(got, layers) {
		t.Errorf("%s, %v, %v", id, got, err)
	}
}

func TestPullErrors(t *testing.T) {
	t.Parallel()
	c := dial(t, &clienttest.Server{PullsInfo: "not json"})
	_, err := c.PullWithProgress(t.Context(), "none", nil, func([]client.Layer) { t.Error("progress was reported for a failed pull") })
	if !errdefs.IsNotFound(err) || !strings.HasPrefix(err.Error(), "pull none: not found: ") {
		t.Errorf("%v", err)
	}
}

// berth's own messages already name the operation and the object.
func TestPullErrorNamesOperationOnce(t *testing.T) {
	t.Parallel()
	const message = "pull none: RegistryUnavailable: connection refused"
	c := dial(t, &clienttest.Server{Hook: func(context.Context, string) error { return status.Error(codes.Unavailable, message) }})
	if _, err := c.Pull(t.Context(), "none", nil); err == nil || err.Error() != "not available: "+message {
		t.Errorf("%v", err)
	}
}

func TestShortID(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]string{"sha256:0123456789abcdef": "0123456789ab", "short": "short", "": ""} {
		if got := client.ShortID(id); got != want {
			t.Errorf("%q: %q", id, got)
		}
	}
}
