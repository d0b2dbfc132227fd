package launcher

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
	"berth/shim/proto"
)

// confinedBackend is a restore with its directories outside /tmp, which the namespace hides.
func confinedBackend(t *testing.T) (b *restoreBackend, base string) {
	t.Helper()
	base, err := os.MkdirTemp("/var/tmp", "confine-")
	testutil.Must(t, err)
	t.Cleanup(func() { testutil.Must(t, os.RemoveAll(base)) })
	for _, dir := range []string{"dir", "state/c", "rootfs", "volume", "images", "victim"} {
		testutil.Must(t, os.MkdirAll(filepath.Join(base, dir), 0o755))
	}
	b = &restoreBackend{libcontainerBackend: libcontainerBackend{
		launch: &launch{
			Launch: &proto.Launch{ID: "c", Dir: filepath.Join(base, "dir"),
				Spec:    &specs.Spec{Root: &specs.Root{Path: filepath.Join(base, "rootfs")}},
				Restore: &proto.Restore{Images: filepath.Join(base, "images"), CRIU: "/usr/sbin/criu"}},
			l: &launcher{settings: proto.LauncherSettings{StateRoot: filepath.Join(base, "state")}},
		},
		config: &configs.Config{Mounts: []*configs.Mount{{Device: "bind", Source: filepath.Join(base, "volume")}}},
	}}
	return b, base
}

// writesWhenTold is a program that waits for a line and then prints those of its arguments that are
// directories in which it can make a file or directory.
const writesWhenTold = `read go; for d in "$@"; do mkdir "$d/made-by-criu" 2>/dev/null && echo "$d"; done; true`

// CRIU runs as root. In the namespace of a restore it can write to the container's root filesystem,
// its own files, its cgroups in the yard and an empty /tmp only, whatever path it gets. It keeps
// the namespace when the launcher has left it.
func TestRestoreNamespaceIsReadOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root")
	}
	b, base := confinedBackend(t)
	groups, err := writableCgroups()
	testutil.Must(t, err)
	inYard, own := ownCgroups(t, filepath.Join(b.workDir(), restoreYard))
	places := slices.Concat([]string{filepath.Join(base, "victim"), filepath.Join(base, "volume"), filepath.Join(base, "dir"),
		filepath.Join(base, "images"), filepath.Join(base, "state"), "/etc", "/var/lib", "/dev"}, groups, own)
	allowed := slices.Concat([]string{b.criuRoot(), "/tmp", b.workDir()}, inYard)
	ended := make(chan error)
	var written []string
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		ended <- b.isolated(func() error {
			written, err = writtenByCRIU(b, slices.Concat(places, allowed))
			return err
		})
	}()
	testutil.Must(t, <-ended)
	if !slices.Equal(written, allowed) {
		t.Errorf("CRIU can write to %q, want %q", written, allowed)
	}
	for _, dir := range own {
		testutil.Must(t, os.Remove(filepath.Join(dir, "made-by-criu")))
	}
	for _, dir := range append(places, "/tmp") {
		if _, err := os.Lstat(filepath.Join(dir, "made-by-criu")); err == nil {
			t.Errorf("CRIU has written to %s", dir)
			testutil.Must(t, os.Remove(filepath.Join(dir, "made-by-criu")))
		}
	}
	if _, err := os.Lstat(filepath.Join(base, "rootfs/made-by-criu")); err != nil {
		t.Errorf("CRIU has not written to the container: %v", err)
	}
}

// writtenByCRIU does what libcontainer does around the start of CRIU. It returns the places to
// which a process in CRIU's place could write after this thread has left the namespace.
func writtenByCRIU(b *restoreBackend, places []string) ([]string, error) {
	var failed error
	b.ns.started, b.ns.fail = func(int) error { return nil }, func(err error) { failed = err }
	if err := os.MkdirAll(b.criuRoot(), 0o700); err != nil {
		return nil, err
	}
	if err := unix.Mount(b.Spec.Root.Path, b.criuRoot(), "", unix.MS_BIND, ""); err != nil {
		return nil, err
	}
	_ = b.ns.Fire(&logrus.Entry{Message: "Using CRIU 40201"}) // it reports by fail
	cmd := exec.Command("sh", append([]string{"-c", writesWhenTold, "sh"}, places...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	_ = b.ns.Fire(&logrus.Entry{Message: "Using CRIU in RESTORE mode"})
	if _, err := stdin.Write([]byte("go\n")); err != nil {
		return nil, err
	}
	if err := cmd.Wait(); err != nil {
		return nil, err
	}
	if failed == nil && !b.ns.left {
		return nil, os.ErrInvalid
	}
	return strings.Fields(out.String()), failed
}

// A CRIU that was not confined before its start, or started without a message, gets no request.
func TestRestoreNamespaceNeedsBothMessages(t *testing.T) {
	n := &restoreNamespace{started: func(int) error { return nil }}
	var failed error
	n.fail = func(err error) { failed = err }
	_ = n.Fire(&logrus.Entry{Message: "Using CRIU in RESTORE mode"})
	if failed == nil || n.left {
		t.Errorf("left a namespace that is not read-only: %v", failed)
	}
	if err := (&restoreBackend{ns: n}).admit(); err == nil {
		t.Error("processes of a CRIU that was not confined are admitted")
	}
}
