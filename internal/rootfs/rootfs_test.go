package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.MainInMountNamespace(m)) }

// write creates the files of a layer: name → content. A name ending in "/" is a directory.
func write(t *testing.T, dir string, files map[string]string) Layer {
	t.Helper()
	testutil.Must(t, os.MkdirAll(dir, 0o755))
	for name, content := range files {
		path := filepath.Join(dir, name)
		if strings.HasSuffix(name, "/") {
			testutil.Must(t, os.MkdirAll(path, 0o755))
			continue
		}
		testutil.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		testutil.Must(t, os.WriteFile(path, []byte(content), 0o644))
	}
	return Layer{Kind: Directory, Path: dir}
}

// mountFunc is one way to mount. Each way must support every Spec.
type mountFunc struct {
	name  string
	mount func(Spec, string) error
}

var mountFuncs = []mountFunc{
	{"MountAt", Spec.MountAt},
	{"before Linux 6.13", mountAtByNumber},
	{"before Linux 6.7", mountAtOld},
}

// mountAtByNumber behaves like MountAt on a kernel whose overlayfs refuses descriptors.
func mountAtByNumber(s Spec, target string) error {
	if s.isSingle() {
		return s.MountAt(target)
	}
	if err := s.check(); err != nil {
		return err
	}
	dirs, err := s.open()
	if err != nil {
		return err
	}
	defer dirs.close()
	if err := s.clearVolatile(); err != nil {
		return err
	}
	mount, err := s.orOld(overlayWith(dirs, setByNumber))
	if err != nil {
		return err
	}
	defer mount.Close()
	return Attach(mount, target)
}

// mountAtOld behaves like MountAt on a kernel before 6.7.
func mountAtOld(s Spec, target string) error {
	if err := s.check(); err != nil {
		return err
	}
	mount, err := s.mountOld()
	if err != nil {
		return err
	}
	defer mount.Close()
	return Attach(mount, target)
}

// kernelNeedsOld reports whether this is a kernel before 6.7.
func kernelNeedsOld(t *testing.T) bool {
	t.Helper()
	s := Spec{Layers: []Layer{write(t, t.TempDir(), nil), write(t, t.TempDir(), nil)}}
	mount, err := s.mountOverlay()
	if errors.Is(err, errors.ErrUnsupported) {
		return true
	}
	testutil.Must(t, err)
	testutil.Must(t, mount.Close())
	return false
}

// mounted mounts s, and unmounts it when the test ends.
func mounted(t *testing.T, s Spec, mount func(Spec, string) error) string {
	t.Helper()
	target := t.TempDir()
	testutil.Must(t, mount(s, target))
	t.Cleanup(func() {
		if err := unix.Unmount(target, 0); err != nil {
			t.Error(err)
		}
	})
	return target
}

func expect(t *testing.T, path, want string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s: %q, %v; want %q", path, got, err, want)
	}
}

// awkward are directory names with all characters that are special in mount options.
var awkward = []string{"plain", `back\slash`, "co:lon", "com,ma", `all\:,\,\\`, "sp ace\nline", strings.Repeat("long", 60)}

func TestOverlay(t *testing.T) {
	for _, f := range mountFuncs {
		for _, name := range awkward {
			t.Run(f.name+"/"+name[:min(len(name), 8)], func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), name)
				s := Spec{
					Layers: []Layer{
						write(t, dir+"/1", map[string]string{"a": "1", "b": "1", "dir/x": "1"}),
						write(t, dir+"/2", map[string]string{"b": "2", "dir/y": "2"}),
					},
					Upper: dir + "/upper", Work: dir + "/work",
				}
				testutil.Must(t, s.MakeUpper())
				root := mounted(t, s, f.mount)
				expect(t, root+"/a", "1")
				expect(t, root+"/b", "2")
				expect(t, root+"/dir/x", "1")
				expect(t, root+"/dir/y", "2")
				testutil.Must(t, os.WriteFile(root+"/a", []byte("changed"), 0o644))
				expect(t, dir+"/upper/a", "changed")
				expect(t, dir+"/1/a", "1")
			})
		}
	}
}

