package safefs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// newRoot returns a root and a directory outside it with a secret file, which no call may reach.
func newRoot(t testing.TB) (root *os.File, dir, outside string) {
	t.Helper()
	outside = t.TempDir()
	dir = filepath.Join(outside, "root")
	testutil.Must(t, os.Mkdir(dir, 0o755))
	testutil.Must(t, os.WriteFile(outside+"/secret", []byte("secret"), 0o600))
	root, err := OpenRoot(dir)
	testutil.Must(t, err)
	t.Cleanup(func() { root.Close() })
	return root, dir, outside
}

func TestReadFile(t *testing.T) {
	testutil.NeedRoot(t)
	root, dir, outside := newRoot(t)
	testutil.Must(t, os.MkdirAll(dir+"/etc/sub", 0o755))
	testutil.Must(t, os.WriteFile(dir+"/etc/passwd", []byte("root"), 0o644))
	testutil.Must(t, unix.Mkfifo(dir+"/fifo", 0o644))
	testutil.Must(t, unix.Mknod(dir+"/zero", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))))
	testutil.Must(t, os.WriteFile(dir+"/large", make([]byte, 101), 0o644))
	testutil.Must(t, os.WriteFile(dir+"/exact", make([]byte, 100), 0o644))
	for name, target := range map[string]string{
		"relative": "etc/passwd", "absolute": "/etc/passwd", "up": "../../../etc/passwd",
		"escape": "../secret", "escapeabs": outside + "/secret", "self": "self", "dir": "/etc", "magic": "/proc/self/root/etc/passwd",
		"etc/sub/up": "../../../../etc/passwd", "tozero": "/zero",
	} {
		testutil.Must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	cases := []struct {
		path string
		want string
		err  error
	}{
		{"etc/passwd", "root", nil},
		{"/etc/passwd", "root", nil},
		{"../../etc/passwd", "root", nil},
		{"relative", "root", nil},
		{"absolute", "root", nil},
		{"up", "root", nil},
		{"etc/sub/up", "root", nil},
		{"dir/passwd", "root", nil},
		{"exact", string(make([]byte, 100)), nil},
		{"escape", "", fs.ErrNotExist},
		{"escapeabs", "", fs.ErrNotExist},
		{"../secret", "", fs.ErrNotExist},
		{"none", "", fs.ErrNotExist},
		{"magic", "", fs.ErrNotExist},
		{"self", "", unix.ELOOP},
		{"etc", "", ErrNotRegular},
		{"", "", ErrNotRegular},
		{"fifo", "", ErrNotRegular},
		{"zero", "", ErrNotRegular},
		{"tozero", "", ErrNotRegular},
		{"large", "", ErrTooLarge},
		{"etc/passwd/x", "", unix.ENOTDIR},
		{"nul\x00", "", unix.EINVAL},
	}
	for _, c := range cases {
		data, err := ReadFile(root, c.path, 100)
		if string(data) != c.want || !errors.Is(err, c.err) {
			t.Errorf("%q: %q, %v; want %q, %v", c.path, data, err, c.want, c.err)
		}
	}
}

// Magic links are refused even if /proc is inside the root. A magic link was the working directory
// of CVE-2024-21626.
func TestMagicLinksAreRefused(t *testing.T) {
	root, err := OpenRoot("/")
	testutil.Must(t, err)
	defer root.Close()
	for _, path := range []string{"/proc/self/cwd", "/proc/self/root/etc", "/proc/self/fd/0"} {
		if f, err := Open(root, path, unix.O_PATH, 0); !errors.Is(err, unix.ELOOP) {
			t.Errorf("%s: %v, %v", path, f, err)
		}
	}
}

