package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack"
	"berth/internal/testutil"
)

// apply unpacks a tar with the driver alone and returns where.
func apply(t testing.TB, data []byte) (string, unpack.Contents) {
	t.Helper()
	work := t.TempDir()
	c, err := NewDirectory(unpack.Layer).Apply(context.Background(), work, bytes.NewReader(data), unpack.Job{Algorithm: digest.SHA256})
	testutil.Must(t, err)
	checkTree(t, filepath.Join(work, treeDir), c.Usage)
	return filepath.Join(work, treeDir), c.Contents
}

// attributes describes all properties of a file that a tar contains. Inodes are numbered in the
// order of names.
func attributes(t testing.TB, path string, inodes map[uint64]string) string {
	t.Helper()
	var st unix.Stat_t
	testutil.Must(t, unix.Lstat(path, &st))
	s := describe(t, path)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if _, ok := inodes[st.Ino]; !ok {
			inodes[st.Ino] = filepath.Base(path)
		}
		s += fmt.Sprintf(" links %d of %s", st.Nlink, inodes[st.Ino])
	}
	return s + fmt.Sprintf(" mtime %d.%09d %v", st.Mtim.Sec, st.Mtim.Nsec, xattrs(t, path))
}

func xattrs(t testing.TB, path string) map[string]string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	testutil.Must(t, err)
	all := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		testutil.Must(t, err)
		all[name] = string(value[:n])
	}
	return all
}

func fullTree(t testing.TB, root string) map[string]string {
	t.Helper()
	got, inodes := map[string]string{}, map[uint64]string{}
	testutil.Must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			t.Fatalf("%q: %v", path, err)
		}
		rel, err := filepath.Rel(root, path)
		testutil.Must(t, err)
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			return nil // overlayfs lists a whiteout of nothing in a directory that only one layer has
		}
		got[rel] = attributes(t, path, inodes)
		return nil
	}))
	return got
}

func compareTrees(t testing.TB, got, want map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] != want[name] {
			t.Errorf("%q\n is %s\nnot %s", name, clip(got[name]), clip(want[name]))
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%q should not be there", name)
		}
	}
}

func clip(s string) string { return s[:min(len(s), 300)] }

// corpus makes a tree of everything tar knows, the same for each seed.
func corpus(t testing.TB, root string, seed uint64) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	testutil.Must(t, os.MkdirAll(root, 0o755))
	dirs, files := []string{root}, []string{}
	for i := range 150 {
		parent := dirs[r.IntN(len(dirs))]
		path := filepath.Join(parent, name(r, i))
		switch r.IntN(9) {
		case 0, 1:
			testutil.Must(t, os.Mkdir(path, 0o755))
			dirs = append(dirs, path)
		case 2:
			testutil.Must(t, os.Symlink(strings.Repeat("../", r.IntN(4))+name(r, i), path))
		case 3:
			if len(files) > 0 {
				testutil.Must(t, os.Link(files[r.IntN(len(files))], path))
			}
		case 4:
			types := []uint32{unix.S_IFIFO, unix.S_IFCHR, unix.S_IFBLK}
			testutil.Must(t, unix.Mknod(path, types[r.IntN(3)]|0o600, int(unix.Mkdev(uint32(r.IntN(200)+1), uint32(r.IntN(200))))))
		default:
			testutil.Must(t, os.WriteFile(path, content(r), 0o600))
			files = append(files, path)
		}
	}
	testutil.Must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		testutil.Must(t, err)
		dress(t, r, path, d)
		return nil
	}))
	for _, d := range dirs { // again: the walk does not change them, making files did
		setTime(t, r, d)
	}
}

func name(r *rand.Rand, i int) string {
	kinds := []string{"file%d", "a rather long name of %d" + strings.Repeat("-long", r.IntN(25)), "sp ace%d", "ütf%d", "new\nline%d", "%d\\\"'"}
	return fmt.Sprintf(kinds[r.IntN(len(kinds))], i)
}

