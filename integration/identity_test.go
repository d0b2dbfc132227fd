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

	"berth/integration/harness"
	"berth/integration/machine"
)

// Requests with the same identity and config get the same object, both at the same time and later.
func TestRunPodSandboxIsIdempotent(t *testing.T) {
	d := harness.StartDaemon(t)
	config := d.PodConfig(t)
	const n = 5
	type result struct {
		id  string
		err error
	}
	results := make(chan result, n)
	for range n {
		go func() {
			id, err := d.Cri.RunPodSandbox(t.Context(), config, "")
			results <- result{id, err}
		}()
	}
	ids := map[string]bool{}
	for range n {
		r := <-results
		harness.Must(t, r.err)
		ids[r.id] = true
	}
	pod := d.RunPodConfig(t, config)
	ids[pod.Id] = true
	harness.Equal(t, "number of created pods", len(ids), 1)
	harness.Equal(t, "number of pods listed", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 1)

	d.Restart(t)
	harness.Equal(t, "ID after a restart", d.RunPodConfig(t, config).Id, pod.Id)

	other := proto.Clone(config).(*runtimeapi.PodSandboxConfig)
	other.Hostname = "another"
	_, err := d.Cri.RunPodSandbox(t.Context(), other, "")
	harness.WantCode(t, err, codes.AlreadyExists, pod.Id)

	next := proto.Clone(config).(*runtimeapi.PodSandboxConfig)
	next.Metadata.Attempt = 1
	if again := d.RunPodConfig(t, next); again.Id == pod.Id {
		t.Error("another attempt got the same pod")
	}
}

func TestCreateContainerIsIdempotent(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Create(t, harness.ContainerNamed("main"))
	id := harness.Get(d.Cri.CreateContainer(t.Context(), pod.Id, c.Config, pod.Config))(t)
	harness.Equal(t, "ID", id, c.Id)
	other := proto.Clone(c.Config).(*runtimeapi.ContainerConfig)
	other.Command = []string{"sleep", "1"}
	_, err := d.Cri.CreateContainer(t.Context(), pod.Id, other, pod.Config)
	harness.WantCode(t, err, codes.AlreadyExists, c.Id)
	next := proto.Clone(c.Config).(*runtimeapi.ContainerConfig)
	next.Metadata.Attempt = 1
	id, err = d.Cri.CreateContainer(t.Context(), pod.Id, next, pod.Config)
	harness.Must(t, err)
	if id == c.Id {
		t.Error("another attempt got the same container")
	}
	// After a removal the identity can be used again.
	harness.Must(t, d.Cri.RemoveContainer(t.Context(), c.Id))
	id, err = d.Cri.CreateContainer(t.Context(), pod.Id, c.Config, pod.Config)
	harness.Must(t, err)
	if id == c.Id {
		t.Error("a removed container came back under its ID")
	}
}

