package powercut

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/powercut/blocklog"
)

// node is a daemon whose root and addresses are on a logging disk.
type node struct {
	*harness.Daemon
	filesystem
	dir        string // mount point of its disk
	testImages map[string]*testImage
	layers     map[string]inventory.Tree // expected content of each layer, and of each mount that joins layers
	cut        *fixture.Cut              // lowered during pulls of the image cutName
}

// newNode prepares a daemon. All disks are mounted at the same place, one after the other, because
// records contain paths.
func newNode(t *testing.T, f filesystem) *node {
	t.Helper()
	n := &node{filesystem: f, testImages: testImages(t)}
	n.cutImage(t)
	n.Daemon = harness.NewDaemon(t, n.onDisk)
	return n
}

// onDisk puts root and addresses of a daemon below the mount point.
func (n *node) onDisk(t *testing.T, d *harness.Daemon) {
	t.Helper()
	n.dir = makeDir(t, d.Dir, "disk")
	d.Root = filepath.Join(n.dir, "root")
	harness.WithNetworkIn(filepath.Join(n.dir, "addresses"))(t, d)
}

func (n *node) store() string { return filepath.Join(n.Root, "images") }

// boot starts the daemon on a disk as after a boot, and returns a function that stops the daemon
// and unmounts the disk.
func (n *node) boot(t *testing.T, disk *blocklog.Disk) (end func()) {
	t.Helper()
	m := n.mount(t, disk, n.dir)
	t.Cleanup(func() { // after a failed test: the disk cannot be unmounted while the daemon runs
		if n.Cmd != nil && !n.Gone() {
			n.Signal(t, syscall.SIGKILL)
			n.LoseState(t)
		}
	})
	n.Boot(t)
	return func() {
		n.Stop(t)
		n.LoseState(t)
		m.unmount(t)
	}
}

// churn is the work during which the power fails: one goroutine pulls and removes images, others
// run pods.
type churn struct {
	*node
	disk    *blocklog.Disk
	history history
	mu      sync.Mutex // protects objects
	objects []string
}

// change makes a call that should result in the state next, and records when it began and ended.
func (c *churn) change(what string, next known, call func() error) error {
	begun := c.disk.Position()
	if err := call(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	c.history.changes = append(c.history.changes, change{what, begun, c.disk.Position(), next})
	return nil
}

func (c *churn) pull(ctx context.Context, p *testImage) error {
	return c.change("pull "+p.name, c.history.latest().pulled(p.name, p.id), func() error {
		id, err := c.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: p.name}, nil, nil)
		if err == nil && id != p.id {
			err = harness.Unexpected("the image's ID", id, p.id)
		}
		return err
	})
}

// failPull pulls the image whose transfer breaks off. The daemon keeps what has arrived. If the
// image is present, the pull succeeds.
func (c *churn) failPull(ctx context.Context) error {
	c.cut.Lower()
	defer c.cut.Lift()
	err := c.pull(ctx, c.testImages[cutName])
	if status.Code(err) == codes.PermissionDenied { // the registry's last answer
		return nil
	}
	return err
}

func (c *churn) remove(ctx context.Context, id string) error {
	return c.change("remove "+id, c.history.latest().removed(id), func() error {
		return c.Images.RemoveImage(ctx, &runtimeapi.ImageSpec{Image: id})
	})
}

// images pulls and removes images for a number of rounds. Pulls of one image break off. It also
// pulls a tag that moves between images. It never removes keep, the containers' image.
func (c *churn) images(ctx context.Context, random *rand.Rand, rounds int, keep string) error {
	names := slices.Sorted(maps.Keys(c.testImages))
	for range rounds {
		here := slices.DeleteFunc(slices.Sorted(maps.Keys(c.history.latest())), func(id string) bool { return id == keep })
		var err error
		switch name := names[random.IntN(len(names))]; {
		case len(here) > 0 && random.IntN(5) < 2:
			err = c.remove(ctx, here[random.IntN(len(here))])
		case name == cutName:
			err = c.failPull(ctx)
		default:
			err = c.pull(ctx, c.testImages[name])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// job describes a pod of the churn.
type job struct {
	pod       *harness.Pod
	container *runtimeapi.ContainerConfig
}

// jobs returns descriptions of count pods.
func (n *node) jobs(t *testing.T, count int) (all []job) {
	t.Helper()
	for range count {
		pod := &harness.Pod{D: n.Daemon, Config: n.PodConfig(t)}
		c := pod.ContainerConfig(harness.Script("echo of the container >/tmp/file; sleep 1000"))
		harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(pod.Config.LogDirectory, c.LogPath)), 0o755))
		all = append(all, job{pod, c})
	}
	return all
}

