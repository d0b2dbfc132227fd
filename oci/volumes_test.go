package oci

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// resolveIn resolves like an image with these symlinks and files. A file leads to "".
func resolveIn(links map[string]string) func(string) (string, error) {
	return func(p string) (string, error) {
		for from, to := range links {
			switch {
			case !isBelow(p, from):
			case to == "":
				return "", &fs.PathError{Op: "resolve", Path: p, Err: unix.ENOTDIR}
			default:
				return to + strings.TrimPrefix(p, from), nil
			}
		}
		return p, nil
	}
}

func TestPlaceVolumes(t *testing.T) {
	t.Parallel()
	links := map[string]string{"/link": "/srv/data", "/kernel": "/proc/sys", "/up": "/", "/file": "", "/var/run": "/run"}
	for _, tt := range []struct {
		name    string
		volumes []string
		mounts  []string
		want    []string // NAME:PATH
		ignored []string
	}{
		{name: "none"},
		{name: "plain", volumes: []string{"/data"}, want: []string{"0:/data"}},
		{name: "parents first", volumes: []string{"/a/b/c", "/a", "/z", "/a/b"}, want: []string{"0:/a", "3:/z", "1:/a/b", "2:/a/b/c"}},
		{name: "same path", volumes: []string{"/data", "/data/", "//data", "data", "/x/../data"}, want: []string{"0:/data"}},
		{name: "above the root", volumes: []string{"/../x", "../../y"}, want: []string{"1:/x", "0:/y"}},
		{name: "root", volumes: []string{"", "/", ".", "/..", "/up"}, ignored: []string{"", ".", "/", "/..", "/up"}},
		{
			name:    "kernel's and pod's paths",
			volumes: []string{"/proc", "/proc/sys", "/sys", "/dev", "/dev/shm", "/etc/hosts", "/etc/resolv.conf/x", "/kernel"},
			ignored: []string{"/dev", "/dev/shm", "/etc/hosts", "/etc/resolv.conf/x", "/kernel", "/proc", "/proc/sys", "/sys"},
		},
		{name: "similar paths", volumes: []string{"/process", "/devel", "/etc"}, want: []string{"0:/devel", "1:/etc", "2:/process"}},
		{name: "file", volumes: []string{"/file", "/file/x", "/a\x00b"}, ignored: []string{"/a\x00b", "/file", "/file/x"}},
		{
			name: "long paths", volumes: []string{"/a" + strings.Repeat("n", 256), "/b" + strings.Repeat("/n", 1024), "/c" + strings.Repeat("n", 254)},
			want:    []string{"2:/c" + strings.Repeat("n", 254)},
			ignored: []string{"/a" + strings.Repeat("n", 256), "/b" + strings.Repeat("/n", 1024)},
		},
		{name: "symlink", volumes: []string{"/link", "/link/sub", "/srv/data"}, want: []string{"0:/srv/data", "1:/srv/data/sub"}},
		{name: "mount at the path", volumes: []string{"/data", "/other"}, mounts: []string{"/data/"}, want: []string{"1:/other"}},
		{name: "mount at a parent", volumes: []string{"/data/sub", "/database"}, mounts: []string{"/data"}, want: []string{"1:/database"}},
		{name: "mount below", volumes: []string{"/data"}, mounts: []string{"/data/sub"}, want: []string{"0:/data"}},
		{name: "mount through a symlink", volumes: []string{"/srv/data/x", "/run/y"}, mounts: []string{"/link", "/var/run"}},
		{name: "volume through a symlink", volumes: []string{"/var/run/y"}, mounts: []string{"/run"}},
		{name: "mount of a file", volumes: []string{"/data"}, mounts: []string{"/file"}, want: []string{"0:/data"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			declared, mounts := map[string]struct{}{}, []*runtimeapi.Mount(nil)
			for _, v := range tt.volumes {
				declared[v] = struct{}{}
			}
			for _, m := range tt.mounts {
				mounts = append(mounts, &runtimeapi.Mount{ContainerPath: m})
			}
			placed, ignored, err := PlaceVolumes(declared, mounts, resolveIn(links))
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, v := range placed {
				got = append(got, v.Name+":"+v.Path)
			}
			if !slices.Equal(got, tt.want) || !slices.Equal(ignored, tt.ignored) {
				t.Errorf("placed %q, ignored %q; want %q and %q", got, ignored, tt.want, tt.ignored)
			}
		})
	}
}

func TestPlaceVolumesFails(t *testing.T) {
	t.Parallel()
	broken := func(string) (string, error) { return "", unix.EIO }
	if _, _, err := PlaceVolumes(map[string]struct{}{"/data": {}}, nil, broken); !errors.Is(err, unix.EIO) {
		t.Errorf("of an unreadable image: %v", err)
	}
	many := map[string]struct{}{}
	for i := range maxVolumes + 1 {
		many[fmt.Sprintf("/v/%d", i)] = struct{}{}
	}
	if _, _, err := PlaceVolumes(many, nil, resolveIn(nil)); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("of too many volumes: %v", err)
	}
}

// Volumes come after the kernel's filesystems and before the request's mounts, which may be below.
func TestVolumeMounts(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.sc().ReadonlyRootfs = true
	in.VolumesDir = "/volumes"
	in.Volumes = []AnonymousVolume{{Name: "1", Path: "/etc"}, {Name: "0", Path: "/a/b/c"}}
	in.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/link", HostPath: "/srv/data"}}
	want := slices.Concat(defaultDestinations[:6], []string{"/etc", "/a/b/c", "/link"}, defaultDestinations[6:])
	got := destinations(t, in)
	slices.Sort(want[8:])
	slices.Sort(got[8:])
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	m := findMount(mustSpec(t, in), "/a/b/c")
	if m.Source != "/volumes/0" || m.Type != "bind" || !slices.Equal(m.Options, []string{"rbind", "rprivate", "rw"}) {
		t.Errorf("mount %+v", m)
	}
}

// A mount that a plugin or a CDI device adds takes the place of volumes below it.
func TestDropCovered(t *testing.T) {
	t.Parallel()
	in := testInput()
	in.VolumesDir = "/volumes"
	in.Volumes = []AnonymousVolume{{Name: "0", Path: "/data"}, {Name: "1", Path: "/data/sub"}, {Name: "2", Path: "/lib/a/b"}, {Name: "3", Path: "/library"}}
	spec := mustSpec(t, in)
	before := len(spec.Mounts)
	DropCovered(spec, in.Volumes, in.VolumesDir)
	if len(spec.Mounts) != before {
		t.Errorf("without another mount: %d mounts of %d", len(spec.Mounts), before)
	}
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/lib/", Type: "bind", Source: "/volumes"},
		specs.Mount{Destination: "/data/file", Type: "bind", Source: "/x"})
	DropCovered(spec, in.Volumes, in.VolumesDir)
	var left []string
	for _, m := range spec.Mounts {
		if strings.HasPrefix(m.Source, "/volumes/") {
			left = append(left, m.Destination)
		}
	}
	if want := []string{"/data", "/data/sub", "/library"}; !slices.Equal(left, want) || len(spec.Mounts) != before+1 {
		t.Errorf("volumes at %q, want %q; %d mounts", left, want, len(spec.Mounts))
	}
}
