package integration

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Requests with the same identity and config join, at once and afterwards.
func TestRunPodSandboxIsIdempotent(t *testing.T) {
	d := startDaemon(t)
	config := d.podConfig(t)
	const n = 5
	type result struct {
		id  string
		err error
	}
	results := make(chan result, n)
	for range n {
		go func() {
			id, err := d.cri.RunPodSandbox(t.Context(), config, "")
			results <- result{id, err}
		}()
	}
	ids := map[string]bool{}
	for range n {
		r := <-results
		must(t, r.err)
		ids[r.id] = true
	}
	pod := d.runPodConfig(t, config)
	ids[pod.id] = true
	equal(t, "number of pods made", len(ids), 1)
	equal(t, "number of pods listed", len(get(d.cri.ListPodSandbox(t.Context(), nil))(t)), 1)

	d.restart(t)
	equal(t, "ID after a restart", d.runPodConfig(t, config).id, pod.id)

	other := proto.Clone(config).(*runtimeapi.PodSandboxConfig)
	other.Hostname = "another"
	_, err := d.cri.RunPodSandbox(t.Context(), other, "")
	wantCode(t, err, codes.AlreadyExists, pod.id)

	next := proto.Clone(config).(*runtimeapi.PodSandboxConfig)
	next.Metadata.Attempt = 1
	if again := d.runPodConfig(t, next); again.id == pod.id {
		t.Error("another attempt got the same pod")
	}
}

func TestCreateContainerIsIdempotent(t *testing.T) {
	d := startDaemon(t)
	pod := d.runPod(t, hostNetwork)
	c := pod.create(t, containerNamed("main"))
	id, err := d.cri.CreateContainer(t.Context(), pod.id, c.config, pod.config)
	must(t, err)
	equal(t, "ID", id, c.id)
	other := proto.Clone(c.config).(*runtimeapi.ContainerConfig)
	other.Command = []string{"sleep", "1"}
	_, err = d.cri.CreateContainer(t.Context(), pod.id, other, pod.config)
	wantCode(t, err, codes.AlreadyExists, c.id)
	next := proto.Clone(c.config).(*runtimeapi.ContainerConfig)
	next.Metadata.Attempt = 1
	id, err = d.cri.CreateContainer(t.Context(), pod.id, next, pod.config)
	must(t, err)
	if id == c.id {
		t.Error("another attempt got the same container")
	}
	// Once removed, the identity is free.
	must(t, d.cri.RemoveContainer(t.Context(), c.id))
	id, err = d.cri.CreateContainer(t.Context(), pod.id, c.config, pod.config)
	must(t, err)
	if id == c.id {
		t.Error("a removed container came back under its ID")
	}
}

// kubelet's deadline passes, and its retry gets the pod: "name is reserved" cannot happen.
func TestRetryAfterClientsDeadline(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `while [ ! -e "`+"$(dirname \"$0\")"+`/go" ]; do sleep 0.02; done; `+fakeResult)
	d := startDaemon(t, withBinDir(plugin.dir), withNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	config := d.podConfig(t)
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := d.cri.RunPodSandbox(ctx, config, "")
		first <- err
	}()
	eventually(t, "the plugin is called", func() error {
		if len(plugin.calls("ADD")) == 0 {
			return context.DeadlineExceeded
		}
		return nil
	})
	cancel()
	wantCode(t, <-first, codes.Canceled)
	plugin.release(t)
	pod := d.runPodConfig(t, config)
	equal(t, "state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
}