func TestOpen(t *testing.T) {
	root, dir, outside := newRoot(t)
	f, err := Open(root, "new", unix.O_CREAT|unix.O_WRONLY|unix.O_EXCL, 0o600)
	testutil.Must(t, err)
	defer f.Close()
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
	testutil.Must(t, err)
	if flags&unix.FD_CLOEXEC == 0 {
		t.Error("not close-on-exec")
	}
	testutil.Must(t, os.Symlink("../secret", dir+"/link"))
	if _, err := Open(root, "link", unix.O_CREAT|unix.O_WRONLY, 0o600); err != nil {
		t.Errorf("create through a symlink: %v", err)
	}
	if _, err := os.Stat(dir + "/secret"); err != nil {
		t.Errorf("the target is not inside: %v", err)
	}
	if data, _ := os.ReadFile(outside + "/secret"); string(data) != "secret" {
		t.Errorf("outside was changed: %q", data)
	}
	testutil.Must(t, unix.Mkfifo(dir+"/fifo", 0o644))
	if f, err := Open(root, "fifo", unix.O_RDONLY, 0); err != nil { // returns at once
		t.Error(err)
	} else {
		f.Close()
	}
}

func TestMkdirAll(t *testing.T) {
	cases := []struct {
		name  string
		links map[string]string
		path  string
		want  string
		made  []string
		err   error
	}{
		{"plain", nil, "a/b/c", "a/b/c", []string{"a", "a/b", "a/b/c"}, nil},
		{"root", nil, "", "", nil, nil},
		{"slashes", nil, "//a/./b//", "a/b", []string{"a", "a/b"}, nil},
		{"above root", nil, "../../a", "a", []string{"a"}, nil},
		{"dangling", map[string]string{"l": "x/y"}, "l/z", "x/y/z", []string{"x", "x/y", "x/y/z"}, nil},
		{"dangling absolute", map[string]string{"l": "/x"}, "l/z", "x/z", []string{"x", "x/z"}, nil},
		{"escaping", map[string]string{"l": "../../../x"}, "l/z", "x/z", []string{"x", "x/z"}, nil},
		{"chain", map[string]string{"l": "m", "m": "n"}, "l", "n", []string{"n"}, nil},
		{"up through a link", map[string]string{"l": "x/y"}, "l/../z", "x/z", []string{"x", "x/y", "x/z"}, nil},
		{"loop", map[string]string{"l": "m", "m": "l"}, "l/x", "", nil, unix.ELOOP},
		{"file", map[string]string{"l": "file"}, "l/x", "", nil, unix.ENOTDIR},
		{"long", nil, strings.Repeat("x", 256), "", nil, unix.ENAMETOOLONG},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			root, dir, outside := newRoot(t)
			testutil.Must(t, os.WriteFile(dir+"/file", nil, 0o644))
			for name, target := range c.links {
				testutil.Must(t, os.Symlink(target, filepath.Join(dir, name)))
			}
			var made []string
			m := Maker{Perm: 0o1757, Made: func(d *Dir) error { made = append(made, d.Path()); return nil }}
			d, err := m.MkdirAll(root, c.path)
			if !errors.Is(err, c.err) || !slices.Equal(made, c.made) {
				t.Fatalf("made %q, %v; want %q, %v", made, err, c.made, c.err)
			}
			if entries, _ := os.ReadDir(outside); len(entries) != 2 {
				t.Errorf("outside: %v", entries)
			}
			if err != nil {
				return
			}
			defer d.Close()
			if d.Path() != c.want {
				t.Errorf("path %q, want %q", d.Path(), c.want)
			}
			if len(c.made) == 0 {
				return
			}
			st, err := d.Stat("")
			testutil.Must(t, err)
			if st.Mode&0o7777 != 0o1757 {
				t.Errorf("mode %o", st.Mode&0o7777)
			}
		})
	}
}

