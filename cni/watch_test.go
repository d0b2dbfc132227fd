package cni

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/testutil"
)

// network waits until the view has the network, "" for none. Info triggers no reload, so this tests
// inotify only.
func (b *bed) network(want string) {
	b.t.Helper()
	testutil.Eventually(b.t, "network "+want, func() bool { return b.n.Info().Network == want })
}

func TestWatchFiles(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	n := b.start()
	if err := n.Status(context.Background()); errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), b.conf) {
		t.Fatalf("status without configuration: %v", err)
	}
	if _, err := n.Plan(); errdefs.Code(err) != codes.FailedPrecondition {
		t.Fatalf("plan without configuration: %v", err)
	}

	testutil.Must(t, os.WriteFile(b.conf+"/20.conflist", []byte(conflist("1.0.0", "written", "a")), 0o644))
	b.network("written")
	testutil.Must(t, n.Status(context.Background()))

	b.writeConf("20.conflist", conflist("1.0.0", "renamed", "a"))
	b.network("renamed")

	b.writeConf("10.conflist", "{")
	testutil.Eventually(t, "the invalid file is named", func() bool {
		s := n.Info().Skipped
		return len(s) == 1 && s[0].File == b.conf+"/10.conflist" && s[0].Error != ""
	})
	testutil.Must(t, n.Status(context.Background())) // the valid file after it counts

	b.writeConf("10.conflist", conflist("1.0.0", "first", "a"))
	b.network("first")
	if s := n.Info().Skipped; len(s) != 0 {
		t.Errorf("still skipped: %v", s)
	}
	testutil.Must(t, os.Rename(b.conf+"/10.conflist", b.conf+"/10.conflist.off"))
	b.network("renamed")
	testutil.Must(t, os.Remove(b.conf+"/20.conflist"))
	b.network("")
	if err := n.Status(context.Background()); errdefs.Code(err) != codes.FailedPrecondition {
		t.Errorf("status after the configuration vanished: %v", err)
	}
}

func TestWatchDirectories(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	root := filepath.Dir(b.conf)
	b.conf = root + "/etc/cni/net.d" // does not exist
	b.start()

	testutil.Must(t, os.MkdirAll(b.conf, 0o755))
	b.writeConf("1.conflist", conflist("1.0.0", "made", "a"))
	b.network("made")

	testutil.Must(t, os.RemoveAll(root+"/etc"))
	b.network("")
	testutil.Must(t, os.MkdirAll(b.conf, 0o755))
	b.writeConf("1.conflist", conflist("1.0.0", "remade", "a"))
	b.network("remade")

	// An ancestor is renamed away, and another tree is renamed into its place.
	testutil.Must(t, os.MkdirAll(root+"/new/net.d", 0o755))
	testutil.Must(t, os.WriteFile(root+"/new/net.d/1.conflist", []byte(conflist("1.0.0", "moved", "a")), 0o644))
	testutil.Must(t, os.Rename(root+"/etc/cni", root+"/old"))
	b.network("")
	testutil.Must(t, os.Rename(root+"/new", root+"/etc/cni"))
	b.network("moved")
	b.writeConf("1.conflist", conflist("1.0.0", "inmoved", "a"))
	b.network("inmoved")
}

func TestWatchSymlinks(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	root := filepath.Dir(b.conf)
	for _, name := range []string{"one", "two"} {
		testutil.Must(t, os.MkdirAll(root+"/"+name+"/deep", 0o755))
		testutil.Must(t, os.WriteFile(root+"/"+name+"/deep/1.conflist", []byte(conflist("1.0.0", name, "a")), 0o644))
	}
	b.conf = root + "/link"
	testutil.Must(t, os.Symlink("current/../current/deep", b.conf)) // relative, through a second link
	testutil.Must(t, os.Symlink(root+"/one", root+"/current"))
	b.start()
	b.network("one")

	testutil.Must(t, os.WriteFile(root+"/one/deep/1.conflist", []byte(conflist("1.0.0", "changed", "a")), 0o644))
	b.network("changed")

	testutil.Must(t, os.Symlink(root+"/two", root+"/current.new"))
	testutil.Must(t, os.Rename(root+"/current.new", root+"/current"))
	b.network("two")

	testutil.Must(t, os.Remove(b.conf))
	b.network("")
	testutil.Must(t, os.Symlink("link", b.conf)) // a symlink loop counts as an empty directory
	testutil.Must(t, os.Remove(b.conf))
	testutil.Must(t, os.Symlink("two/deep", b.conf))
	b.network("two")
}

func TestWatchPluginFiles(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.plugin("b", okResult)
	b.writeConf("1.conflist", conflist("1.1.0", "n", "a"))
	n := b.start()
	testutil.Must(t, os.Mkdir(b.conf+"/n", 0o755))
	b.write(b.conf+"/n/b.conf", `{"type":"b"}`)
	testutil.Eventually(t, "the plugin file is found", func() bool { return len(n.Info().Plugins) == 2 })
	testutil.Must(t, os.Remove(b.conf+"/n/b.conf"))
	testutil.Eventually(t, "the plugin file is gone", func() bool { return len(n.Info().Plugins) == 1 })
}

func TestStatusReloadsWithoutInotify(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	n := &Network{log: testutil.Logger(t), plugins: &runner{runs: newRuns("", testutil.Logger(t)), log: testutil.Logger(t)}, refresh: make(chan struct{}, 1)}
	n.setDirectories(b.conf, []string{b.bin})
	ctx, cancel := context.WithCancel(context.Background())
	n.stop = cancel
	o := &owner{n: n, ctx: ctx, statuses: make(chan status)}
	o.reload()
	n.done.Go(o.run)
	defer n.Close()
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n.askRefresh()
	testutil.Eventually(t, "network n", func() bool { return n.Info().Network == "n" })
}

func TestMissingPlugin(t *testing.T) {
	b := newBed(t)
	b.writeConf("1.conflist", conflist("1.0.0", "n", "a"))
	n := b.start()
	err := n.Status(context.Background())
	if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `"a" is not installed in `+b.bin) {
		t.Fatalf("status: %v", err)
	}
	b.plugin("a", okResult)
	n.askRefresh()
	testutil.Eventually(t, "ready", func() bool { return n.Status(context.Background()) == nil })
}

// Prepare moves a network to other directories of configurations and plugins.
func TestPrepareMovesDirectories(t *testing.T) {
	b := newBed(t)
	b.plugin("a", okResult)
	b.writeConf("10.conflist", conflist("1.0.0", "first", "a"))
	n := b.start()
	b.network("first")
	if _, err := n.Prepare("relative", []string{b.bin}); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("a relative directory: %v", err)
	}
	if _, err := n.Prepare(b.conf, nil); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("no plugin directory: %v", err)
	}
	other := filepath.Join(t.TempDir(), "net.d")
	apply, err := n.Prepare(other, []string{b.bin})
	testutil.Must(t, err)
	apply()
	b.network("")
	testutil.Must(t, os.Mkdir(other, 0o755))
	testutil.Must(t, os.WriteFile(other+"/10.conflist", []byte(conflist("1.0.0", "second", "a")), 0o644))
	b.network("second")
	apply, err = n.Prepare(other, []string{t.TempDir()})
	testutil.Must(t, err)
	apply()
	testutil.Eventually(t, "the plugin is missing", func() bool { return n.Status(context.Background()) != nil })
}
