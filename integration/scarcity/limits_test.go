package scarcity

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/erofs"
	"berth/image/registry"
	"berth/image/registry/registrytest"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// A daemon with a memory limit of 64 MiB, which includes its children, pulls an image of many
// layers and runs 50 pods. Its own memory stays below half of the limit. When launchers and plugins
// need more, the kernel kills one of them or the daemon, and the next daemon continues. Every error
// names the cause. In the end the image and all pods exist.
func TestMemoryLimit(t *testing.T) {
	testutil.Long(t)
	const small = 64 << 20 // enough for one layer at a time
	t.Run("directories", func(t *testing.T) { underMemoryLimit(t, small, nil) })
	t.Run("EROFS images, a layer in parts, and one of many files", func(t *testing.T) {
		const files = 100_000 // too many for EROFS with that memory, so the layers become files of the host
		needEROFS(t, 2*files)
		slow, parts := slowLayer(t)
		underMemoryLimit(t, small, []string{slow, manyFiles(t, files)}, harness.WithLayerDriver("auto"))
		if parts.Load() == 0 {
			t.Error("no part of the slow layer was requested by a range")
		}
	})
	t.Run("EROFS images, four layers of many files at a time", func(t *testing.T) {
		const files = 25_000
		needEROFS(t, 8*files)
		underMemoryLimit(t, 256<<20, []string{manyFiles(t, files, files, files, files)}, harness.WithLayerDriver("auto"))
	})
}

// needEROFS skips the test if layers cannot be EROFS images and the disk has too few inodes for
// their files.
func needEROFS(t *testing.T, files uint64) {
	t.Helper()
	const disk = "/var/tmp"
	if err := erofs.Probe(disk); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	var fs unix.Statfs_t
	if harness.Must(t, unix.Statfs(disk, &fs)); fs.Files > 0 && fs.Ffree < files {
		t.Skipf("NOT TESTED: the disk has %d inodes for %d files", fs.Ffree, files)
	}
}

// slowLayer pushes an image with one large layer. The registry sends the layer slowly until the
// client requests parts. parts counts these requests.
func slowLayer(t *testing.T) (name string, parts *atomic.Int64) {
	t.Helper()
	data := make([]byte, 24<<20)
	_, err := rand.NewChaCha8(sha256.Sum256([]byte("slow"))).Read(data)
	harness.Must(t, err)
	var blob bytes.Buffer
	w := tar.NewWriter(&blob)
	harness.Must(t, w.WriteHeader(&tar.Header{Name: "large", Mode: 0o644, Size: int64(len(data))}))
	_, err = w.Write(data)
	harness.Must(t, errors.Join(err, w.Close()))
	r := registrytest.New(t)
	r.PutImage("slow", "v1", "", registrytest.Layer{Blob: blob.Bytes()})
	parts = new(atomic.Int64)
	r.Before = func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.HasSuffix(req.URL.Path, digest.FromBytes(blob.Bytes()).String()) {
			return false
		}
		var first, last int64
		if _, err := fmt.Sscanf(req.Header.Get("Range"), "bytes=%d-%d", &first, &last); err == nil && last-first < registry.PartSize {
			parts.Add(1)
		}
		slow := &pacedWriter{ResponseWriter: w, until: func() bool { return parts.Load() > 0 }}
		http.ServeContent(slow, req, "", time.Time{}, bytes.NewReader(blob.Bytes()))
		return true
	}
	return r.Host() + "/slow:v1", parts
}

// manyFiles pushes an image. Each layer has the given number of empty files.
func manyFiles(t *testing.T, files ...int) (name string) {
	t.Helper()
	var layers []registrytest.Layer
	for i, n := range files {
		layers = append(layers, emptyFiles(t, fmt.Sprint(i), n))
	}
	r := registrytest.New(t)
	r.PutImage("many", "v1", "", layers...)
	return r.Host() + "/many:v1"
}