// pods runs the pods of jobs, two at a time, and removes them at the end.
func (c *churn) pods(ctx context.Context, jobs []job) error {
	var running []string
	for _, j := range jobs {
		id, err := c.run(ctx, j)
		if err != nil {
			return err
		}
		if running = append(running, id); len(running) > 2 {
			if err := c.end(ctx, running[0]); err != nil {
				return err
			}
			running = running[1:]
		}
	}
	for _, id := range running {
		if err := c.end(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

func (c *churn) run(ctx context.Context, j job) (string, error) {
	id, err := c.Cri.RunPodSandbox(ctx, j.pod.Config, "")
	if err != nil {
		return "", fmt.Errorf("run a pod: %w", err)
	}
	container, err := c.Cri.CreateContainer(ctx, id, j.container, j.pod.Config)
	if err != nil {
		return "", fmt.Errorf("create a container: %w", err)
	}
	c.mu.Lock()
	c.objects = append(c.objects, id, container)
	c.mu.Unlock()
	if err := c.Cri.StartContainer(ctx, container); err != nil {
		return "", fmt.Errorf("start a container: %w", err)
	}
	return id, nil
}

func (c *churn) end(ctx context.Context, pod string) error {
	if err := c.Cri.StopPodSandbox(ctx, pod); err != nil {
		return fmt.Errorf("stop a pod: %w", err)
	}
	if err := c.Cri.RemovePodSandbox(ctx, pod); err != nil {
		return fmt.Errorf("remove a pod: %w", err)
	}
	return nil
}

// recording is a disk with the history of its images since a position of its log.
type recording struct {
	disk    *blocklog.Disk
	begin   int
	history history
}

// record runs a new node on a disk. The recording starts when the filesystem is made.
func (n *node) record(t *testing.T, random *rand.Rand, rounds, pods int) recording {
	t.Helper()
	disk := n.newDisk(t)
	begin := disk.Position()
	end := n.boot(t, disk)
	n.WaitIdle(t)
	n.Empty = n.Snapshot(t)
	c := &churn{node: n, disk: disk}
	base := &testImage{name: harness.BaseImage}
	base.id = n.learn(t, c, base)

	group, ctx := errgroup.WithContext(t.Context())
	group.Go(func() error { return c.images(ctx, random, rounds, base.id) })
	for range 2 {
		jobs := n.jobs(t, pods/2)
		group.Go(func() error { return c.pods(ctx, jobs) })
	}
	harness.Must(t, group.Wait())
	n.Objects = append(n.Objects, c.objects...)
	for id := range c.history.latest() {
		harness.Must(t, c.remove(t.Context(), id))
	}
	n.NoLeaks(t)
	end()
	t.Logf("recorded %d disk operations, %d of them flushes, during %d changes of images and %d pods",
		disk.Position(), len(disk.Flushes()), len(c.history.changes), pods)
	return recording{disk, begin, c.history}
}

// learn pulls every image and records the content of its layers, read from the page cache. It
// returns the ID of base, which is never removed.
func (n *node) learn(t *testing.T, c *churn, base *testImage) string {
	t.Helper()
	img := harness.Get(n.TryPull(t, base.name, nil))(t)
	c.history.changes = append(c.history.changes, change{"pull " + base.name, 0, c.disk.Position(), known{img: {base.name}}})
	for _, p := range n.testImages {
		harness.Must(t, c.pull(t.Context(), p))
	}
	n.layers = readLayers(t, n.store())
	return img
}
