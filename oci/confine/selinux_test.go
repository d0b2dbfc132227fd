package confine

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/testutil"
)

func TestSELinuxOptions(t *testing.T) {
	got, err := labelOptions(&runtimeapi.SELinuxOption{User: "system_u", Role: "system_r", Type: "spc_t", Level: "s0:c1,c2"})
	if want := []string{"user:system_u", "role:system_r", "type:spc_t", "level:s0:c1,c2"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q, %v", got, err)
	}
	for _, o := range []*runtimeapi.SELinuxOption{{User: "a:b"}, {Role: "a b"}, {Type: "a\n"}, {Level: "c1"}, {Level: "s0:x"}} {
		_, err := NewLabels(o, Labels{}, host.Facts{}) // also on a host without SELinux
		testutil.WantError(t, err, codes.InvalidArgument, "selinux_options")
	}
}

var podLabels = Labels{Process: "system_u:system_r:container_t:s0:c1,c2", Mount: "system_u:object_r:container_file_t:s0:c1,c2"}

func TestNewLabels(t *testing.T) {
	without, with := host.Facts{}, host.Facts{}
	with.SELinux = true
	own := &runtimeapi.SELinuxOption{Type: "spc_t", Level: "s0:c3,c4"}
	// Like containerd and CRI-O, a host without SELinux ignores the options.
	for _, o := range []*runtimeapi.SELinuxOption{nil, own} {
		if got, err := NewLabels(o, podLabels, without); err != nil || got != (Labels{}) {
			t.Errorf("host without SELinux: %v, %v", got, err)
		}
	}
	if got, err := NewLabels(nil, podLabels, with); err != nil || got != podLabels {
		t.Errorf("labels of a container without options: %v, %v", got, err)
	}
	// With SELinux the library decides, since it has the policy.
	got, err := NewLabels(own, podLabels, with)
	testutil.Must(t, err)
	if selinux.GetEnabled() != strings.HasSuffix(got.Process, ":spc_t:s0:c3,c4") {
		t.Errorf("labels of a container with options: %v", got)
	}
	selinux.ReleaseLabel(got.Process)
	got, err = NewLabels(&runtimeapi.SELinuxOption{Type: "spc_t"}, podLabels, with)
	testutil.Must(t, err)
	if selinux.GetEnabled() != (got.Process == "system_u:system_r:spc_t:s0:c1,c2") {
		t.Errorf("labels of a container with a type of its own: %v", got)
	}
	_, err = NewLabels(own, Labels{Process: "damaged"}, with)
	if err == nil || !strings.Contains(err.Error(), "label \"damaged\" of the pod") {
		t.Errorf("damaged label of the pod: %v", err)
	}
}

// A part that the container's options do not name comes from the pod.
func TestOptionsWithPod(t *testing.T) {
	inherited := []string{"user:system_u", "role:system_r", "type:container_t", "level:s0:c1,c2"}
	for _, c := range []struct {
		name    string
		pod     Labels
		options []string
		want    []string // the last value of a part wins
	}{
		{"pod", Labels{}, []string{"type:spc_t"}, []string{"type:spc_t"}},
		{"type only", podLabels, []string{"type:spc_t"}, append(slices.Clip(inherited), "type:spc_t")},
		{"level only", podLabels, []string{"level:s0:c3"}, append(slices.Clip(inherited), "level:s0:c3")},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got, err := withPod(c.pod, c.options); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}
