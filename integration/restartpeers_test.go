package integration

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/sessions"
	"berth/internal/testutil"
)

// What a restart costs the clients of a runtime. With BERTH_CONTAINERD the same clients measure
// containerd, which need not pass.
func TestCostOfRestarts(t *testing.T) {
	t.Run("berth", func(t *testing.T) {
		d := harness.StartDaemon(t, harness.WithHeldSocket)
		cost := measureRestarts(t, d, func() { upgrade(t, d) }, true)
		harness.Equal(t, "costs", cost, restartCost{})
	})
	t.Run("containerd", func(t *testing.T) {
		testutil.Long(t)
		bin := os.Getenv(containerdEnv)
		if bin == "" {
			t.Skipf("%s is not set: export %[1]s=$(integration/containerd/build)", containerdEnv)
		}
		d, restart := startContainerd(t, bin)
		defer d.Clean(t) // before the cleanup that stops the last containerd
		// StartContainer fails during a restart, so there is nothing to count events of.
		measureRestarts(t, d, restart, false)
	})
}

// restartCost counts what clients notice.
type restartCost struct {
	Sessions int // that were cut
	Calls    int // long calls in flight that failed
	Missed   int // events that no client got
	Doubled  int // events that came twice
}

// measureRestarts restarts a runtime under load. With events, containers start and exit meanwhile.
func measureRestarts(t *testing.T, d *harness.Daemon, restart func(), events bool) (cost restartCost) {
	pods, restarts, exits := 10, 3, 60
	if testutil.AllTests() {
		pods, restarts, exits = 100, 20, 1000
	}
	if !events {
		exits = 0
	}
	client := harness.RawRuntime(t, d)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := &watcher{subscribed: make(chan struct{}), got: map[string][]*runtimeapi.ContainerEventResponse{}}
	watched := harness.Go(func() error { return w.watch(ctx, client) })
	var all []*harness.Pod
	for range pods {
		all = append(all, d.RunPod(t, harness.HostNetwork))
	}
	pod := all[0]
	target := pod.Run(t)
	<-w.subscribed // containerd sends the header with the first event
	p := &prober{client: client, container: target.Id}
	var probing sync.WaitGroup
	probing.Go(func() { p.run(ctx) })

	running := repeatAll(t, target, sessions.ForwardPort(t, pod, echoServer(t)))
	finishCalls := startCalls(t, d, pod)
	gaps := []time.Duration{p.during(t, restart)}
	for what, session := range running {
		if err := session.end(); err != nil {
			cost.Sessions++
			t.Logf("%s: %v", what, err)
		}
	}
	cost.Calls = finishCalls()

	load := runExits(t, client, pod, exits)
	for n := range restarts {
		load.await(t, (n+1)*exits/(restarts+1))
		gaps = append(gaps, p.during(t, restart))
	}
	ids := load.wait(t)
	if events {
		last := runExits(t, client, pod, 1).wait(t) // its events come after all others
		harness.Eventually(t, "the last events arrive", func() error { return missing(w, last) })
	}
	cancel()
	probing.Wait()
	if err := <-watched; events {
		harness.Must(t, err)
		cost.Doubled = w.doubled(t)
	}
	for _, id := range ids {
		for kind := range runtimeapi.ContainerEventType_name {
			if !w.has(runtimeapi.ContainerEventType(kind), id) {
				cost.Missed++
			}
		}
	}
	t.Logf("%d pods, %d restarts: %d of %d sessions cut, %d of 2 long calls failed, %d of %d events missed, %d doubled; "+
		"%s; longest time without an answer: %s", pods, restarts+1,
		cost.Sessions, len(running), cost.Calls, cost.Missed, 4*len(ids), cost.Doubled, p.results(), spread(gaps))
	return cost
}

// startCalls begins a StopContainer and a PullImage. finish lets them end, and returns how many of
// them have failed.
func startCalls(t *testing.T, d *harness.Daemon, pod *harness.Pod) (finish func() (failed int)) {
	c := pod.Run(t, harness.Script("trap 'echo asked' TERM; echo ready; while [ ! -e /tmp/end ]; do sleep 0.1; done"))
	c.WaitOutput(t, "ready")
	r := harness.NewRegistry(t)
	asked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.Hook(func(_ http.ResponseWriter, req *http.Request) bool {
		if strings.Contains(req.URL.Path, "/blobs/") {
			once.Do(func() { close(asked) })
			<-release
		}
		return false
	})
	name, _ := harness.Push(t, r, "slow:latest", harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("f", 0o644, "slow")}))
	conn := harness.RawConn(t, d)
	calls := map[string]<-chan error{
		"StopContainer": harness.Go(func() error {
			_, err := runtimeapi.NewRuntimeServiceClient(conn).StopContainer(context.Background(), &runtimeapi.StopContainerRequest{ContainerId: c.Id, Timeout: 3600})
			return err
		}),
		"PullImage": harness.Go(func() error {
			_, err := runtimeapi.NewImageServiceClient(conn).PullImage(context.Background(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: name}})
			return err
		}),
	}
	c.WaitOutput(t, "asked")
	<-asked
	return func() (failed int) {
		close(release)
		c.Release(t, "/tmp/end")
		for what, ended := range calls {
			if err := <-ended; err != nil {
				failed++
				t.Log(fmt.Errorf("%s: %w", what, err))
			}
		}
		return failed
	}
}