func TestResolveDir(t *testing.T) {
	root, dir, outside := newRoot(t)
	testutil.Must(t, os.MkdirAll(dir+"/a/b", 0o755))
	for name, target := range map[string]string{"l": "a/b", "a/b/up": "/a/../l/..", "out": "../..", "loop": "loop", "dangling": "none"} {
		testutil.Must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	cases := []struct {
		path, want string
		err        error
	}{
		{"l", "a/b", nil},
		{"l/up/b", "a/b", nil},
		{"out/l/..", "a", nil},
		{"", "", nil},
		{"loop", "", unix.ELOOP},
		{"dangling", "", fs.ErrNotExist},
		{"a/c", "", fs.ErrNotExist},
	}
	for _, c := range cases {
		d, err := Maker{}.ResolveDir(root, c.path)
		if !errors.Is(err, c.err) {
			t.Errorf("%q: %v, want %v", c.path, err, c.err)
		}
		if err != nil {
			continue
		}
		if d.Path() != c.want {
			t.Errorf("%q leads to %q, want %q", c.path, d.Path(), c.want)
		}
		names, err := d.Names()
		testutil.Must(t, err)
		entries, err := os.ReadDir(filepath.Join(dir, c.want))
		testutil.Must(t, err)
		if len(names) != len(entries) {
			t.Errorf("%q: names %q", c.path, names)
		}
		testutil.Must(t, d.Close())
	}
	if entries, _ := os.ReadDir(outside); len(entries) != 2 {
		t.Errorf("outside: %v", entries)
	}
}

func TestResolve(t *testing.T) {
	root, dir, _ := newRoot(t)
	testutil.Must(t, errors.Join(os.MkdirAll(dir+"/a/b", 0o755), os.WriteFile(dir+"/file", nil, 0o644)))
	for name, target := range map[string]string{
		"l": "a/b", "out": "../../etc", "loop": "loop", "dangling": "/none/x", "back": "none/../a", "tofile": "file",
	} {
		testutil.Must(t, os.Symlink(target, filepath.Join(dir, name)))
	}
	for _, c := range []struct {
		path, want string
		err        error
	}{
		{"", "", nil},
		{"l", "a/b", nil},
		{"/l/new/./y/", "a/b/new/y", nil},
		{"out", "etc", nil},
		{"out/passwd", "etc/passwd", nil},
		{"dangling/y", "none/x/y", nil},
		{"loop", "", unix.ELOOP},
		{"back", "", fs.ErrNotExist},
		{"file", "", unix.ENOTDIR},
		{"tofile/x", "", unix.ENOTDIR},
	} {
		if got, err := (Maker{}).Resolve(root, c.path); got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%q leads to %q, %v; want %q, %v", c.path, got, err, c.want, c.err)
		}
	}
	limited := Maker{Step: func(int) error { return unix.EDQUOT }}
	if _, err := limited.Resolve(root, "l"); !errors.Is(err, unix.EDQUOT) {
		t.Errorf("with no step left: %v", err)
	}
}

func TestMakerBlocked(t *testing.T) {
	root, dir, _ := newRoot(t)
	testutil.Must(t, os.WriteFile(dir+"/file", nil, 0o644))
	refuse := Maker{Perm: 0o755, Blocked: func(*Dir, string, *unix.Stat_t) error { return unix.EBUSY }}
	if _, err := refuse.MkdirAll(root, "file/a"); !errors.Is(err, unix.EBUSY) {
		t.Errorf("refused: %v", err)
	}
	kept := Maker{Perm: 0o755, Blocked: func(*Dir, string, *unix.Stat_t) error { return nil }}
	if _, err := kept.MkdirAll(root, "file/a"); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("with the entry not removed: %v", err)
	}
	remove := Maker{Perm: 0o755, Blocked: func(d *Dir, name string, st *unix.Stat_t) error { return d.Unlink(name) }}
	d, err := remove.MkdirAll(root, "file/a")
	testutil.Must(t, err)
	defer d.Close()
	if d.Path() != "file/a" {
		t.Errorf("path %q", d.Path())
	}
}