func content(r *rand.Rand) []byte {
	b := make([]byte, []int{0, 1, 511, 512, 513, 4096, 100_000, 300_000}[r.IntN(8)])
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// dress gives a file an owner, a mode, attributes and a time.
func dress(t testing.TB, r *rand.Rand, path string, d fs.DirEntry) {
	t.Helper()
	testutil.Must(t, os.Lchown(path, r.IntN(2000), r.IntN(3)*100_000))
	if d.Type()&fs.ModeSymlink == 0 {
		modes := []uint32{0o644, 0o755, 0o600, 0, 0o4755, 0o2755, 0o6711, 0o1777, 0o777}
		testutil.Must(t, unix.Chmod(path, modes[r.IntN(len(modes))]))
	}
	if (d.IsDir() || d.Type().IsRegular()) && r.IntN(3) == 0 {
		testutil.Must(t, unix.Lsetxattr(path, "user.test", []byte("value\x00\xff\n"), 0))
		testutil.Must(t, unix.Lsetxattr(path, "user.empty", nil, 0))
	}
	if d.Type().IsRegular() && r.IntN(4) == 0 {
		testutil.Must(t, unix.Lsetxattr(path, "security.capability", capability(), 0))
	}
	setTime(t, r, path)
}

// capability is cap_net_raw=ep, vfs_cap_data of revision 2.
func capability() []byte {
	b := make([]byte, 20)
	binary.LittleEndian.PutUint32(b[0:], 0x02000001)
	binary.LittleEndian.PutUint32(b[4:], 1<<13)
	return b
}

func setTime(t testing.TB, r *rand.Rand, path string) {
	t.Helper()
	ts := unix.Timespec{Sec: int64(r.Int32()), Nsec: int64(r.IntN(1e9))}
	testutil.Must(t, unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
}

// The system's tar and the driver unpack every archive that tar makes to the same files.
func TestCreateMatchesTar(t *testing.T) {
	formats := map[string][]string{
		"pax":       {"--format=pax", "--xattrs", "--xattrs-include=*"},
		"gnu":       {"--format=gnu"},
		"oldgnu":    {"--format=oldgnu"},
		"sparse":    {"--format=gnu", "--sparse"},
		"sparse0.0": {"--format=pax", "--sparse", "--sparse-version=0.0"},
		"sparse0.1": {"--format=pax", "--sparse", "--sparse-version=0.1"},
		"sparse1.0": {"--format=pax", "--sparse", "--sparse-version=1.0"},
	}
	for _, format := range slices.Sorted(maps.Keys(formats)) {
		t.Run(format, func(t *testing.T) {
			work := t.TempDir()
			corpus(t, work+"/src", uint64(len(format)))
			if strings.HasPrefix(format, "sparse") {
				sparseFiles(t, work+"/src")
			}
			args := append([]string{"-C", work + "/src", "--numeric-owner", "-c", "."}, formats[format]...)
			data, err := exec.Command("tar", args...).Output()
			testutil.Must(t, err)
			testutil.Must(t, os.Mkdir(work+"/want", 0o755))
			x := exec.Command("tar", "-C", work+"/want", "--numeric-owner", "--same-owner", "-p", "--xattrs", "--xattrs-include=*", "-x")
			x.Stdin = bytes.NewReader(data)
			if out, err := x.CombinedOutput(); err != nil {
				t.Fatalf("tar: %v\n%s", err, out)
			}
			got, _ := apply(t, data)
			compareTrees(t, fullTree(t, got), fullTree(t, work+"/want"))
		})
	}
}

// sparseFiles adds files with holes at the start, in the middle, at the end, and nothing else.
func sparseFiles(t testing.TB, dir string) {
	t.Helper()
	for name, data := range map[string][]int64{"start": {8 << 20}, "middle": {0, 5 << 20}, "end": {0}, "all": nil, "odd": {12345, 3<<20 + 1}} {
		f, err := os.Create(filepath.Join(dir, "sparse-"+name))
		testutil.Must(t, err)
		for _, offset := range data {
			_, err := f.WriteAt([]byte(strings.Repeat("data", 5000)), offset)
			testutil.Must(t, err)
		}
		testutil.Must(t, f.Truncate(9<<20+17))
		testutil.Must(t, f.Close())
	}
}

// Holes of sparse files survive.
func TestSparse(t *testing.T) {
	for _, format := range []string{"--format=gnu", "--sparse-version=0.0", "--sparse-version=0.1", "--sparse-version=1.0"} {
		t.Run(format, func(t *testing.T) {
			src := t.TempDir()
			sparseFiles(t, src)
			args := []string{"-C", src, "--sparse", "-c", "."}
			if format != "--format=gnu" {
				args = append(args, "--format=pax")
			}
			data, err := exec.Command("tar", append(args, format)...).Output()
			testutil.Must(t, err)
			got, contents := apply(t, data)
			for _, e := range entries(t, src) {
				want, err := os.ReadFile(filepath.Join(src, e))
				testutil.Must(t, err)
				have, err := os.ReadFile(filepath.Join(got, e))
				testutil.Must(t, err)
				if !bytes.Equal(have, want) {
					t.Errorf("%s differs", e)
				}
				var st unix.Stat_t
				testutil.Must(t, unix.Stat(filepath.Join(got, e), &st))
				if st.Blocks*512 > 128<<10 {
					t.Errorf("%s takes %d bytes", e, st.Blocks*512)
				}
			}
			if contents.Bytes > 512<<10 {
				t.Errorf("counted %d bytes", contents.Bytes)
			}
		})
	}
}

func TestXattrs(t *testing.T) {
	acl := make([]byte, 4, 28) // user::rw- group::r-- other::r--
	binary.LittleEndian.PutUint32(acl, 2)
	for _, e := range [][2]uint16{{0x01, 6}, {0x04, 4}, {0x20, 4}} {
		acl = binary.LittleEndian.AppendUint16(acl, e[0])
		acl = binary.LittleEndian.AppendUint16(acl, e[1])
		acl = binary.LittleEndian.AppendUint32(acl, 1<<32-1)
	}
	all := func(h header) header {
		for name, value := range map[string]string{
			"user.a": "1", "user.empty": "", "user.bin\xff": "\x00\n=\xff",
			"security.capability": string(capability()), "system.posix_acl_access": string(acl),
			"trusted.overlay.opaque": "y", "trusted.overlay.redirect": "/etc", "trusted.overlay.metacopy": "", "trusted.overlay.whiteout": "",
			"trusted.overlay.overlay.opaque": "y", "user.overlay.opaque": "y", "user.overlay.whiteout": "y", "user.overlay.redirect": "/etc",
			"trusted.other": "1", "security.selinux": "system_u:object_r:etc_t:s0", "security.ima": "\x01x", "security.evm": "\x02x",
			"security.SMACK64": "_", "security.apparmor": "x", "security.other": "x", "system.other": "1", "nonsense": "1", "": "1",
		} {
			h = h.xattr(name, value)
		}
		return h
	}
	got, contents := apply(t, makeTar(t, all(file("f", "1").owned(5, 5)), all(dir("d", 0o755)), all(dir(".", 0o755)), all(symlink("l", "f")), all(device(tar.TypeFifo, "p", 0, 0))))
	kept := []string{"security.capability", "user.a", "user.bin\xff", "user.empty"}
	want := map[string][]string{"f": kept, "d": kept, ".": kept, "l": {"security.capability"}, "p": {"security.capability"}}
	for name, attrs := range want {
		have := xattrs(t, filepath.Join(got, name))
		// This ACL has the same content as the mode, so the filesystem stores it in the mode.
		delete(have, "system.posix_acl_access")
		if names := slices.Sorted(maps.Keys(have)); !slices.Equal(names, attrs) {
			t.Errorf("%s has %q, want %q", name, names, attrs)
		}
		if v := have["user.bin\xff"]; v != "\x00\n=\xff" && len(attrs) > 1 {
			t.Errorf("%s: value %q", name, v)
		}
	}
	// user.* is neither for a symlink nor for a FIFO, and ACLs are not for a symlink.
	if contents.Unsupported != 7 {
		t.Errorf("%d attributes not supported, want 7", contents.Unsupported)
	}
}

// A program with file capabilities and an owner other than root keeps both.
func TestFileCapability(t *testing.T) {
	got, _ := apply(t, makeTar(t, mode(file("ping", "x").owned(1, 2), 0o4755).xattr("security.capability", string(capability()))))
	if have := xattrs(t, got+"/ping"); have["security.capability"] != string(capability()) {
		t.Errorf("attributes %q", have)
	}
	if d := describe(t, got+"/ping"); d != `f 4755 1:2 "x"` {
		t.Error(d)
	}
}

func TestTimes(t *testing.T) {
	at := func(h header, tm time.Time) header { h.ModTime = tm; h.Format = tar.FormatPAX; return h }
	precise := time.Unix(1_234_567_890, 123_456_789)
	early := time.Unix(-1000, 0)
	accessed := at(file("d/accessed", ""), precise)
	accessed.AccessTime = time.Unix(1_500_000_000, 5)
	got, _ := apply(t, makeTar(t,
		at(dir("d", 0o755), precise), at(file("d/f", "1"), precise), at(symlink("d/l", "f"), precise), at(device(tar.TypeFifo, "d/p", 0, 0), precise),
		at(file("early", ""), early), file("d/sub/implied", ""), accessed, at(dir("removed", 0o755), precise), file("removed", ""),
		at(dir("far", 0o755), time.Unix(1<<40, 0)),
	))
	mtime := func(name string) time.Time {
		info, err := os.Lstat(filepath.Join(got, name))
		testutil.Must(t, err)
		return info.ModTime()
	}
	for name, want := range map[string]time.Time{"d": precise, "d/f": precise, "d/l": precise, "d/p": precise, "early": early, "d/sub": time.Unix(0, 0), ".": time.Unix(0, 0), "removed": testTime} {
		if got := mtime(name); !got.Equal(want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	info, err := os.Lstat(got + "/d/accessed")
	testutil.Must(t, err)
	if st := info.Sys().(*syscall.Stat_t); st.Atim.Sec != 1_500_000_000 || st.Atim.Nsec != 5 {
		t.Errorf("access time %v", st.Atim)
	}
	if !mtime("far").After(time.Unix(1<<33, 0)) { // the latest time that the filesystem supports, not one that wrapped around
		t.Errorf("far: %v", mtime("far"))
	}
}

// A hard link into a layer below is one more name of the file there: nothing is copied.
func TestLinkBelowIsLink(t *testing.T) {
	s := openStore(t, t.TempDir())
	bottom := create(t, s, makeTar(t, file("big", strings.Repeat("x", 1<<20)).xattr("user.a", "1")))
	top := create(t, s, makeTar(t, dir("d", 0o755), hardlink("d/link", "big")))
	root := mounted(t, s, bottom, top)
	var a, b unix.Stat_t
	testutil.Must(t, unix.Stat(root+"/big", &a))
	testutil.Must(t, unix.Stat(root+"/d/link", &b))
	if a.Ino != b.Ino {
		t.Errorf("inodes %d and %d", a.Ino, b.Ino)
	}
	if j := s.joins.All(); len(j) != 1 || j[0].Usage != (Usage{Bytes: 2 * 4096, Inodes: 2}) {
		t.Errorf("joins %+v", j)
	}
	// A container that changes one changes neither layer.
	testutil.Must(t, os.WriteFile(root+"/d/link", []byte("changed"), 0o644))
	if d := describe(t, filepath.Join(s.layerDir(bottom), treeDir, "big")); !strings.Contains(d, "1048576 bytes") {
		t.Errorf("the layer was changed: %s", d)
	}
}

// The join of a layer on one base is not used on another.
func TestJoinsDiffer(t *testing.T) {
	s := openStore(t, t.TempDir())
	a := create(t, s, makeTar(t, dir("d", 0o711), file("f", "a")))
	b := create(t, s, makeTar(t, dir("d", 0o700), file("f", "b")))
	top := create(t, s, makeTar(t, file("d/x", "1"), hardlink("d/link", "f")))
	onA, onB := mounted(t, s, a, top), mounted(t, s, b, top)
	for path, want := range map[string]string{
		onA + "/d": "d 711 0:0", onB + "/d": "d 700 0:0", onA + "/d/link": `f 644 0:0 "a"`, onB + "/d/link": `f 644 0:0 "b"`,
	} {
		if got := describe(t, path); got != want {
			t.Errorf("%s is %s, want %s", path, got, want)
		}
	}
}

// A join does not change the times of directories under it.
func TestJoinTimes(t *testing.T) {
	s := openStore(t, t.TempDir())
	bottom := create(t, s, makeTar(t, dir("d", 0o711), file("f", "a")))
	top := create(t, s, makeTar(t, dir(".", 0o755), hardlink("d/link", "f")))
	root := mounted(t, s, bottom, top)
	info, err := os.Stat(root + "/d")
	testutil.Must(t, err)
	if !info.ModTime().Equal(testTime) {
		t.Errorf("mtime %v", info.ModTime())
	}
}

// A layer is the same wherever and whenever it is made.
func TestReproducible(t *testing.T) {
	data := makeTar(t, file("a/b/c", "1"), dir("d", 0o755), file("d/e", "2"), file("x/.wh.y", ""), symlink("s", "a"), file("s/z", "3"))
	one, _ := apply(t, data)
	two, _ := apply(t, data)
	a, b := fullTree(t, one), fullTree(t, two)
	for name := range a { // the time of a whiteout is not visible
		if strings.HasPrefix(a[name], "c 0 0:0 0:0") {
			delete(a, name)
			delete(b, name)
		}
	}
	compareTrees(t, a, b)
}

// Apply does not depend on the umask.
func TestUmask(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	got, _ := apply(t, makeTar(t, mode(file("f", "1"), 0o666), file("a/b/c", "1"), dir("d", 0o777), mode(device(tar.TypeFifo, "p", 0, 0), 0o666)))
	for name, want := range map[string]string{".": "d 755 0:0", "f": `f 666 0:0 "1"`, "a/b": "d 755 0:0", "d": "d 777 0:0", "p": "p 666 0:0"} {
		if d := describe(t, filepath.Join(got, name)); d != want {
			t.Errorf("%s is %s, want %s", name, d, want)
		}
	}
}

// No entry of an image leads out of the layer's directory.
func TestMaliciousTars(t *testing.T) {
	secret := func(outside string) string { return outside + "/secret" }
	outside := t.TempDir()
	testutil.Must(t, os.WriteFile(secret(outside), []byte("secret"), 0o600))
	testutil.Must(t, os.Mkdir(outside+"/dir", 0o700))
	before := fullTree(t, outside)
	up := strings.Repeat("../", 40)
	links := []string{outside, up + outside[1:], "/proc/self/root" + outside, "/proc/self/cwd", "/proc/self/fd/3", "/proc/1/root" + outside, "/../../../.." + outside}
	var tars [][]byte
	for _, l := range links {
		tars = append(tars,
			makeTar(t, symlink("l", l), file("l/secret", "owned"), file("l/new", "owned"), dir("l/dir", 0o777), file("l/dir/x", "owned")),
			makeTar(t, symlink("l", l), mode(dir("l", 0o777), 0o777)),
			makeTar(t, symlink("l", l), hardlink("stolen", "l/secret"), mode(file("stolen", "owned"), 0o777)),
			makeTar(t, symlink("l", l), file("l/.wh.secret", ""), file("l/.wh.dir", ""), file("l/.wh..wh..opq", "")),
			makeTar(t, symlink("l", l+"/secret"), file("l", "owned")),
			makeTar(t, symlink("l", l+"/secret"), hardlink("l2", "l"), mode(hardlink("l3", "l2"), 0o777), file("l2", "owned")),
			makeTar(t, symlink("a", "b"), symlink("b", l), symlink("a/s", "x"), device(tar.TypeChar, "a/null", 1, 3), device(tar.TypeChar, "a/secret", 0, 0)),
			makeTar(t, dir("d", 0o755), file("d/f", ""), symlink("d", l), file("d/secret", "owned"), dir("d/dir", 0o777)),
			makeTar(t, symlink("l", l), file("l/../secret", "owned"), file("l/../../secret", "owned")),
		)
	}
	for _, name := range []string{secret(outside), up + secret(outside), "/" + up + secret(outside), "./../x/../" + up + secret(outside)} {
		tars = append(tars,
			makeTar(t, file(name, "owned")),
			makeTar(t, symlink(name, "x")),
			makeTar(t, hardlink("x", name), file("x", "owned"), mode(file("x", ""), 0o777)),
			makeTar(t, hardlink(name, name)),
			makeTar(t, device(tar.TypeChar, name, 0, 0)),
			makeTar(t, file(filepath.Dir(name)+"/.wh.secret", ""), file(filepath.Dir(name)+"/.wh..wh..opq", "")),
			makeTar(t, dir(filepath.Dir(name), 0o777)),
		)
	}
	s := openStore(t, t.TempDir())
	bottom := create(t, s, makeTar(t, base()...))
	for i, data := range tars {
		id := createMalicious(t, s, data)
		if id == "" {
			continue
		}
		if _, err := s.Stack(context.Background(), chainOf(bottom, id)); err != nil && !strings.Contains(err.Error(), "no such file") {
			t.Errorf("tar %d: %v", i, err)
		}
		if t.Failed() {
			break
		}
	}
	compareTrees(t, fullTree(t, outside), before)
}
