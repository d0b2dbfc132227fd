package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/oci"
	"berth/shim"
)

// fakeSELinux is a host with SELinux: labels that are in use, and those of files.
type fakeSELinux struct {
	inUse map[string]bool
	files map[string]string
	fail  error
}

func newFakeSELinux() *fakeSELinux {
	return &fakeSELinux{inUse: map[string]bool{}, files: map[string]string{}}
}

func (f *fakeSELinux) labeller() labeller {
	return labeller{
		reserve: func(l string) error {
			if f.inUse[l] {
				return selinux.ErrMCSAlreadyExists
			}
			f.inUse[l] = true
			return f.fail
		},
		release: func(l string) { delete(f.inUse, l) },
		relabel: func(path, l string) error { f.files[path] = l; return f.fail },
	}
}

func (f *fakeSELinux) labels() []string { return slices.Sorted(maps.Keys(f.inUse)) }

// labelledManager has a pod, a container with the pod's labels and one with its own.
func labelledManager(host *fakeSELinux) (m *Manager, p *pod, shares, own *container) {
	m = &Manager{labels: host.labeller(), pods: newIndex[*pod]("pod"), containers: newIndex[*container]("container")}
	p = &pod{id: "p", rec: podRecord{SELinux: oci.Labels{Process: "pod-process", Mount: "pod-files"}}}
	shares = &container{id: "shares", podID: "p", rec: containerRecord{SELinux: p.rec.SELinux}}
	own = &container{id: "own", podID: "p", rec: containerRecord{SELinux: oci.Labels{Process: "own-process", Mount: "own-files"}}}
	m.pods.put(p.id, p)
	m.containers.put(shares.id, shares)
	m.containers.put(own.id, own)
	return m, p, shares, own
}

// What an earlier daemon gave away is not given away again, until its owner is removed.
func TestLabelsReservedAndReleased(t *testing.T) {
	host := newFakeSELinux()
	m, p, shares, own := labelledManager(host)
	if err := m.reserveLabels(); err != nil {
		t.Fatal(err)
	}
	wantLabels := func(when string, want ...string) {
		t.Helper()
		if got := host.labels(); !slices.Equal(got, want) {
			t.Errorf("%s: in use are %q, want %q", when, got, want)
		}
	}
	wantLabels("after the start", "own-process", "pod-process")
	m.releaseContainerLabels(shares)
	wantLabels("a container with its pod's labels is removed", "own-process", "pod-process")
	m.releaseContainerLabels(own)
	wantLabels("a container with its own is removed", "pod-process")
	m.releasePodLabels(p)
	wantLabels("the pod is removed")
}

func TestLabelsThatCannotBeReserved(t *testing.T) {
	host := newFakeSELinux()
	host.fail = errors.New("broken")
	m, _, _, _ := labelledManager(host)
	if err := m.reserveLabels(); !errors.Is(err, host.fail) {
		t.Errorf("got %v", err)
	}
}

// Only what the config asks for is labelled anew, and it with the container's label: where
// its links lead (CVE-2021-43816).
func TestRelabelMounts(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"asked", "other"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("asked", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	host := newFakeSELinux()
	m, _, _, c := labelledManager(host)
	c.config = &runtimeapi.ContainerConfig{Mounts: []*runtimeapi.Mount{
		{HostPath: dir + "/link", ContainerPath: "/a", SelinuxRelabel: true},
		{HostPath: dir + "/other", ContainerPath: "/b"},
		{Image: &runtimeapi.ImageSpec{Image: "x"}, ContainerPath: "/c", SelinuxRelabel: true},
	}}
	if err := m.relabelMounts(c); err != nil {
		t.Fatal(err)
	}
	if want := map[string]string{dir + "/asked": "own-files"}; !maps.Equal(host.files, want) {
		t.Errorf("labelled %v, want %v", host.files, want)
	}

	for err, want := range map[error]codes.Code{unix.ENOTSUP: codes.OK, unix.EROFS: codes.FailedPrecondition, unix.EPERM: codes.FailedPrecondition,
		errSystemPath: codes.InvalidArgument, unix.EIO: codes.Unknown} {
		host.fail = fmt.Errorf("lsetxattr: %w", err)
		if got := errdefs.Code(m.relabelMounts(c)); got != want {
			t.Errorf("%v: code %v, want %v", err, got, want)
		}
	}

	host.files, host.fail = map[string]string{}, nil
	c.rec.SELinux = oci.Labels{} // a host without SELinux
	if err := m.relabelMounts(c); err != nil || len(host.files) > 0 {
		t.Errorf("without SELinux: labelled %v, %v", host.files, err)
	}
}

func TestPodFilesGetThePodsLabel(t *testing.T) {
	host := newFakeSELinux()
	m, p, _, _ := labelledManager(host)
	m.cfg.Root = "/root"
	if err := m.labelPodFiles(p); err != nil {
		t.Fatal(err)
	}
	if want := map[string]string{"/root/sandboxes/p": "pod-files"}; !maps.Equal(host.files, want) {
		t.Errorf("labelled %v, want %v", host.files, want)
	}
}

// Everything that is mounted for a pod shows its label, not the files' own: image volumes and
// pause's directory too. Without SELinux pause needs no overlay.
func TestMountsGetTheirLabel(t *testing.T) {
	host := newFakeSELinux()
	m, p, _, _ := labelledManager(host)
	m.payload.Pause = "/pause"
	root := m.pauseRoot(p, nil)
	if root.Label != "pod-files" || len(root.Layers) < 2 || root.Layers[len(root.Layers)-1].Path != "/pause" {
		t.Errorf("pause's root is %+v: only overlays are labelled", root)
	}
	p.rec.SELinux = oci.Labels{}
	if root = m.pauseRoot(p, nil); root.Label != "" || len(root.Layers) != 1 {
		t.Errorf("without SELinux pause's root is %+v", root)
	}

	like := rootfs.Spec{Label: "own-files", IDMap: &rootfs.IDMap{UserNS: "ns"}}
	volumes := shownAs(like, []shim.Volume{{Path: "/v", Rootfs: rootfs.Spec{Upper: "u"}}})
	if v := volumes[0]; v.Rootfs.Label != like.Label || v.Rootfs.IDMap != like.IDMap || v.Rootfs.Upper != "u" || v.Path != "/v" {
		t.Errorf("an image volume is %+v", v)
	}
}

// The library's refusal is known by its text.
func TestSystemPathsKeepTheirLabels(t *testing.T) {
	for _, path := range []string{"/", "/usr", "/etc/", "/var/lib"} {
		if err := refused(selinux.Chcon(path, "system_u:object_r:container_file_t:s0:c1,c2", false)); !errors.Is(err, errSystemPath) {
			t.Errorf("label %s: %v", path, err)
		}
	}
	if err := refused(unix.EIO); errors.Is(err, errSystemPath) || refused(nil) != nil {
		t.Errorf("another error: %v", err)
	}
}