func TestOpenDirFollowsNothing(t *testing.T) {
	root, dir, _ := newRoot(t)
	testutil.Must(t, os.MkdirAll(dir+"/a/b", 0o755))
	testutil.Must(t, os.Symlink("a", dir+"/l"))
	if _, err := OpenDir(root, "l/b"); !errors.Is(err, unix.ELOOP) {
		t.Errorf("symlink: %v", err)
	}
	if _, err := OpenDir(root, "a/c"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	d, err := OpenDir(root, "/a/./b")
	testutil.Must(t, err)
	if d.Path() != "a/b" {
		t.Errorf("path %q", d.Path())
	}
	testutil.Must(t, d.Close())
}

// Every method rejects an argument that is not a single name.
func TestMethodsRejectPaths(t *testing.T) {
	root, _, _ := newRoot(t)
	d, err := OpenDir(root, "")
	testutil.Must(t, err)
	defer d.Close()
	var ts unix.Timespec
	calls := map[string]func(name string) error{
		"Create":    func(n string) error { _, err := d.Create(n, 0o600); return err },
		"Open":      func(n string) error { _, err := d.Open(n); return err },
		"Mkdir":     func(n string) error { return d.Mkdir(n, 0o700) },
		"Mknod":     func(n string) error { return d.Mknod(n, unix.S_IFIFO, 0) },
		"Symlink":   func(n string) error { return d.Symlink("x", n) },
		"Link":      func(n string) error { return d.Link(d, "x", n) },
		"LinkOld":   func(n string) error { return d.Link(d, n, "x") },
		"Unlink":    d.Unlink,
		"RemoveAll": d.RemoveAll,
		"Chown":     func(n string) error { return d.Chown(n+"/", 0, 0) },
		"ChmodNode": func(n string) error { return d.ChmodNode(n, 0) },
		"Readlink":  func(n string) error { _, err := d.Readlink(n); return err },
		"Stat":      func(n string) error { _, err := d.Stat(n + "/"); return err },
		"Utimes":    func(n string) error { return d.Utimes(n+"/", ts, ts) },
		"Setxattr":  func(n string) error { return d.Setxattr(n+"/", "user.a", nil) },
	}
	for call, f := range calls {
		for _, name := range []string{"", ".", "..", "../secret", "a/b", "/", "nul\x00"} {
			if err := f(name); !errors.Is(err, unix.EINVAL) {
				t.Errorf("%s(%q): %v", call, name, err)
			}
		}
	}
}

// Methods that take a name act on a symlink of that name, never on its target.
func TestMethodsDoNotFollowSymlinks(t *testing.T) {
	testutil.NeedRoot(t)
	root, dir, outside := newRoot(t)
	testutil.Must(t, os.Symlink("../secret", dir+"/l"))
	testutil.Must(t, os.Symlink("..", dir+"/ldir"))
	d, err := OpenDir(root, "")
	testutil.Must(t, err)
	defer d.Close()
	ts := unix.Timespec{Sec: 1000}
	testutil.Must(t, d.Chown("l", 7, 8))
	testutil.Must(t, d.Utimes("l", ts, ts))
	testutil.Must(t, d.Setxattr("l", "trusted.test", []byte("v")))
	testutil.Must(t, d.Link(d, "l", "hard"))
	if _, err := d.Create("l", 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create over a symlink: %v", err)
	}
	if err := d.ChmodNode("l", 0o777); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("chmod of a symlink: %v", err)
	}
	if _, err := d.Open("ldir"); !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
		t.Errorf("open of a symlink: %v", err)
	}
	testutil.Must(t, d.RemoveAll("ldir"))
	st, err := d.Stat("hard")
	testutil.Must(t, err)
	if st.Mode&unix.S_IFMT != unix.S_IFLNK || st.Uid != 7 || st.Gid != 8 || st.Mtim.Sec != 1000 {
		t.Errorf("symlink: %+v", st)
	}
	if v, err := d.Getxattr("hard", "trusted.test"); err != nil || string(v) != "v" {
		t.Errorf("attribute: %q %v", v, err)
	}
	var secret unix.Stat_t
	testutil.Must(t, unix.Stat(outside+"/secret", &secret))
	if secret.Uid != 0 || secret.Mode&0o777 != 0o600 || secret.Mtim.Sec == 1000 || secret.Nlink != 1 {
		t.Errorf("the target was changed: %+v", secret)
	}
}

func TestEmptyNameMeansDirectory(t *testing.T) {
	testutil.NeedRoot(t)
	root, dir, _ := newRoot(t)
	testutil.Must(t, os.Mkdir(dir+"/d", 0o700))
	d, err := OpenDir(root, "d")
	testutil.Must(t, err)
	defer d.Close()
	testutil.Must(t, d.Chown("", 3, 1<<32-2))
	testutil.Must(t, d.Chmod(0o2751))
	testutil.Must(t, d.Setxattr("", "trusted.a", []byte("1")))
	testutil.Must(t, d.Utimes("", unix.Timespec{Sec: 5}, unix.Timespec{Sec: 6, Nsec: 7}))
	st, err := d.Stat("")
	testutil.Must(t, err)
	if st.Mode != unix.S_IFDIR|0o2751 || st.Uid != 3 || st.Gid != 1<<32-2 || st.Mtim.Sec != 6 || st.Mtim.Nsec != 7 || st.Atim.Sec != 5 {
		t.Errorf("%+v", st)
	}
	if names, err := d.Listxattr(""); err != nil || !slices.Equal(names, []string{"trusted.a"}) {
		t.Errorf("attributes %q %v", names, err)
	}
	if _, err := d.Getxattr("", "trusted.b"); !errors.Is(err, unix.ENODATA) {
		t.Errorf("missing attribute: %v", err)
	}
	if err := d.Chown("x", ^uint32(0), 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("chown to -1: %v", err)
	}
}

