package oci

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

func imageMount(change func(*runtimeapi.Mount)) *runtimeapi.Mount {
	m := &runtimeapi.Mount{ContainerPath: "/model", Readonly: true, Image: &runtimeapi.ImageSpec{Image: "sha256:1"}}
	if change != nil {
		change(m)
	}
	return m
}

func TestImageVolume(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		change func(*runtimeapi.Mount)
		want   []string
	}{
		{"plain", nil, []string{"rbind", "rprivate", "ro"}},
		{"recursively read-only", func(m *runtimeapi.Mount) { m.RecursiveReadOnly = true }, []string{"rbind", "rprivate", "rro"}},
		{"options", func(m *runtimeapi.Mount) { m.MountOptions = []string{"noexec", "nodev"} }, []string{"rbind", "rprivate", "ro", "noexec", "nodev"}},
		{"from host", func(m *runtimeapi.Mount) { m.Propagation = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER },
			[]string{"rbind", "rprivate", "ro"}},
		{"sub path", func(m *runtimeapi.Mount) { m.ImageSubPath = "a/b" }, []string{"rbind", "rprivate", "ro"}},
		{"relabelled", func(m *runtimeapi.Mount) { m.SelinuxRelabel = true }, []string{"rbind", "rprivate", "ro"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := testInput()
			in.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: "/srv/data"}, imageMount(test.change)}
			in.ImageVolumes = map[int]string{1: "/run/berth/c/ctr1/volume-1"}
			m := findMount(mustSpec(t, in), "/model")
			if m.Source != "/run/berth/c/ctr1/volume-1" || m.Type != "bind" || !slices.Equal(m.Options, test.want) {
				t.Errorf("got %+v", m)
			}
			if sources, err := RelabelSources(in.Config, in.Files); err != nil || len(sources) > 0 {
				t.Errorf("sources to relabel: %q, %v", sources, err)
			}
		})
	}
}

func TestImageVolumeRefused(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		change func(*runtimeapi.Mount)
		err    string
	}{
		{func(m *runtimeapi.Mount) { m.HostPath = "/srv/data" }, "both host_path and image"},
		{func(m *runtimeapi.Mount) { m.Readonly = false }, "readonly is false"},
		{func(m *runtimeapi.Mount) { m.Propagation = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL }, "cannot propagate to the host"},
		{func(m *runtimeapi.Mount) { m.ImageSubPath = "a\x00" }, "zero byte"},
	} {
		in := testInput()
		in.Config.Mounts = []*runtimeapi.Mount{imageMount(test.change)}
		in.ImageVolumes = map[int]string{0: "/run/berth/c/ctr1/volume-0"}
		_, err := ContainerSpec(in)
		testutil.WantError(t, err, codes.InvalidArgument, test.err, "/model")
		if err != nil && !strings.HasPrefix(err.Error(), "ImageVolumeMountFailed: ") { // kubelet matches this prefix
			t.Errorf("got %v, want the prefix ImageVolumeMountFailed", err)
		}
	}
	refused(t, func(in *ContainerInput) { in.Config.Mounts = []*runtimeapi.Mount{imageMount(nil)} }, codes.Internal, "/model")
}