func TestReadOnly(t *testing.T) {
	dir := t.TempDir()
	one := write(t, dir+"/1", map[string]string{"a": "1"})
	two := write(t, dir+"/2", map[string]string{"b": "2"})
	for _, f := range mountFuncs {
		for _, layers := range [][]Layer{{one}, {one, two}} {
			t.Run(fmt.Sprintf("%s/%d", f.name, len(layers)), func(t *testing.T) {
				root := mounted(t, Spec{Layers: layers}, f.mount)
				expect(t, root+"/a", "1")
				if err := os.WriteFile(root+"/new", nil, 0o644); !errors.Is(err, unix.EROFS) {
					t.Errorf("write to a read-only root: %v", err)
				}
				if err := os.Chmod(root+"/a", 0); !errors.Is(err, unix.EROFS) {
					t.Errorf("chmod in a read-only root: %v", err)
				}
			})
		}
	}
	expect(t, dir+"/1/a", "1")
}

// A detached mount must not propagate to the peers of its source.
func TestCloneIsPrivate(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	testutil.Must(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	layer := write(t, dir+"/layer", map[string]string{"sub/": ""})
	for _, f := range mountFuncs {
		root := mounted(t, Spec{Layers: []Layer{layer}}, f.mount)
		testutil.Must(t, unix.Mount("tmpfs", dir+"/layer/sub", "tmpfs", 0, ""))
		defer unix.Unmount(dir+"/layer/sub", unix.MNT_DETACH)
		if info, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(info), root+"/sub") {
			t.Errorf("%s: a mount propagated into the clone: %v", f.name, err)
		}
	}
}

func TestManyLayers(t *testing.T) {
	dir := t.TempDir()
	s := Spec{Upper: dir + "/upper", Work: dir + "/work"}
	for i := range MaxLayers {
		name := fmt.Sprintf("%s-%03d", strings.Repeat("layer", 12), i)
		s.Layers = append(s.Layers, write(t, filepath.Join(dir, name), map[string]string{fmt.Sprint(i): "x", "top": fmt.Sprint(i)}))
	}
	testutil.Must(t, s.MakeUpper())
	for _, f := range mountFuncs {
		t.Run(f.name, func(t *testing.T) {
			root := mounted(t, s, f.mount)
			expect(t, root+"/0", "x")
			expect(t, root+"/499", "x")
			expect(t, root+"/top", "499")
		})
	}
	s.Layers = append(s.Layers, s.Layers[0])
	if err := s.MountAt(dir); !errors.Is(err, fs.ErrInvalid) || !strings.Contains(err.Error(), "501") {
		t.Errorf("501 layers: %v", err)
	}
}

// A container that is launched again after a failed launch mounts the same upper layer.
func TestUpperLayerIsMountedAgain(t *testing.T) {
	dir := t.TempDir()
	s := Spec{
		Layers: []Layer{write(t, dir+"/1", map[string]string{"a": "1"})},
		Upper:  dir + "/upper", Work: dir + "/work",
	}
	testutil.Must(t, s.MakeUpper())
	for i := range 3 {
		for _, f := range mountFuncs {
			root := t.TempDir()
			if err := f.mount(s, root); err != nil {
				t.Fatalf("mount %d: %v", i, err)
			}
			testutil.Must(t, os.WriteFile(root+"/b", fmt.Append(nil, i), 0o644))
			testutil.Must(t, unix.Unmount(root, 0))
		}
	}
	expect(t, dir+"/upper/b", "2")
}