func TestRemoveAll(t *testing.T) {
	root, dir, outside := newRoot(t)
	deep := strings.Repeat("d/", 300)
	testutil.Must(t, os.MkdirAll(dir+"/t/"+deep, 0o755))
	for i := range 3000 {
		testutil.Must(t, os.WriteFile(filepath.Join(dir, "t", "d", "f"+strings.Repeat("x", i%50)+string(rune('a'+i%26))), nil, 0o644))
	}
	testutil.Must(t, os.Symlink("../../secret", dir+"/t/l"))
	testutil.Must(t, os.Symlink("../..", dir+"/t/d/ldir"))
	testutil.Must(t, os.WriteFile(dir+"/file", nil, 0o644))
	d, err := OpenDir(root, "")
	testutil.Must(t, err)
	defer d.Close()
	for _, name := range []string{"t", "file", "none"} {
		if err := d.RemoveAll(name); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v %v", left, err)
	}
	if data, _ := os.ReadFile(outside + "/secret"); string(data) != "secret" {
		t.Error("removed outside the root")
	}
}

// A loop of renames interferes with the resolution of "..". The result must stay inside.
func TestResolutionStaysInsideDuringRenames(t *testing.T) {
	root, dir, outside := newRoot(t)
	testutil.Must(t, os.MkdirAll(dir+"/a/b/c", 0o755))
	testutil.Must(t, os.WriteFile(dir+"/f", []byte("in"), 0o644))
	testutil.Must(t, os.WriteFile(outside+"/f", []byte("out"), 0o644))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				os.Rename(dir+"/a/b", dir+"/b")
				os.Rename(dir+"/b", dir+"/a/b")
			}
		}
	}()
	for range 2000 {
		data, err := ReadFile(root, "a/b/c/../../../../../f", 10)
		if err == nil && string(data) != "in" {
			t.Fatalf("read %q", data)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
	}
	close(stop)
	<-done
}

func FuzzMkdirAll(f *testing.F) {
	for _, s := range []string{"a/b", "l/../x", "../..", "l/l/l", "/abs/l", ".", "a//b/./c"} {
		f.Add(s, "x/y")
	}
	f.Add("l/z", "../../..")
	f.Add("l/z", "/l")
	f.Fuzz(func(t *testing.T, path, link string) {
		root, dir, outside := newRoot(t)
		if os.Symlink(link, dir+"/l") != nil {
			t.Skip("the kernel refuses such a symlink")
		}
		d, err := Maker{Perm: 0o755}.MkdirAll(root, path)
		entries, _ := os.ReadDir(outside)
		if len(entries) != 2 {
			t.Fatalf("outside: %v", entries)
		}
		if err != nil {
			return
		}
		defer d.Close()
		again, err := OpenDir(root, d.Path())
		if err != nil {
			t.Fatalf("%q is not free of symlinks: %v", d.Path(), err)
		}
		again.Close()
	})
}

func TestReadlinkOfOtherFileFails(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	root, err := OpenRoot(dir)
	testutil.Must(t, err)
	defer root.Close()
	d, err := OpenDir(root, "")
	testutil.Must(t, err)
	defer d.Close()
	if target, err := d.Readlink("file"); target != "" || !errors.Is(err, unix.EINVAL) {
		t.Errorf("%q, %v", target, err)
	}
	if _, err := d.OpenRegular("file", unix.O_RDONLY); err != nil {
		t.Error(err)
	}
	testutil.Must(t, os.Symlink("file", filepath.Join(dir, "link")))
	if _, err := d.OpenRegular("link", unix.O_RDONLY); !errors.Is(err, ErrNotRegular) {
		t.Error(err)
	}
}
