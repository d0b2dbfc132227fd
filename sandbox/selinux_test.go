package sandbox

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"

	"berth/internal/testutil"
	"berth/oci/confine"
	"berth/sandbox/lsm"
	"berth/sandbox/state"
)

// fakeSELinux is a host with SELinux. It keeps the labels in use and the labels of files.
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

// labelledManager returns a manager with a pod and two containers. One has the pod's labels, and
// the other has different labels.
func labelledManager(host *fakeSELinux) (m *Manager, p *pod, shares, own *container) {
	m = &Manager{selinux: host.selinux(), objects: newObjects()}
	p = &pod{PodSpec: &state.PodSpec{ID: "p", Labels: confine.Labels{Process: "pod-process", Mount: "pod-files"}}}
	shares = &container{ContainerSpec: &state.ContainerSpec{ID: "shares", PodID: "p", Labels: p.Labels}}
	own = &container{ContainerSpec: &state.ContainerSpec{ID: "own", PodID: "p", Labels: confine.Labels{Process: "own-process", Mount: "own-files"}}}
	m.objects.pods.Put(p.ID, p)
	m.objects.containers.Put(shares.ID, shares)
	m.objects.containers.Put(own.ID, own)
	return m, p, shares, own
}

// Recovered labels stay reserved until their last owner is removed.
func TestRecoveredLabelsAreReserved(t *testing.T) {
	host := newFakeSELinux()
	m, p, shares, own := labelledManager(host)
	testutil.Must(t, (&recovery{m}).reserveLabels())
	wantLabels := func(when string, want ...string) {
		t.Helper()
		if got := host.labels(); !slices.Equal(got, want) {
			t.Errorf("%s: reserved %q, want %q", when, got, want)
		}
	}
	wantLabels("after recovery", "own-process", "pod-process")
	m.labels.Release(m.selinux, shares.Labels, shares.ID)
	wantLabels("after removal of the container with the pod's labels", "own-process", "pod-process")
	m.labels.Release(m.selinux, own.Labels, own.ID)
	wantLabels("after removal of the other container", "pod-process")
	m.labels.Release(m.selinux, p.Labels, p.ID)
	wantLabels("after removal of the pod")
}

// Two pods with the same level share its categories. The removal of the second pod releases them.
func TestLabelsSharedByPods(t *testing.T) {
	host := newFakeSELinux()
	m, _, _, _ := labelledManager(host)
	const level = ":s0:c1,c2"
	for _, id := range []string{"a", "b"} {
		m.objects.pods.Put(id, &pod{PodSpec: &state.PodSpec{ID: id, Labels: confine.Labels{Process: "u:r:" + id + level, Mount: "files"}}})
	}
	testutil.Must(t, (&recovery{m}).reserveLabels())
	reserved := func() (n int) {
		for _, l := range host.labels() {
			if strings.HasSuffix(l, level) {
				n++
			}
		}
		return n
	}
	a, _ := m.objects.pods.Get("a")
	m.labels.Release(m.selinux, a.Labels, a.ID)
	m.labels.Release(m.selinux, a.Labels, a.ID)
	if reserved() != 2 {
		t.Errorf("reserved: %q", host.labels())
	}
	b, _ := m.objects.pods.Get("b")
	m.labels.Release(m.selinux, b.Labels, b.ID)
	if reserved() == 2 {
		t.Errorf("still reserved: %q", host.labels())
	}
}

func TestReserveLabelsReturnsError(t *testing.T) {
	host := newFakeSELinux()
	host.fail = errors.New("broken")
	m, _, _, _ := labelledManager(host)
	if err := (&recovery{m}).reserveLabels(); !errors.Is(err, host.fail) {
		t.Errorf("got %v", err)
	}
}