func emptyFiles(t *testing.T, dir string, n int) registrytest.Layer {
	t.Helper()
	var blob bytes.Buffer
	z := gzip.NewWriter(&blob)
	sum := digest.SHA256.Digester()
	w := tar.NewWriter(io.MultiWriter(z, sum.Hash()))
	for i := range n {
		harness.Must(t, w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%s/%d/%d", dir, i/1000, i), Mode: 0o644}))
	}
	harness.Must(t, errors.Join(w.Close(), z.Close()))
	return registrytest.Layer{Blob: blob.Bytes(), MediaType: ocispec.MediaTypeImageLayerGzip, DiffID: sum.Digest()}
}

// pacedWriter writes 4 MB a second until a condition is true.
type pacedWriter struct {
	http.ResponseWriter
	until func() bool
}

func (w *pacedWriter) Write(data []byte) (sent int, err error) {
	const chunk = 4 << 10
	for len(data) > chunk && err == nil && !w.until() {
		var n int
		n, err = w.ResponseWriter.Write(data[:chunk])
		w.ResponseWriter.(http.Flusher).Flush()
		time.Sleep(time.Millisecond)
		sent, data = sent+n, data[n:]
	}
	if err != nil {
		return sent, err
	}
	n, err := w.ResponseWriter.Write(data)
	return sent + n, err
}

// underMemoryLimit runs TestMemoryLimit. The daemon also pulls the given images.
func underMemoryLimit(t *testing.T, limit int64, images []string, options ...harness.DaemonOption) {
	group, option := inGroup(t, "memory")
	group.limitMemory(t, limit)
	d := harness.StartDaemon(t, append(options, option)...)
	var trees []fixture.Tree
	for i := range 12 { // 1 MiB each, which uses memory if root is on a tmpfs
		var body strings.Builder
		for n := 0; body.Len() < 1<<20; n++ {
			fmt.Fprintf(&body, "%d of layer %d is %x\n", n, i, n*n*2654435761)
		}
		trees = append(trees, fixture.Tree{fixture.File(fmt.Sprintf("file%d", i), 0o644, body.String())})
	}
	name, _ := harness.Push(t, harness.Registry, "layers:latest", harness.BuildImage(t, v1.Config{}, trees...))
	var left []func() error // kubelet's calls, repeated until they succeed
	for _, name := range append(images, name) {
		left = append(left, func() error { _, err := d.TryPull(t, name, nil); return err })
	}
	wanted := len(left) + 50
	for range 50 {
		config := d.PodConfig(t)
		left = append(left, func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
	}
	deaths, failed, taken := 0, 0, uint64(0)
	for round := 0; len(left) > 0; round++ {
		if round == 20 {
			t.Fatalf("%d of %d calls failed: %v", len(left), wanted, left[0]())
		}
		var errs []error
		left, errs = callAll(left, 3)
		for _, err := range errs {
			failed++
			if !lacksMemory(err) {
				t.Errorf("the error does not name the missing resource: %v", err)
			}
		}
		if replaceDead(t, d, errs...) {
			deaths++
		}
		heap := d.Heap(t)
		harness.Equal(t, "limit of the daemon's own memory", heap.Limit, uint64(limit/2))
		taken = max(taken, heap.Taken)
	}
	if taken > uint64(limit/2) {
		t.Errorf("the daemon's own memory is %d KiB of %d", taken>>10, limit/2>>10)
	}
	pods := harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)
	harness.Equal(t, "number of pods", len(pods), 50)
	for _, p := range pods {
		d.Objects = append(d.Objects, p.Id)
	}
	t.Logf("%d calls failed, the daemon was killed %d times; its own memory was %d KiB, all in its cgroup %d KiB of %d",
		failed, deaths, taken>>10, group.peakMemory(t)>>10, limit>>10)
	group.limitMemory(t, 0) // the removal of all pods is not part of the test
}

// lacksMemory reports whether an error names missing memory, or a kill of the daemon or its
// children.
func lacksMemory(err error) bool {
	if cutOff(err) || harness.CodeOf(err) == codes.ResourceExhausted {
		return true
	}
	text := err.Error()
	return strings.Contains(text, "signal: killed") || strings.Contains(text, "the launcher is lost")
}

// callAll makes calls with limited parallelism. It returns the failed calls and their errors.
func callAll(calls []func() error, parallel int) (failed []func() error, errs []error) {
	var group errgroup.Group
	group.SetLimit(parallel)
	var mu sync.Mutex // protects failed and errs
	for _, call := range calls {
		group.Go(func() error {
			if err := call(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed, errs = append(failed, call), append(errs, err)
			}
			return nil
		})
	}
	_ = group.Wait() // the failures are in errs
	return failed, errs
}

// Containers and execs get the open-files limit with which the daemon was started, not the daemon's
// own raised limit.
func TestContainersGetDaemonsInitialFileLimit(t *testing.T) {
	d := harness.StartDaemon(t, harness.StartedBy("prlimit", "--nofile=1000:4000"))
	if own := machine.Limits(t, d.Cmd.Process.Pid, "Max open files"); own == "1000 4000" {
		t.Error("the daemon has not raised its own limit")
	}
	c := d.RunPod(t).Run(t)
	for _, got := range []string{machine.Limits(t, c.Pid(t), "Max open files"), c.Exec(t, "sh", "-c", "echo $(ulimit -Sn) $(ulimit -Hn)")} {
		harness.Equal(t, "limits of a container", got, "1000 4000")
	}
}

// Each operation runs with no free descriptor, with one, and so on until it succeeds. It succeeds
// or its error names the missing descriptors, and it leaves nothing. When repeated with enough
// descriptors, it succeeds.
func TestOutOfDescriptors(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	for _, o := range operations {
		t.Run(o.name, func(t *testing.T) {
			for left := 0; ; left = more(left) {
				call := o.prepare(t, d, pod)
				d.WaitIdle(t) // a starting launcher would use descriptors
				undo := leaveFiles(t, d, left)
				err := call()
				undo()
				if err == nil {
					t.Logf("works with %d descriptors", left)
					return
				}
				harness.WantCode(t, err, codes.ResourceExhausted, "too many open files")
				if t.Failed() {
					return
				}
				if !o.once {
					harness.Must(t, call())
				}
				d.StateSettles(t)
			}
		})
	}
}

// Each operation runs without any descriptor, even one that the daemon frees meanwhile. Stop and
// remove calls return the cause at once, and not only at their client's deadline.
func TestNoFreeDescriptors(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	for _, o := range operations {
		if !strings.HasPrefix(o.name, "Stop") && !strings.HasPrefix(o.name, "Remove") {
			continue // tested above with 0
		}
		t.Run(o.name, func(t *testing.T) {
			call := o.prepare(t, d, pod)
			d.WaitIdle(t)
			undo := limitFiles(t, d, 1) // poll(2) of a descriptor needs a limit of at least 1
			err := call()
			undo()
			harness.WantCode(t, err, codes.ResourceExhausted, "too many open files")
			harness.Must(t, call())
			d.StateSettles(t)
		})
	}
}

// more returns the next limit to try.
func more(n int) int {
	if harness.Thorough() {
		return n + 1
	}
	return 2*n + 1
}

// Each operation runs with a limit of processes and threads. A Go program that cannot start a
// thread dies, and so may the daemon. The next daemon continues all operations.
func TestOutOfProcesses(t *testing.T) {
	group, option := inGroup(t, "pids")
	// A bridge plugin that dies during a DEL leaves rules for ipMasq that no DEL finds again.
	d := harness.StartDaemon(t, option, func(t *testing.T, d *harness.Daemon) {
		harness.WithNetwork(fmt.Sprintf(otherNetwork, d.DataDir))(t, d)
	})
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	bystander := runSettled(t, pod)
	died := 0
	for _, o := range operations {
		if o.name == "StopContainer" {
			continue // the monitor dies without a thread, and the exit code is lost
		}
		t.Run(o.name, func(t *testing.T) {
			for left := 0; ; left = more(left) {
				call := o.prepare(t, d, pod)
				group.set(t, "pids.max", group.number(t, "pids.current")+int64(left))
				err := call()
				group.set(t, "pids.max", "max")
				if replaceDead(t, d, err) {
					died++
				} else if err != nil && (!lacksProcesses(err) || harness.CodeOf(err) == codes.Unknown) {
					t.Errorf("the error does not name the missing resource, or has no code: %v", err)
				}
				harness.Equal(t, "the bystander's state", bystander.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
				if err == nil {
					t.Logf("works with %d processes", left)
					return
				}
				if t.Failed() {
					return
				}
				if !o.once { // a launcher without a thread may still be dying
					harness.Eventually(t, "the operation works again", call)
				}
				d.StateSettles(t)
			}
		})
	}
	t.Logf("the daemon died %d times", died)
}

// lacksProcesses reports whether an error names a process or thread that could not be created. The
// code may be a plugin's. A launcher without a thread dies, and only the daemon's log contains the
// reason.
func lacksProcesses(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "resource temporarily unavailable") || strings.Contains(text, "the launcher is lost")
}

// replaceDead starts another daemon if this one was killed, and reports whether it was. A failed
// call may return a moment before the process has exited.
func replaceDead(t *testing.T, d *harness.Daemon, errs ...error) bool {
	t.Helper()
	if !d.Gone() && !slices.ContainsFunc(errs, cutOff) {
		return false
	}
	harness.EventuallyTrue(t, "the daemon is dead", d.Gone)
	d.End(t)
	d.Start(t)
	return true
}

// cutOff reports whether the daemon exited before it answered. It matches gRPC's own text, because
// berth uses the same code.
func cutOff(err error) bool {
	text := fmt.Sprint(err)
	return harness.CodeOf(err) == codes.Unavailable && (strings.Contains(text, "error reading") || strings.Contains(text, "connection error"))
}
