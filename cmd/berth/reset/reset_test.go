package reset

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"

	"berth/cmd/config"
	"berth/internal/lockfile"
)

func TestMountsOf(t *testing.T) {
	t.Parallel()
	root := &mountinfo.Info{ID: 1, Parent: 0, Major: 8, Root: "/", Mountpoint: "/"}
	run := &mountinfo.Info{ID: 2, Parent: 1, Major: 0, Minor: 5, Root: "/", Mountpoint: "/run"}
	bind := &mountinfo.Info{ID: 3, Parent: 2, Major: 0, Minor: 5, Root: "/berth", Mountpoint: "/run/berth"}
	pods := &mountinfo.Info{ID: 4, Parent: 3, Major: 0, Minor: 5, Root: "/berth/pods", Mountpoint: "/run/berth/pods"}
	place := &mountinfo.Info{ID: 5, Parent: 2, Major: 0, Minor: 5, Root: "/berth-rootfs", Mountpoint: "/run/berth-rootfs"}
	own := &mountinfo.Info{ID: 6, Parent: 2, Major: 0, Minor: 9, Root: "/", Mountpoint: "/run/berth"}
	disk := &mountinfo.Info{ID: 7, Parent: 1, Major: 8, Minor: 2, Root: "/", Mountpoint: "/var/lib/berth"}
	volume := &mountinfo.Info{ID: 8, Parent: 7, Major: 0, Minor: 12, Root: "/", Mountpoint: "/var/lib/berth/run/1/volumes/a"}
	other := &mountinfo.Info{ID: 9, Parent: 2, Major: 0, Minor: 13, Root: "/", Mountpoint: "/run/berth2"}
	for name, tc := range map[string]struct {
		all  []*mountinfo.Info
		want string
	}{
		"no berth":             {[]*mountinfo.Info{root, run, other}, ""},
		"daemon's mounts":      {[]*mountinfo.Info{root, run, bind, pods, place}, "/run/berth /run/berth/pods /run/berth-rootfs"},
		"administrator's":      {[]*mountinfo.Info{root, run, own, disk}, ""},
		"below administrators": {[]*mountinfo.Info{root, run, own, disk, volume}, "/var/lib/berth/run/1/volumes/a"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := &config.Config{Root: "/var/lib/berth", State: "/run/berth"}
			if got := strings.Join(mountsOf(cfg, tc.all), " "); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestServiceIn(t *testing.T) {
	t.Parallel()
	for groups, want := range map[string]string{
		"0::/system.slice/berth.service\n":                                            "berth.service",
		"0::/system.slice/berth.service/plugins\n":                                    "berth.service",
		"12:memory:/other.service\n1:name=systemd:/system.slice/node.service\n0::/\n": "node.service",
		"0::/user.slice/user-0.slice/session-1.scope\n":                               "",
		"0::/user.slice/user-0.slice/user@0.service/app.slice/vte-spawn-1.scope\n":    "",
		"0::/user.slice/user-0.slice/user@0.service/app.slice/own.service\n":          "own.service",
		"damaged": "",
	} {
		if got := serviceIn(groups); got != want {
			t.Errorf("%q: got %q, want %q", groups, got, want)
		}
	}
}

// systemd starts a daemon for a client of any of its sockets at the daemon's path.
func TestSocketsAt(t *testing.T) {
	t.Parallel()
	const list = `/run/berth/berth.sock    berth.socket  berth.service
/run/berth/berth.sock2   other.socket  other.service
/run/dbus/system_bus_socket dbus.socket dbus.service
/run/berth/berth.sock    own.socket    own.service
kobject-uevent 1 systemd-udevd-kernel.socket systemd-udevd.service

`
	for path, want := range map[string]string{
		"/run/berth/berth.sock": "berth.socket own.socket",
		"/run/berth":            "",
		"/other":                "",
	} {
		if got := strings.Join(socketsAt(list, path), " "); got != want {
			t.Errorf("%s: got %q, want %q", path, got, want)
		}
	}
}

func TestConfirmNeedsTerminalOrYes(t *testing.T) {
	t.Parallel()
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, in := range []interface{ Read([]byte) (int, error) }{strings.NewReader("y\n"), file} {
		if err := (&options{}).confirm(in, &strings.Builder{}); err == nil || !strings.Contains(err.Error(), "--yes") {
			t.Errorf("%T: %v", in, err)
		}
	}
	if err := (&options{yes: true}).confirm(nil, nil); err != nil {
		t.Error(err)
	}
}

func TestDaemonOf(t *testing.T) {
	t.Parallel()
	cfg := &config.Config{Root: t.TempDir(), State: filepath.Join(t.TempDir(), "missing")}
	want := func(pid int) {
		t.Helper()
		if got, err := daemonOf(cfg); got != pid || err != nil {
			t.Errorf("got %d, %v, want %d", got, err, pid)
		}
	}
	want(0)
	lock, err := lockfile.Acquire(filepath.Join(cfg.Root, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	want(os.Getpid())
	if err := lock.Release(); err != nil {
		t.Fatal(err)
	}
	want(0)
}

func TestLinesNameOuterMountsLast(t *testing.T) {
	t.Parallel()
	f := &found{
		pods: []string{"pod default/a (1234, containers: 1)"}, images: 2, network: []string{"bridge berth0"},
		mounts: []string{"/run/berth", "/run/berth/pods"}, profile: true, dirs: []string{"/var/lib/berth"},
	}
	want := []string{
		"pod default/a (1234, containers: 1)", "images: 2", "bridge berth0", "mount /run/berth/pods", "mount /run/berth",
		"AppArmor profile berth-default", "directory /var/lib/berth",
	}
	if got := f.lines(); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	var out strings.Builder
	if err := (&found{}).print(&out, 7); err != nil || out.String() != "Berth has nothing on this node.\n  daemon, process 7\n" {
		t.Errorf("%v, %q", err, out.String())
	}
}
