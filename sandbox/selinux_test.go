package sandbox

import (
	"errors"
	"maps"
	"slices"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"

	"berth/internal/rootfs"
	"berth/oci"
	"berth/sandbox/lsm"
	"berth/sandbox/record"
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

func (f *fakeSELinux) selinux() lsm.SELinux {
	return lsm.SELinux{
		ReserveLabel: func(l string) error {
			if f.inUse[l] {
				return selinux.ErrMCSAlreadyExists
			}
			f.inUse[l] = true
			return f.fail
		},
		ReleaseLabel: func(l string) { delete(f.inUse, l) },
		Relabel:      func(path, l string) error { f.files[path] = l; return f.fail },
	}
}

func (f *fakeSELinux) labels() []string { return slices.Sorted(maps.Keys(f.inUse)) }

// labelledManager has a pod, a container with the pod's labels and one with its own.
func labelledManager(host *fakeSELinux) (m *Manager, p *pod, shares, own *container) {
	m = &Manager{selinux: host.selinux(), pods: newIndex[*pod]("pod"), containers: newIndex[*container]("container")}
	p = &pod{id: "p", rec: record.Pod{SELinux: oci.Labels{Process: "pod-process", Mount: "pod-files"}}}
	shares = &container{id: "shares", podID: "p", rec: record.Container{SELinux: p.rec.SELinux}}
	own = &container{id: "own", podID: "p", rec: record.Container{SELinux: oci.Labels{Process: "own-process", Mount: "own-files"}}}
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

func TestPodFilesGetThePodsLabel(t *testing.T) {
	host := newFakeSELinux()
	m, p, _, _ := labelledManager(host)
	m.dirs.Root = "/root"
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
