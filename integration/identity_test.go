package integration

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
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
	equal(t, "times the plugin was called", len(plugin.calls("ADD")), 1)
}

// kubelet's deadline passes again and again while an NRI plugin is slow: each retry joins the one creation.
func TestCreateContainerJoins(t *testing.T) {
	d := startDaemon(t, withConfig(`nri_request_timeout = "1m"`))
	plugin, asked, end := slowPlugin(t, d)
	pod := d.runPod(t, hostNetwork)
	d.ensureImage(t, baseImage)
	config := pod.containerConfig()
	create := func(ctx context.Context) (string, error) {
		return d.cri.CreateContainer(ctx, pod.id, config, pod.config)
	}
	giveUpWhile(t, asked, func(ctx context.Context) error { _, err := create(ctx); return err })
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := create(ctx)
		cancel()
		wantCode(t, err, codes.DeadlineExceeded)
	}
	equal(t, "number of containers listed", len(get(d.cri.ListContainers(t.Context(), nil))(t)), 0)
	close(end)
	id, err := create(t.Context())
	must(t, err)
	equal(t, "ID of a later retry", get(create(t.Context()))(t), id)
	equal(t, "number of containers listed", len(get(d.cri.ListContainers(t.Context(), nil))(t)), 1)
	plugin.waitEvents(t, "RunPodSandbox "+pod.config.Metadata.Name,
		"CreateContainer "+config.Metadata.Name, "PostCreateContainer "+config.Metadata.Name)
	other := proto.Clone(config).(*runtimeapi.ContainerConfig)
	other.Command = []string{"sleep", "1"}
	_, err = d.cri.CreateContainer(t.Context(), pod.id, other, pod.config)
	wantCode(t, err, codes.AlreadyExists, id)
}

// kubelet's retry is never the same request: it makes up the path of the termination log anew. It gets a
// container of that content, in place of the one that nobody was told of.
func TestCreateContainerRetriedWithAnotherContent(t *testing.T) {
	d := startDaemon(t, withConfig(`nri_request_timeout = "1m"`))
	_, asked, end := slowPlugin(t, d)
	pod := d.runPod(t, hostNetwork)
	d.ensureImage(t, baseImage)
	config := pod.containerConfig(func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	giveUpWhile(t, asked, func(ctx context.Context) error {
		_, err := d.cri.CreateContainer(ctx, pod.id, config, pod.config)
		return err
	})
	close(end)
	config.Envs = append(config.Envs, &runtimeapi.KeyValue{Key: "RETRY", Value: []byte("1")})
	id, err := d.cri.CreateContainer(t.Context(), pod.id, config, pod.config)
	must(t, err)
	listed := get(d.cri.ListContainers(t.Context(), nil))(t)
	equal(t, "number of containers listed", len(listed), 1)
	equal(t, "ID", listed[0].Id, id)
	c := &container{pod: pod, id: id, config: config}
	c.start(t)
	equal(t, "content", c.exec(t, "sh", "-c", "echo $RETRY"), "1")
}

// The image of pause comes from a slow registry: retries join the pod that waits for it, and it travels once.
func TestRunPodSandboxJoinsSlowPull(t *testing.T) {
	if systemdDriver() {
		t.Skip("with the systemd driver the fixture runs a pod first, and that needs the image of pause")
	}
	r := newRegistry(t)
	img := buildImage(t, v1.Config{Entrypoint: []string{"sleep", "99999"}})
	name, _ := push(t, r, "pause:slow", img)
	asked, end := make(chan struct{}, 8), make(chan struct{})
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/blobs/") {
			asked <- struct{}{}
			<-end
		}
		return false
	})
	d := startDaemon(t, withConfig(fmt.Sprintf("pause_image = %q", name)))
	config := d.podConfig(t, hostNetwork)
	giveUpWhile(t, asked, func(ctx context.Context) error { _, err := d.cri.RunPodSandbox(ctx, config, ""); return err })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := d.cri.RunPodSandbox(ctx, config, "")
	wantCode(t, err, codes.DeadlineExceeded)
	close(end)
	pod := d.runPodConfig(t, config)
	equal(t, "state", pod.status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	equal(t, "number of pods listed", len(get(d.cri.ListPodSandbox(t.Context(), nil))(t)), 1)
	layers, err := img.Layers()
	must(t, err)
	for _, l := range layers {
		equal(t, "downloads of a layer", r.Count(http.MethodGet, digestOf(t, l)), 1)
	}
}

// slowPlugin connects an NRI plugin that answers CreateContainer only after end was closed.
func slowPlugin(t *testing.T, d *daemon) (p *nriPlugin, asked <-chan struct{}, end chan<- struct{}) {
	t.Helper()
	calls, release := make(chan struct{}, 8), make(chan struct{})
	p = d.connectPlugin(t, "10", "slow", &nriPlugin{before: func(event string) error {
		if event == "CreateContainer" {
			calls <- struct{}{}
			<-release
		}
		return nil
	}})
	return p, calls, release
}

// giveUpWhile cancels a call as soon as it has come to where it is held up.
func giveUpWhile(t *testing.T, heldUp <-chan struct{}, call func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- call(ctx) }()
	<-heldUp
	cancel()
	wantCode(t, <-result, codes.Canceled)
}
