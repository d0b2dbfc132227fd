package hostile

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	imagestore "berth/image"
	"berth/image/registry/registrytest"
	"berth/integration/harness"
	"berth/integration/machine"
)

func TestMain(m *testing.M) {
	harness.OnDisk()
	harness.Main(m)
}

// Bounds for a daemon and its helpers with any image.
const (
	daemonPeak = 192 << 10 // KiB, mostly for MaxManifestSize and MaxValues of JSON
	workerPeak = 400 << 10 // KiB; the window of zstd is 128 MiB
	// ends bounds a case. On an idle machine each case takes a few seconds at most.
	ends = 3 * time.Minute
)

// startDaemon starts a daemon with short timeouts for slow registries.
func startDaemon(t *testing.T, config ...string) *harness.Daemon {
	t.Helper()
	return startDaemonWith(t, config)
}

func startDaemonWith(t *testing.T, config []string, options ...harness.DaemonOption) *harness.Daemon {
	t.Helper()
	options = append(options, harness.WithConfig(append([]string{`pull.stall_timeout = "3s"`}, config...)...))
	d := harness.StartDaemon(t, options...)
	t.Cleanup(func() { bounded(t, d); stillPulls(t, d) })
	return d
}

// stillPulls pulls an honest image.
func stillPulls(t *testing.T, d *harness.Daemon) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), ends)
	defer cancel()
	if _, err := d.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: harness.BaseImage}, nil, nil); err != nil {
		t.Errorf("pull of an honest image: %v", err)
	}
}

var peakInLog = regexp.MustCompile(`msg="unpacked a layer".* peakKiB=(\d+)`)

// bounded checks the memory peaks of the daemon and of berth-unpack.
func bounded(t *testing.T, d *harness.Daemon) {
	t.Helper()
	peak := harness.Get(strconv.Atoi(strings.Fields(machine.StatusField(t, d.Cmd.Process.Pid, "VmHWM"))[0]))(t)
	log, err := os.ReadFile(d.LogFile())
	harness.Must(t, err)
	worst := 0
	for _, match := range peakInLog.FindAllSubmatch(log, -1) {
		n := harness.Get(strconv.Atoi(string(match[1])))(t)
		worst = max(worst, n)
	}
	t.Logf("peaks: daemon %d KiB, berth-unpack %d KiB", peak, worst)
	if peak > daemonPeak {
		t.Errorf("the daemon's peak memory is %d KiB, want at most %d", peak, daemonPeak)
	}
	if worst > workerPeak {
		t.Errorf("berth-unpack's peak memory is %d KiB, want at most %d", worst, workerPeak)
	}
}

// pull pulls an image within the bound of a case.
func pull(t *testing.T, d *harness.Daemon, name string, auth *runtimeapi.AuthConfig) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ends)
	defer cancel()
	_, err := d.Images.PullImage(ctx, &runtimeapi.ImageSpec{Image: name}, auth, nil)
	if ctx.Err() != nil {
		t.Errorf("the pull did not return in time: %v", err)
	}
	return err
}

// attempt is a pull that must be refused.
type attempt struct {
	what, name string
	auth       *runtimeapi.AuthConfig
	code       codes.Code
	text       string
}

// allRefused makes attempts in parallel, because most of them wait, and checks for leftovers.
func allRefused(t *testing.T, d *harness.Daemon, attempts []attempt) {
	t.Helper()
	failures := make([]error, len(attempts))
	var pulls sync.WaitGroup
	for i, a := range attempts {
		pulls.Go(func() { failures[i] = pull(t, d, a.name, a.auth) })
	}
	pulls.Wait()
	for i, a := range attempts {
		t.Run(a.what, func(t *testing.T) {
			harness.WantCode(t, failures[i], a.code, a.text, a.name)
			noTraceOf(t, d, a.name)
		})
	}
}

// refused pulls an image, expects an error, and checks for leftovers.
func refused(t *testing.T, d *harness.Daemon, name string, code codes.Code, texts ...string) {
	t.Helper()
	harness.WantCode(t, pull(t, d, name, nil), code, append(texts, name)...)
	noTraceOf(t, d, name)
}

// noTraceOf looks for leftovers of the image and its layers. The harness checks everything else at
// the end, from descriptors to goroutines.
func noTraceOf(t *testing.T, d *harness.Daemon, name string) {
	t.Helper()
	if status := d.ImageStatus(t, name); status != nil {
		t.Errorf("the image exists: %v", status)
	}
	images := filepath.Join(d.Root, "images")
	dirs := []string{filepath.Join(images, "records")}
	for _, root := range imagestore.LayerRoots(images) {
		if _, err := os.Stat(root); err == nil {
			dirs = append(dirs, filepath.Join(root, "tmp"), filepath.Join(root, "layers"), filepath.Join(root, "joins"))
		}
	}
	for _, dir := range dirs {
		left, err := os.ReadDir(dir)
		if err != nil || len(left) > 0 {
			t.Errorf("in %s: %v, %v", dir, left, err)
		}
	}
}

// image pushes an image of these layers to a new registry. The caller may change the registry's
// answers.
func image(t *testing.T, layers ...registrytest.Layer) (*registrytest.Server, string) {
	t.Helper()
	r := registrytest.New(t)
	r.PutImage("hostile", "v1", t.Name(), layers...)
	return r, r.Host() + "/hostile:v1"
}
