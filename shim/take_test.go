package shim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const mountTable = `20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
21 20 0:5 / /proc rw,nosuid shared:2 - proc proc rw
30 20 0:30 / /srv rw - tmpfs srv rw
31 30 0:31 / /srv/a\040b ro,relatime shared:7 master:3 - tmpfs x rw
32 31 0:32 /sub /srv/a\040b/in rw,noexec - tmpfs y rw
33 20 0:33 / /srv2 rw shared:9 - tmpfs z rw
`

func TestViewIn(t *testing.T) {
	for _, test := range []struct {
		sources []string
		want    []string
	}{
		{[]string{"/etc/hosts"}, []string{"8:1 / / shared:1 "}},
		{[]string{"/srv/a b/file"}, []string{"0:30 / /srv ", "0:31 / /srv/a\\040b shared:7 master:3 ", "8:1 / / shared:1 "}},
		{[]string{"/srv/a b"}, []string{"0:30 / /srv ", "0:31 / /srv/a\\040b shared:7 master:3 ", "0:32 /sub /srv/a\\040b/in rw,noexec", "8:1 / / shared:1 "}},
		{[]string{"/srv2", "/etc"}, []string{"0:33 / /srv2 shared:9 ", "8:1 / / shared:1 "}},
	} {
		got := slices.Sorted(maps.Keys(viewIn([]byte(mountTable), test.sources)))
		if !slices.Equal(got, test.want) {
			t.Errorf("%q:\n got %q\nwant %q", test.sources, got, test.want)
		}
	}
	if got := viewIn([]byte(mountTable), []string{"/"}); len(got) != 6 {
		t.Errorf("around the root: %v", got)
	}
}

func TestHostPaths(t *testing.T) {
	spec := &specs.Spec{
		Mounts: []specs.Mount{{Type: "proc", Source: "proc", Destination: "/proc"}, {Type: "bind", Source: "/srv", Destination: "/data"},
			{Source: "/opt/vendor", Destination: "/vendor", Options: []string{"ro", "rbind"}}}, // as CDI vendors write it
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.NetworkNamespace, Path: "/run/netns/x"}}},
	}
	if got := hostPaths(spec); !slices.Equal(got, []string{"/srv", "/opt/vendor", "/run/netns/x"}) {
		t.Errorf("got %q", got)
	}
	if got := hostPaths(nil); len(got) > 0 {
		t.Errorf("got %q", got)
	}
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{
		"/a": "/a", `/a\040b`: "/a b", `/\134\011`: "/\\\t", `/a\04`: `/a\04`, `\999`: `\999`, `\`: `\`, "": "",
	} {
		if got := string(unescape([]byte(in))); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

// A full node: 110 pods with four mounts each, a container with four sources.
func BenchmarkView(b *testing.B) {
	var table strings.Builder
	for i := range 440 {
		fmt.Fprintf(&table, "%d 20 0:%d / /var/lib/kubelet/pods/%032x/volumes/kubernetes.io~projected/token rw,relatime shared:%d - tmpfs tmpfs rw,size=1k\n", i+40, i+40, i, i+9)
	}
	text := []byte(table.String())
	sources := []string{"/var/lib/kubelet/pods/00000000000000000000000000000007/volumes/kubernetes.io~projected/token",
		"/var/lib/kubelet/pods/00000000000000000000000000000007/etc-hosts", "/run/berth/pods/x/shm", "/var/lib/berth/sandboxes/x/hosts"}
	for b.Loop() {
		viewIn(text, sources)
	}
}