func TestMakeUpper(t *testing.T) {
	dir := t.TempDir()
	layer := write(t, dir+"/1", map[string]string{"a": "1"})
	testutil.Must(t, os.Chown(layer.Path, 12, 34))
	testutil.Must(t, unix.Chmod(layer.Path, 0o1755&^0o222))
	s := Spec{Layers: []Layer{layer}, Upper: dir + "/upper", Work: dir + "/work"}
	for range 2 { // the second call keeps existing files
		testutil.Must(t, s.MakeUpper())
	}
	root := mounted(t, s, Spec.MountAt)
	info, err := os.Stat(root)
	testutil.Must(t, err)
	st := info.Sys().(*syscall.Stat_t)
	if st.Mode&0o7777 != 0o1555 || st.Uid != 12 || st.Gid != 34 {
		t.Errorf("/ is %o %d:%d, want 1555 12:34", st.Mode&0o7777, st.Uid, st.Gid)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 3 {
		t.Errorf("in the container's directory: %v, %v", left, err)
	}
}

// A detached mount is not in the mount table, and ends with its descriptor.
func TestDetachedMountIsInvisible(t *testing.T) {
	dir := t.TempDir()
	s := Spec{Layers: []Layer{write(t, dir+"/1", map[string]string{"a": "1"}), write(t, dir+"/2", nil)}}
	before, err := os.ReadFile("/proc/self/mountinfo")
	testutil.Must(t, err)
	testDetached(t, s.Mount, string(before))
	testDetached(t, s.mountOld, string(before))
}

func testDetached(t *testing.T, f func() (*os.File, error), before string) {
	t.Helper()
	mount, err := f()
	testutil.Must(t, err)
	after, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || before != string(after) {
		t.Errorf("mount table changed: %v\n%s", err, after)
	}
	expect(t, fmt.Sprintf("/proc/self/fd/%d/a", mount.Fd()), "1")
	if flags, err := unix.FcntlInt(mount.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("close-on-exec: %x %v", flags, err)
	}
	if err := mount.Close(); err != nil {
		t.Error(err)
	}
}

// No thread remains in another mount namespace. This matters most for the main thread, which
// /proc/self describes.
func TestNoThreadStaysInMountNamespace(t *testing.T) {
	dir := t.TempDir()
	s := Spec{Layers: []Layer{write(t, dir+"/1", nil), write(t, dir+"/2", nil)}}
	want, err := os.Readlink("/proc/self/ns/mnt")
	testutil.Must(t, err)
	for range 200 { // the scheduler picks the thread
		mount, err := s.mountOld()
		testutil.Must(t, err)
		testutil.Must(t, mount.Close())
		if got, err := os.Readlink("/proc/self/ns/mnt"); err != nil || got != want {
			t.Fatalf("the main thread is in %s, %v; not in %s", got, err, want)
		}
	}
}

func TestErrorsNameLayer(t *testing.T) {
	dir := t.TempDir()
	good := write(t, dir+"/1", nil)
	file := write(t, dir+"/2", map[string]string{"file": ""}).Path + "/file"
	cases := []struct {
		name string
		spec Spec
		is   error
		text string
	}{
		{"no layers", Spec{}, fs.ErrInvalid, "without layers"},
		{"another kind", Spec{Layers: []Layer{{Kind: "tar", Path: "/x.tar"}}}, errors.ErrUnsupported, "/x.tar"},
		{"missing image", Spec{Layers: []Layer{{Kind: EROFS, Path: "/x.erofs"}}}, fs.ErrNotExist, "/x.erofs"},
		{"no kind", Spec{Layers: []Layer{{Path: "/x"}}}, errors.ErrUnsupported, "/x"},
		{"upper only", Spec{Layers: []Layer{good}, Upper: dir}, fs.ErrInvalid, "upper"},
		{"missing layer", Spec{Layers: []Layer{good, {Kind: Directory, Path: dir + "/none"}}}, fs.ErrNotExist, dir + "/none"},
		{"missing single layer", Spec{Layers: []Layer{{Kind: Directory, Path: dir + "/none"}}}, fs.ErrNotExist, dir + "/none"},
		{"file as layer", Spec{Layers: []Layer{good, {Kind: Directory, Path: file}}}, unix.ENOTDIR, file},
		{"missing upper", Spec{Layers: []Layer{good}, Upper: dir + "/u", Work: dir + "/w"}, fs.ErrNotExist, dir + "/u"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for _, f := range mountFuncs {
				if err := f.mount(c.spec, t.TempDir()); !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.text) {
					t.Errorf("%s: %v; want %v with %q", f.name, err, c.is, c.text)
				}
			}
		})
	}
	two := Spec{Layers: []Layer{good, write(t, dir+"/3", nil)}}
	for _, f := range mountFuncs {
		if err := f.mount(two, dir+"/none"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), dir+"/none") {
			t.Errorf("%s on a missing target: %v", f.name, err)
		}
	}
}

