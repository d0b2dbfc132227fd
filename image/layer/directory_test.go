package layer

import (
	"archive/tar"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/internal/diskusage"
	"berth/internal/testutil"
)

func unmount(path string) error { return unix.Unmount(path, 0) }

func describe(t testing.TB, path string) string {
	t.Helper()
	var st unix.Stat_t
	testutil.Must(t, unix.Lstat(path, &st))
	s := fmt.Sprintf("%o %d:%d", st.Mode&0o7777, st.Uid, st.Gid)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "d " + s
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		testutil.Must(t, err)
		return fmt.Sprintf("l %d:%d %s", st.Uid, st.Gid, target)
	case unix.S_IFREG:
		content, err := os.ReadFile(path)
		testutil.Must(t, err)
		if len(content) > 100 {
			return fmt.Sprintf("f %s %d bytes %s", s, len(content), digest.FromBytes(content))
		}
		return fmt.Sprintf("f %s %q", s, content)
	case unix.S_IFCHR:
		return fmt.Sprintf("c %s %d:%d", s, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFBLK:
		return fmt.Sprintf("b %s %d:%d", s, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFIFO:
		return "p " + s
	}
	return "? " + s
}

// base is a lower layer for the cases below.
func base() []header {
	return []header{
		dir(".", 0o555).owned(7, 8),
		dir("etc", 0o755), file("etc/passwd", "root"), file("etc/group", "wheel"), file("etc/shadow", "x").owned(0, 42),
		dir("tmp", 0o1777),
		dir("var", 0o755), dir("var/lib", 0o700).owned(5, 6).xattr("user.label", "lib"), file("var/lib/data", "data"),
		dir("usr", 0o755), dir("usr/bin", 0o755), file("usr/bin/tool", "tool"), symlink("bin", "usr/bin"), symlink("usr/bin/alias", "tool"),
	}
}

func TestLayers(t *testing.T) {
	const d755 = "d 755 0:0"
	cases := []struct {
		name   string
		layers [][]header // above base
		want   map[string]string
		gone   []string
	}{
		{"plain", [][]header{{dir("a", 0o750).owned(1, 2), file("a/f", "new"), file("etc/passwd", "changed")}},
			map[string]string{"a": "d 750 1:2", "a/f": `f 644 0:0 "new"`, "etc/passwd": `f 644 0:0 "changed"`, "etc/group": `f 644 0:0 "wheel"`}, nil},
		{"whiteout", [][]header{{dir("etc", 0o755), file("etc/.wh.passwd", "")}},
			map[string]string{"etc/group": `f 644 0:0 "wheel"`}, []string{"etc/passwd", "etc/.wh.passwd"}},
		{"whiteout of a directory", [][]header{{file(".wh.var", "")}}, nil, []string{"var"}},
		{"whiteout, then the name again", [][]header{{file(".wh.etc", "")}, {dir("etc", 0o755), file("etc/new", "1")}},
			map[string]string{"etc/new": `f 644 0:0 "1"`}, []string{"etc/passwd"}},
		{"opaque", [][]header{{dir("etc", 0o711), file("etc/.wh..wh..opq", ""), file("etc/new", "1")}},
			map[string]string{"etc": "d 711 0:0", "etc/new": `f 644 0:0 "1"`}, []string{"etc/passwd", "etc/.wh..wh..opq"}},
		{"opaque after content", [][]header{{dir("etc", 0o755), file("etc/new", "1"), file("etc/.wh..wh..opq", "")}},
			map[string]string{"etc/new": `f 644 0:0 "1"`}, []string{"etc/passwd"}},
		{"opaque, directory not listed", [][]header{{file("var/lib/.wh..wh..opq", "")}},
			map[string]string{"var/lib": "d 700 5:6"}, []string{"var/lib/data"}},
		{"opaque root", [][]header{{file("new", "1"), file(".wh..wh..opq", "")}},
			map[string]string{"new": `f 644 0:0 "1"`, ".": "d 555 7:8"}, []string{"etc", "var", "bin"}},
		{"opaque root, directories not listed", [][]header{{file(".wh..wh..opq", ""), file("var/lib/new", "1")}},
			map[string]string{".": "d 555 7:8", "var": d755, "var/lib": d755}, []string{"var/lib/data", "etc"}},
		{"opaque root under another layer", [][]header{{file(".wh..wh..opq", ""), file("new", "1")}, {file("new2", "2")}},
			map[string]string{"new": `f 644 0:0 "1"`, "new2": `f 644 0:0 "2"`}, []string{"etc"}},
		{"whiteout and file", [][]header{{file("etc/.wh.passwd", ""), file("etc/passwd", "new")}},
			map[string]string{"etc/passwd": `f 644 0:0 "new"`}, nil},
		{"file and whiteout", [][]header{{file("etc/passwd", "new"), file("etc/.wh.passwd", "")}},
			map[string]string{"etc/passwd": `f 644 0:0 "new"`}, nil},
		{"whiteout and directory", [][]header{{file(".wh.etc", ""), dir("etc", 0o700), file("etc/new", "1")}},
			map[string]string{"etc": "d 700 0:0", "etc/new": `f 644 0:0 "1"`}, []string{"etc/passwd"}},
		{"directory and whiteout", [][]header{{dir("etc", 0o700), file("etc/new", "1"), file(".wh.etc", "")}},
			map[string]string{"etc": "d 700 0:0", "etc/new": `f 644 0:0 "1"`}, []string{"etc/passwd"}},
		{"whiteout and implied directory", [][]header{{file("var/.wh.lib", ""), file("var/lib/new", "1")}},
			map[string]string{"var/lib": d755, "var/lib/new": `f 644 0:0 "1"`}, []string{"var/lib/data"}},
		{"implied directory and whiteout", [][]header{{file("var/lib/new", "1"), file("var/.wh.lib", "")}},
			map[string]string{"var/lib": d755, "var/lib/new": `f 644 0:0 "1"`}, []string{"var/lib/data"}},
		{"implied below an opaque one", [][]header{{file(".wh.var", ""), file("var/lib/new", "1")}},
			map[string]string{"var": d755, "var/lib": d755}, []string{"var/lib/data"}},
		{"whiteout of nothing below", [][]header{{file("a/.wh.b", "")}}, map[string]string{"a": d755}, []string{"a/b"}},
		{"whiteout twice", [][]header{{file(".wh.etc", ""), file(".wh.etc", "")}}, nil, []string{"etc"}},
		{"device 0:0", [][]header{{device(tar.TypeChar, "etc/passwd", 0, 0)}}, nil, []string{"etc/passwd"}},
		{"device 0:0 after the file", [][]header{{file("etc/passwd", "new"), device(tar.TypeChar, "etc/passwd", 0, 0)}}, nil, []string{"etc/passwd"}},
		{"file after device 0:0", [][]header{{device(tar.TypeChar, "etc/passwd", 0, 0), file("etc/passwd", "new")}},
			map[string]string{"etc/passwd": `f 644 0:0 "new"`}, nil},
		{"directory after device 0:0", [][]header{{device(tar.TypeChar, "etc", 0, 0), dir("etc", 0o755)}},
			map[string]string{"etc": d755}, []string{"etc/passwd"}},
		{"implied directories keep what is below", [][]header{{file("tmp/x", "1"), file("var/lib/y", "2")}},
			map[string]string{".": "d 555 7:8", "tmp": "d 1777 0:0", "var/lib": "d 700 5:6", "tmp/x": `f 644 0:0 "1"`, "var/lib/data": `f 644 0:0 "data"`}, nil},
		{"implied in two layers", [][]header{{file("tmp/x", "1")}, {file("tmp/y", "2")}},
			map[string]string{".": "d 555 7:8", "tmp": "d 1777 0:0", "tmp/x": `f 644 0:0 "1"`, "tmp/y": `f 644 0:0 "2"`}, nil},
		{"listed after implied", [][]header{{file("tmp/x", "1"), dir("tmp", 0o711)}}, map[string]string{"tmp": "d 711 0:0"}, nil},
		{"implied where nothing is", [][]header{{file("a/b/c", "1")}}, map[string]string{"a": d755, "a/b": d755}, nil},
		{"implied over a file", [][]header{{file("etc/passwd/x", "1")}}, map[string]string{"etc/passwd": d755, "etc/passwd/x": `f 644 0:0 "1"`}, nil},
		{"file over a directory", [][]header{{file("etc", "1")}}, map[string]string{"etc": `f 644 0:0 "1"`}, nil},
		{"file, then directory", [][]header{{file("etc", "1"), dir("etc", 0o755), file("etc/x", "2")}},
			map[string]string{"etc": d755, "etc/x": `f 644 0:0 "2"`}, []string{"etc/passwd"}},
		{"directory, then file", [][]header{{dir("a", 0o755), file("a/b/c", "1"), file("a", "2")}}, map[string]string{"a": `f 644 0:0 "2"`}, nil},
		{"directory, file, directory", [][]header{{dir("a", 0o755), file("a/b", "1"), file("a", "2"), dir("a", 0o700)}},
			map[string]string{"a": "d 700 0:0"}, []string{"a/b"}},
		{"file twice", [][]header{{file("a", "long content"), file("a", "2").owned(3, 4)}}, map[string]string{"a": `f 644 3:4 "2"`}, nil},
		{"file over a hard link", [][]header{{file("a", "1"), hardlink("b", "a"), file("b", "2")}},
			map[string]string{"a": `f 644 0:0 "1"`, "b": `f 644 0:0 "2"`}, nil},
		{"file over a symlink", [][]header{{file("a", "1"), symlink("b", "a"), file("b", "2")}},
			map[string]string{"a": `f 644 0:0 "1"`, "b": `f 644 0:0 "2"`}, nil},
		{"directory over a symlink to one", [][]header{{dir("a", 0o755), symlink("b", "a"), dir("b", 0o700), file("b/x", "1")}},
			map[string]string{"a": d755, "b": "d 700 0:0", "b/x": `f 644 0:0 "1"`}, []string{"a/x"}},
		{"parent is a symlink", [][]header{{dir("a", 0o755), symlink("b", "a"), file("b/x", "1"), dir("b/d", 0o711)}},
			map[string]string{"a/x": `f 644 0:0 "1"`, "a/d": "d 711 0:0", "b": "l 0:0 a"}, nil},
		{"parent is a dangling symlink", [][]header{{symlink("b", "/var/lib"), file("b/x", "1")}},
			map[string]string{"var/lib": "d 700 5:6", "var/lib/x": `f 644 0:0 "1"`, "b": "l 0:0 /var/lib"}, nil},
		{"symlink replaced after use", [][]header{{dir("a", 0o755), dir("c", 0o755), symlink("b", "a"), file("b/x", "1"), symlink("b", "c"), file("b/y", "2")}},
			map[string]string{"a/x": `f 644 0:0 "1"`, "c/y": `f 644 0:0 "2"`}, []string{"a/y"}},
		{"directory replaced after use", [][]header{{dir("a", 0o755), file("a/x", "1"), symlink("a", "c"), dir("c", 0o755), file("a/y", "2")}},
			map[string]string{"a": "l 0:0 c", "c/y": `f 644 0:0 "2"`}, []string{"c/x"}},
		{"parent is a symlink of a layer below", [][]header{{file("bin/new", "1")}},
			map[string]string{"bin": d755, "bin/new": `f 644 0:0 "1"`}, []string{"bin/tool"}},
		{"whiteout through a symlink", [][]header{{symlink("e", "etc"), dir("etc", 0o755), file("e/.wh.passwd", "")}}, nil, []string{"etc/passwd"}},
		{"hard link", [][]header{{file("a", "1").owned(3, 4), hardlink("d/b", "a"), hardlink("c", "/d/b")}},
			map[string]string{"d/b": `f 644 3:4 "1"`, "c": `f 644 3:4 "1"`}, nil},
		{"hard link to itself", [][]header{{file("a", "1"), hardlink("a", "a")}}, map[string]string{"a": `f 644 0:0 "1"`}, nil},
		{"hard link to a symlink", [][]header{{symlink("a", "etc/passwd"), hardlink("b", "a")}}, map[string]string{"b": "l 0:0 etc/passwd"}, nil},
		{"hard link over a file", [][]header{{file("a", "1"), file("b", "2"), hardlink("b", "a")}}, map[string]string{"b": `f 644 0:0 "1"`}, nil},
		{"hard link over a directory", [][]header{{file("a", "1"), dir("b", 0o755), file("b/c", "2"), hardlink("b", "a")}}, map[string]string{"b": `f 644 0:0 "1"`}, nil},
		{"hard link below", [][]header{{hardlink("etc/copy", "etc/shadow")}},
			map[string]string{"etc/copy": `f 644 0:42 "x"`, "etc/shadow": `f 644 0:42 "x"`, "etc/passwd": `f 644 0:0 "root"`}, nil},
		{"hard link below, through its symlink", [][]header{{hardlink("copy", "bin/tool")}}, map[string]string{"copy": `f 644 0:0 "tool"`, ".": "d 555 7:8"}, nil},
		{"hard link below, to its symlink", [][]header{{hardlink("copy", "usr/bin/alias")}}, map[string]string{"copy": "l 0:0 tool"}, nil},
		{"hard link below, through a symlink of the layer", [][]header{{symlink("b", "usr/bin"), hardlink("copy", "b/tool")}}, map[string]string{"copy": `f 644 0:0 "tool"`}, nil},
		{"hard link below, into a directory below", [][]header{{hardlink("var/lib/copy", "etc/passwd")}},
			map[string]string{"var/lib/copy": `f 644 0:0 "root"`, "var/lib": "d 700 5:6", "var/lib/data": `f 644 0:0 "data"`}, nil},
		{"hard link below, over two layers", [][]header{{file("x", "1")}, {hardlink("y", "etc/passwd")}, {hardlink("z", "y"), hardlink("w", "x")}},
			map[string]string{"y": `f 644 0:0 "root"`, "z": `f 644 0:0 "root"`, "w": `f 644 0:0 "1"`}, nil},
		{"hard link to a hard link below", [][]header{{hardlink("y", "etc/passwd"), hardlink("z", "y")}}, map[string]string{"z": `f 644 0:0 "root"`}, nil},
		{"hard link below, target replaced later", [][]header{{hardlink("old", "etc/passwd"), file("etc/passwd", "new")}},
			map[string]string{"old": `f 644 0:0 "root"`, "etc/passwd": `f 644 0:0 "new"`}, nil},
		{"hard link below, target hidden", [][]header{{hardlink("old", "etc/passwd"), file("etc/.wh.passwd", "")}}, map[string]string{"old": `f 644 0:0 "root"`}, []string{"etc/passwd"}},
		{"hard link below, target hidden first", [][]header{{file("etc/.wh.passwd", ""), hardlink("old", "etc/passwd")}}, map[string]string{"old": `f 644 0:0 "root"`}, []string{"etc/passwd"}},
		{"hard link below, hidden by the next layer", [][]header{{hardlink("old", "etc/passwd")}, {file(".wh.old", "")}}, nil, []string{"old"}},
		{"hard link below, replaced by a file", [][]header{{hardlink("a", "etc/passwd"), file("a", "1")}}, map[string]string{"a": `f 644 0:0 "1"`}, nil},
		{"hard link below, replaced by a directory", [][]header{{hardlink("etc", "var/lib/data"), dir("etc", 0o755)}}, map[string]string{"etc": d755}, []string{"etc/passwd"}},
		{"hard link below, replaced by an implied directory", [][]header{{hardlink("etc", "var/lib/data"), file("etc/x", "1")}},
			map[string]string{"etc": d755, "etc/x": `f 644 0:0 "1"`}, []string{"etc/passwd"}},
		{"hard link below in a removed directory", [][]header{{hardlink("a/b", "etc/passwd"), file("a", "1")}}, map[string]string{"a": `f 644 0:0 "1"`}, nil},
		{"hard link below, over a file of the layer", [][]header{{file("a", "1"), hardlink("a", "etc/passwd")}}, map[string]string{"a": `f 644 0:0 "root"`}, nil},
		{"hard link below and whiteout of its name", [][]header{{hardlink("etc/group", "etc/passwd"), file("etc/.wh.group", "")}}, map[string]string{"etc/group": `f 644 0:0 "root"`}, nil},
		{"hard link below, whiteout of its name, then a directory", [][]header{{hardlink("etc", "var/lib/data"), file(".wh.etc", ""), dir("etc", 0o755)}},
			map[string]string{"etc": d755}, []string{"etc/passwd"}},
		{"hard link before its target", [][]header{{hardlink("a", "b"), file("b", "1")}}, map[string]string{"a": `f 644 0:0 "1"`}, nil},
		{"devices", [][]header{{device(tar.TypeChar, "null", 1, 3), device(tar.TypeBlock, "disk", 259, 1048575), device(tar.TypeFifo, "pipe", 0, 0).owned(1, 1)}},
			map[string]string{"null": "c 600 0:0 1:3", "disk": "b 600 0:0 259:1048575", "pipe": "p 600 1:1"}, nil},
		{"setuid", [][]header{{mode(file("su", "x").owned(1, 2), 0o6755), mode(file("root", "x"), 0o4755), dir("g", 0o2775).owned(0, 9), file("g/f", "1")}},
			map[string]string{"su": `f 6755 1:2 "x"`, "root": `f 4755 0:0 "x"`, "g": "d 2775 0:9", "g/f": `f 644 0:0 "1"`}, nil},
		{"owners", [][]header{{file("a", "").owned(1<<32-2, 1<<31), symlink("l", "a").owned(70000, 1)}},
			map[string]string{"a": `f 644 4294967294:2147483648 ""`, "l": "l 70000:1 a"}, nil},
		{"confined", [][]header{{file("/abs", "1"), file("../../up", "2"), file("a/../../b", "3"), file("./dot", "4"), symlink("out", "../../../.."), file("out/x", "5"), hardlink("h", "../../../abs")}},
			map[string]string{"abs": `f 644 0:0 "1"`, "up": `f 644 0:0 "2"`, "b": `f 644 0:0 "3"`, "dot": `f 644 0:0 "4"`, "x": `f 644 0:0 "5"`, "h": `f 644 0:0 "1"`}, nil},
		{"AUFS", [][]header{{file(".wh..wh.aufs", ""), dir(".wh..wh.plnk", 0o700), file(".wh..wh.plnk/1.2", "x"), dir(".wh..wh.orph", 0o700), file("a", "1")}},
			map[string]string{"a": `f 644 0:0 "1"`}, []string{".wh..wh.aufs", ".wh..wh.plnk", ".wh..wh.orph", ".wh.aufs"}},
		{"global header", [][]header{{{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "abc", "SCHILY.xattr.user.x": "1"}}}, file("a", "1")}},
			map[string]string{"a": `f 644 0:0 "1"`}, []string{"pax_global_header"}},
		{"long names", [][]header{{file(strings.Repeat("d/", 150)+strings.Repeat("n", 255), "1"), symlink("l", strings.Repeat("t", 4000)), gnu(file(strings.Repeat("g/", 120)+"f", "2"))}},
			map[string]string{strings.Repeat("d/", 150) + strings.Repeat("n", 255): `f 644 0:0 "1"`, "l": "l 0:0 " + strings.Repeat("t", 4000), strings.Repeat("g/", 120) + "f": `f 644 0:0 "2"`}, nil},
		{"strange names", [][]header{{file("a\\b:c,d", "1"), file("\xff\xfe", "2"), file(".wh", "3"), file("new\nline", "4"), dir("\xf0", 0o700), hardlink("\xf1", "etc/passwd")}},
			map[string]string{"a\\b:c,d": `f 644 0:0 "1"`, "\xff\xfe": `f 644 0:0 "2"`, ".wh": `f 644 0:0 "3"`, "new\nline": `f 644 0:0 "4"`, "\xf1": `f 644 0:0 "root"`}, nil},
		{"old style types", [][]header{{withType(file("cont", "1"), tar.TypeCont), withType(file("rega", "2"), '\x00')}},
			map[string]string{"cont": `f 644 0:0 "1"`, "rega": `f 644 0:0 "2"`}, nil},
	}
	s := openStore(t, t.TempDir())
	bottom := create(t, s, makeTar(t, base()...))
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			ids := []digest.Digest{bottom}
			for _, l := range c.layers {
				ids = append(ids, create(t, s, makeTar(t, l...)))
			}
			root := mounted(t, s, ids...)
			for _, name := range slices.Sorted(maps.Keys(c.want)) {
				if _, err := os.Lstat(filepath.Join(root, name)); err != nil {
					t.Errorf("%v", err)
				} else if got := describe(t, filepath.Join(root, name)); got != c.want[name] {
					t.Errorf("%q is %s, want %s", name, got, c.want[name])
				}
			}
			for _, name := range c.gone {
				if _, err := os.Lstat(filepath.Join(root, name)); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
					t.Errorf("%q is there: %v", name, err)
				}
			}
			checkUsage(t, s)
		})
	}
}

func mode(h header, mode int64) header { h.Mode = mode; return h }

func gnu(h header) header { h.Format = tar.FormatGNU; return h }

func withType(h header, typ byte) header { h.Typeflag = typ; return h }

// checkUsage compares the counted usage with that of a walk.
func checkUsage(t testing.TB, s *Store) {
	t.Helper()
	for _, info := range s.layers.All() {
		checkTree(t, filepath.Join(s.layerDir(info.DiffID), treeDir), info.Usage)
	}
}

func checkTree(t testing.TB, dir string, counted Usage) {
	t.Helper()
	root, err := os.Open(dir)
	testutil.Must(t, err)
	defer root.Close()
	block, err := diskusage.BlockSize(root)
	testutil.Must(t, err)
	walked, err := diskusage.Nominal(t.Context(), root, block)
	testutil.Must(t, err)
	used, err := Stored{Dir: filepath.Dir(dir)}.count(tarFile)
	testutil.Must(t, err)
	walked = walked.Add(used)
	if walked != diskusage.Usage(counted) {
		t.Errorf("%s: counted %+v, there are %+v", dir, counted, walked)
	}
}