// At kubelet's deadline the call fails, and the retry gets the pod. The error "name is reserved"
// cannot occur.
func TestRetryAfterClientsDeadline(t *testing.T) {
	plugin := newFakePlugin(t, "slow", `while [ ! -e "`+"$(dirname \"$0\")"+`/go" ]; do sleep 0.02; done; `+fakeResult)
	d := harness.StartDaemon(t, withBinDir(plugin.dir), harness.WithNetwork(`{"cniVersion": "1.0.0", "name": "slow", "plugins": [{"type": "slow"}]}`))
	config := d.PodConfig(t)
	ctx, cancel := context.WithCancel(t.Context())
	first := harness.Go(func() error { _, err := d.Cri.RunPodSandbox(ctx, config, ""); return err })
	harness.EventuallyTrue(t, "the plugin is called", func() bool { return len(plugin.calls("ADD")) > 0 })
	cancel()
	harness.WantCode(t, <-first, codes.Canceled)
	plugin.release(t)
	pod := d.RunPodConfig(t, config)
	harness.Equal(t, "state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "number of ADD calls", len(plugin.calls("ADD")), 1)
}

// While an NRI plugin is slow, kubelet's deadline passes several times. Each retry waits for the
// creation that already runs.
func TestCreateContainerRetriesShareOneCreation(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "1m"`))
	plugin, asked, end := slowPlugin(t, d)
	pod := d.RunPod(t, harness.HostNetwork)
	d.EnsureImage(t, harness.BaseImage)
	config := pod.ContainerConfig()
	create := func(ctx context.Context) (string, error) {
		return d.Cri.CreateContainer(ctx, pod.Id, config, pod.Config)
	}
	cancelWhile(t, d, asked, func(ctx context.Context) error { _, err := create(ctx); return err })
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := create(ctx)
		cancel()
		harness.WantCode(t, err, codes.DeadlineExceeded)
	}
	harness.Equal(t, "number of containers listed", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 0)
	close(end)
	id := harness.Get(create(t.Context()))(t)
	harness.Equal(t, "ID of a later retry", harness.Get(create(t.Context()))(t), id)
	harness.Equal(t, "number of containers listed", len(harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)), 1)
	plugin.waitEvents(t, "RunPodSandbox "+pod.Config.Metadata.Name,
		"CreateContainer "+config.Metadata.Name, "PostCreateContainer "+config.Metadata.Name)
	other := proto.Clone(config).(*runtimeapi.ContainerConfig)
	other.Command = []string{"sleep", "1"}
	_, err := d.Cri.CreateContainer(t.Context(), pod.Id, other, pod.Config)
	harness.WantCode(t, err, codes.AlreadyExists, id)
}

// kubelet's retries always differ, because each has a new path of the termination log. The retry
// gets a container with its own content, which replaces the unreported one.
func TestCreateContainerRetriedWithAnotherContent(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithConfig(`nri.request_timeout = "1m"`))
	_, asked, end := slowPlugin(t, d)
	pod := d.RunPod(t, harness.HostNetwork)
	d.EnsureImage(t, harness.BaseImage)
	config := pod.ContainerConfig(func(c *runtimeapi.ContainerConfig) { c.LogPath = "" })
	cancelWhile(t, d, asked, func(ctx context.Context) error {
		_, err := d.Cri.CreateContainer(ctx, pod.Id, config, pod.Config)
		return err
	})
	close(end)
	config.Envs = append(config.Envs, &runtimeapi.KeyValue{Key: "RETRY", Value: []byte("1")})
	id := harness.Get(d.Cri.CreateContainer(t.Context(), pod.Id, config, pod.Config))(t)
	listed := harness.Get(d.Cri.ListContainers(t.Context(), nil))(t)
	harness.Equal(t, "number of containers listed", len(listed), 1)
	harness.Equal(t, "ID", listed[0].Id, id)
	c := &harness.Container{Pod: pod, Id: id, Config: config}
	c.Start(t)
	harness.Equal(t, "content", c.Exec(t, "sh", "-c", "echo $RETRY"), "1")
}

// The image of pause comes from a slow registry. Retries wait for the same pod, and the image is
// downloaded once.
func TestRunPodSandboxRetriesShareSlowPull(t *testing.T) {
	if harness.SystemdDriver() {
		t.Skip("with the systemd driver the harness runs a pod first, which pulls the image of pause")
	}
	r := harness.NewRegistry(t)
	img := harness.BuildImage(t, v1.Config{Entrypoint: []string{"sleep", "99999"}})
	name, _ := harness.Push(t, r, "pause:slow", img)
	asked, end := make(chan struct{}, 8), make(chan struct{})
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/blobs/") {
			asked <- struct{}{}
			<-end
		}
		return false
	})
	d := harness.StartDaemon(t, harness.WithConfig(fmt.Sprintf("image.pause = %q", name)))
	config := d.PodConfig(t, harness.HostNetwork)
	cancelWhile(t, d, asked, func(ctx context.Context) error { _, err := d.Cri.RunPodSandbox(ctx, config, ""); return err })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := d.Cri.RunPodSandbox(ctx, config, "")
	harness.WantCode(t, err, codes.DeadlineExceeded)
	close(end)
	pod := d.RunPodConfig(t, config)
	harness.Equal(t, "state", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
	harness.Equal(t, "number of pods listed", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 1)
	layers := harness.Get(img.Layers())(t)
	for _, l := range layers {
		harness.Equal(t, "downloads of a layer", r.Count(http.MethodGet, harness.DigestOf(t, l)), 1)
	}
}

// slowPlugin connects an NRI plugin that answers CreateContainer only after end is closed.
func slowPlugin(t *testing.T, d *harness.Daemon) (p *nriPlugin, asked <-chan struct{}, end chan<- struct{}) {
	t.Helper()
	calls, release := make(chan struct{}, 8), make(chan struct{})
	p = connectPlugin(t, d, "10", "slow", &nriPlugin{before: func(event string) error {
		if event == "CreateContainer" {
			calls <- struct{}{}
			<-release
		}
		return nil
	}})
	return p, calls, release
}

// cancelWhile cancels a call once it blocks, and returns when the daemon has noticed the
// cancellation. It also returns if the call returns earlier.
func cancelWhile(t *testing.T, d *harness.Daemon, heldUp <-chan struct{}, call func(context.Context) error) {
	t.Helper()
	givenUp := func() (n int) {
		for _, line := range machine.ReadLines(d.LogFile()) {
			if strings.Contains(line, "code=Canceled") {
				n++
			}
		}
		return n
	}
	before := givenUp()
	ctx, cancel := context.WithCancel(t.Context())
	result := harness.Go(func() error { return call(ctx) })
	<-heldUp
	cancel()
	harness.WantCode(t, <-result, codes.Canceled)
	harness.EventuallyGot(t, "the daemon logs the canceled call", func() (bool, any) { n := givenUp(); return n > before, n })
}