// Errors contain the kernel's messages about a filesystem context, but not that about noOption.
func TestKernelMessage(t *testing.T) {
	if kernelNeedsOld(t) {
		t.Skip("NOT TESTED: the kernel needs mountOld")
	}
	layer := write(t, t.TempDir(), nil)
	s := Spec{Layers: slices.Repeat([]Layer{layer}, MaxLayers+1)}
	_, err := s.mountOverlay()
	if err == nil || !strings.Contains(err.Error(), "limit is 500") || strings.Contains(err.Error(), noOption) {
		t.Errorf("too many layers: %v", err)
	}
}

// The kernel would cut longer options, so that an option of the end were missing.
func TestOldMountRefusesLongOptions(t *testing.T) {
	dir := t.TempDir()
	s := Spec{Layers: []Layer{write(t, dir+"/1", nil)}, Upper: dir + "/upper", Work: dir + "/work"}
	testutil.Must(t, s.MakeUpper())
	dirs, err := s.open()
	testutil.Must(t, err)
	defer dirs.close()
	long := *dirs
	long.lower = slices.Repeat(dirs.lower, os.Getpagesize()/2)
	err = onThread(unix.CLONE_FS, func() error { return mountInFDs(&long, dir) })
	if !errors.Is(err, unix.E2BIG) {
		t.Errorf("options of more than a page: %v", err)
	}
}

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	s := Spec{
		Layers: []Layer{write(t, dir+"/1", nil)},
		Upper:  dir + "/upper", Work: dir + "/work",
	}
	testutil.Must(t, s.MakeUpper())
	root := mounted(t, s, Spec.MountAt)
	info, err := os.ReadFile("/proc/self/mountinfo")
	testutil.Must(t, err)
	for line := range strings.Lines(string(info)) {
		if strings.Contains(line, " "+root+" ") {
			all := []string{"volatile", "redirect_dir=nofollow"}
			if !kernelNeedsOld(t) {
				all = append(all, "lowerdir+="+dir+"/1", "upperdir="+dir+"/upper")
			}
			for _, want := range all {
				if !strings.Contains(line, want) {
					t.Errorf("no %s in %s", want, line)
				}
			}
			return
		}
	}
	t.Errorf("%s is not in the mount table", root)
}

// A container sees the options of its root's mount. Kubernetes' test of ProcMount counts the mounts
// with "/proc" in their line.
func TestMountLineDoesNotNameProc(t *testing.T) {
	for _, f := range mountFuncs {
		for _, name := range awkward {
			t.Run(f.name+"/"+name[:min(len(name), 8)], func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), name)
				s := Spec{Layers: []Layer{write(t, dir+"/1", nil)}, Upper: dir + "/upper", Work: dir + "/work"}
				testutil.Must(t, s.MakeUpper())
				if line := mountLine(t, mounted(t, s, f.mount)); strings.Contains(line, "/proc") {
					t.Errorf("the mount's line contains /proc: %s", line)
				}
			})
		}
	}
}

// mountLine returns the line of a mount in /proc/self/mounts.
func mountLine(t *testing.T, place string) string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mounts")
	testutil.Must(t, err)
	for line := range strings.Lines(string(data)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == place {
			return line
		}
	}
	t.Fatalf("%s is not in the mount table", place)
	return ""
}

// A label contains commas, which separate the options of mount(2).
func TestLabelOption(t *testing.T) {
	s := Spec{Layers: []Layer{write(t, t.TempDir()+"/1", nil), write(t, t.TempDir()+"/2", nil)}, Label: "u:r:t:s0:c1,c2"}
	dirs, err := s.open()
	testutil.Must(t, err)
	defer dirs.close()
	if data := dirs.data(); !strings.Contains(data, `,context="u:r:t:s0:c1,c2",`) {
		t.Errorf("options %s", data)
	}
	if i := slices.IndexFunc(dirs.options(), func(o option) bool { return o.key == contextOption }); i < 0 {
		t.Error("no option context")
	}
}
