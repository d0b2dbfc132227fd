package unpack

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"berth/image/unpack/tarsplit"
	"berth/internal/safefs"
	"berth/internal/testutil"
)

// makeTar returns the tar of the entries, which have the content if they have a size.
func makeTar(t *testing.T, content string, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if err := w.WriteHeader(&e); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content[:e.Size]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// emptyTree opens an empty directory.
func emptyTree(t *testing.T) *os.File {
	t.Helper()
	root, err := safefs.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// deep is the path of a directory in nine others.
func deep(i int) string { return fmt.Sprint(i) + strings.Repeat("/"+strings.Repeat("x", 200), 9) }

// awkward has constructors of entries that unpack must remember until the end of a layer.
var awkward = map[string]func(i int) tar.Header{
	"hard links": func(i int) tar.Header {
		return tar.Header{Typeflag: tar.TypeLink, Name: fmt.Sprint(i), Linkname: deep(i)}
	},
	"implied": func(i int) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: deep(i) + "/x"} },
	"opaque":  func(i int) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: deep(i) + "/.wh..wh..opq"} },
}

// A file inherits nothing from its directory or the umask.
func TestFileTakesNothingOver(t *testing.T) {
	testutil.NeedRoot(t)
	const acl = "\x02\x00\x00\x00" + // user::rwx user:1000:rwx group::r-x mask::rwx other::---
		"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x07\x00\xe8\x03\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
		"\x10\x00\x07\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff"
	at := time.Unix(1_000_000_000, 123_000_000)
	var entries []tar.Header
	dirs := []tar.Header{
		{Name: "plain/", Mode: 0o755}, {Name: "setgid/", Mode: 0o2777, Gid: 9}, {Name: "acl/", Mode: 0o770, PAXRecords: map[string]string{XattrRecord + "system.posix_acl_default": acl}},
	}
	for _, dir := range dirs {
		dir.Typeflag = tar.TypeDir
		entries = append(entries, dir)
		for _, mode := range []int64{0o644, 0o777, 0, 0o6755, 0o2644, 0o020} {
			for _, owner := range []int{0, 9} {
				entries = append(entries, tar.Header{
					Typeflag: tar.TypeReg, Name: fmt.Sprintf("%s%o-%d", dir.Name, mode, owner), Mode: mode, Uid: owner, Gid: owner, Size: 4,
					ModTime: at, AccessTime: at.Add(time.Hour), Format: tar.FormatPAX,
				})
			}
		}
	}
	defer unix.Umask(unix.Umask(0o077))
	root := emptyTree(t)
	if _, err := Layer(t.Context(), root, bytes.NewReader(makeTar(t, "text", entries...)), Job{Algorithm: digest.SHA256}); err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Typeflag != tar.TypeReg {
			continue
		}
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(root.Name(), e.Name), &st); err != nil {
			t.Fatal(err)
		}
		if int64(st.Mode&ModeBits) != e.Mode || int(st.Uid) != e.Uid || int(st.Gid) != e.Gid {
			t.Errorf("%s has the mode %o and the owner %d:%d", e.Name, st.Mode&ModeBits, st.Uid, st.Gid)
		}
		if m, a := time.Unix(st.Mtim.Unix()), time.Unix(st.Atim.Unix()); !m.Equal(e.ModTime) || !a.Equal(e.AccessTime) {
			t.Errorf("%s is of %v, read at %v", e.Name, m, a)
		}
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func many(n int, entry func(i int) tar.Header) []tar.Header {
	var list []tar.Header
	for i := range n {
		list = append(list, entry(i))
	}
	return list
}

func TestLayerLimitsEntries(t *testing.T) {
	testutil.NeedRoot(t)
	entries := []tar.Header{
		{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755}, {Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755},
		{Typeflag: tar.TypeReg, Name: "d/f", Size: 1}, {Typeflag: tar.TypeReg, Name: "implied/empty"}, {Typeflag: tar.TypeReg, Name: "implied/too/.wh.w"},
		{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "d"}, {Typeflag: tar.TypeLink, Name: "second", Linkname: "d/f"}, {Typeflag: tar.TypeLink, Name: "below", Linkname: "x"},
		{Typeflag: tar.TypeFifo, Name: "p"},
	}
	data := makeTar(t, "x", entries...)
	for _, c := range []struct {
		limit int
		code  Code
	}{{len(entries), OK}, {len(entries) - 1, FailedPrecondition}, {1, FailedPrecondition}} {
		t.Run(fmt.Sprintf("limit %d", c.limit), func(t *testing.T) {
			_, err := Layer(t.Context(), emptyTree(t), bytes.NewReader(data), Job{Limits: Limits{Entries: int64(c.limit)}, Algorithm: digest.SHA256})
			if CodeOf(err) != c.code {
				t.Errorf("%d entries: %v, want code %v", len(entries), err, c.code)
			}
		})
	}
}

// The number of hard links without a target and of directories to remember is limited.
func TestRememberedNamesAreLimited(t *testing.T) {
	cases := map[string]func(i int) tar.Header{"directories": func(i int) tar.Header {
		return tar.Header{Typeflag: tar.TypeDir, Name: deep(i) + "/", Mode: 0o755}
	}}
	for name, entry := range awkward {
		cases[name] = entry
	}
	for name, entry := range cases {
		t.Run(name, func(t *testing.T) {
			u, err := newUnpacker(emptyTree(t), maxNames, tarsplit.NewRecorder(nil, nil), func() {})
			if err != nil {
				t.Fatal(err)
			}
			defer u.close()
			u.names = 10_000
			err = (walk[*safefs.Dir]{u}).all(context.Background(), tar.NewReader(bytes.NewReader(makeTar(t, "", many(200, entry)...))), DefaultLimits)
			if CodeOf(err) != MoreMemory || !strings.Contains(err.Error(), "names") {
				t.Errorf("%v", err)
			}
		})
	}
}

// The work for resolving paths is limited, even if each of a few entries has tens of thousands of
// names.
func TestPathResolutionIsLimited(t *testing.T) {
	testutil.NeedRoot(t)
	const links = 40 // the most that is followed
	entries := []tar.Header{{Typeflag: tar.TypeDir, Name: "d/", Mode: 0o755}}
	for i := range links {
		target := strings.Repeat("d/../", 816) + fmt.Sprintf("l%d", i+1)
		if i == links-1 {
			target = "d"
		}
		entries = append(entries, tar.Header{Typeflag: tar.TypeSymlink, Name: fmt.Sprintf("l%d", i), Linkname: target})
	}
	few, most := slices.Clone(entries), slices.Clone(entries)
	for i := range 100 { // more than are kept open
		file := tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("l0/x%d/f", i)}
		if i < 1 {
			few = append(few, file)
		}
		most = append(most, file)
	}
	for i := range 1000 { // each as short a way as most have
		few = append(few, tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("l39/%d/a/b/c/d/e/f", i)})
	}
	if _, err := Layer(context.Background(), emptyTree(t), bytes.NewReader(makeTar(t, "", few...)), Job{Algorithm: digest.SHA256}); err != nil {
		t.Errorf("a long way: %v", err)
	}
	_, err := Layer(context.Background(), emptyTree(t), bytes.NewReader(makeTar(t, "", most...)), Job{Algorithm: digest.SHA256})
	if CodeOf(err) != FailedPrecondition || !strings.Contains(err.Error(), "too many symlinks") {
		t.Errorf("long ways: %v", err)
	}
}

// The cache forgets a directory and everything below it, and nothing else.
func TestForgetBelow(t *testing.T) {
	testutil.NeedRoot(t)
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		u, err := newUnpacker(emptyTree(t), maxNames, tarsplit.NewRecorder(nil, nil), func() {})
		if err != nil {
			t.Fatal(err)
		}
		var entries []tar.Header
		for range 60 {
			name := fmt.Sprintf("%d/%d/%d/%d", random.IntN(2), random.IntN(2), random.IntN(3), random.IntN(3))[:1+2*random.IntN(4)]
			entries = append(entries, []tar.Header{
				{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755},
				{Typeflag: tar.TypeReg, Name: name + "/x"},
				{Typeflag: tar.TypeReg, Name: name + "/.wh..wh..opq"},
				{Typeflag: tar.TypeLink, Name: name + "/y", Linkname: "nowhere"},
				{Typeflag: tar.TypeSymlink, Name: name, Linkname: "other/else"}, // takes the directory's place
				{Typeflag: tar.TypeLink, Name: name, Linkname: "nowhere"},
			}[random.IntN(6)])
		}
		if err := (walk[*safefs.Dir]{u}).all(context.Background(), tar.NewReader(bytes.NewReader(makeTar(t, "", entries...))), DefaultLimits); err != nil {
			t.Fatal(err)
		}
		for _, known := range []map[string]bool{u.implied, u.opaques, keys(u.times)} {
			for path := range known {
				dir, err := safefs.OpenDir(u.root, path)
				if err != nil {
					t.Errorf("%q is known, and no directory: %v", path, err)
					continue
				}
				dir.Close()
			}
		}
		for path := range u.links {
			dir, _ := safefs.Split(path)
			if _, ok := u.times[dir]; !ok {
				t.Errorf("the link %q is in no directory", path)
			}
		}
		err = filepath.WalkDir(u.root.Name(), func(path string, e os.DirEntry, err error) error {
			name := strings.TrimPrefix(strings.TrimPrefix(path, u.root.Name()), "/")
			if _, ok := u.times[name]; err == nil && e.IsDir() && !ok {
				t.Errorf("the directory %q has been forgotten", name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		u.close()
	}
}

func keys[V any](m map[string]V) map[string]bool {
	set := map[string]bool{}
	for k := range m {
		set[k] = true
	}
	return set
}

// A hole takes time, and is progress.
func TestHolesAreProgress(t *testing.T) {
	ticks := 0
	u, err := newUnpacker(emptyTree(t), maxNames, tarsplit.NewRecorder(nil, nil), func() { ticks++ })
	if err != nil {
		t.Fatal(err)
	}
	defer u.close()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const size = 10 * copySize
	if n, _, err := u.fill(f, &tar.Header{Size: size}, io.LimitReader(endless{}, size)); n != 0 || err != nil || ticks < 10 {
		t.Errorf("%d bytes written, %v, %d ticks", n, err, ticks)
	}
}

// The result has a limited number of names, however many the worker could remember.
func TestReportedNamesAreLimited(t *testing.T) {
	testutil.NeedRoot(t)
	for name, entry := range awkward {
		t.Run(name, func(t *testing.T) {
			per := 5 // times the length of the longest name that all directories of one entry have
			if name == "hard links" {
				per = 1
			}
			blob := makeTar(t, "", many(MaxTold/len(deep(0))/per+100, entry)...)
			_, err := Layer(context.Background(), emptyTree(t), bytes.NewReader(blob), Job{Algorithm: digest.SHA256})
			if CodeOf(err) != FailedPrecondition || !strings.Contains(err.Error(), "names") {
				t.Errorf("%v", err)
			}
		})
	}
}

func TestCheckNames(t *testing.T) {
	for _, bad := range []Name{"../x", "/x", "a//b", ".", "a/..", Name(strings.Repeat("x/", 3000) + "x")} {
		for _, c := range []Contents{{Links: []Link{{bad, "x"}}}, {Links: []Link{{"x", bad}}}, {Implied: []Name{bad}}, {Opaques: []Name{bad}}} {
			if err := c.Check(); CodeOf(err) != InvalidArgument {
				t.Errorf("%+v: %v", c, err)
			}
		}
	}
	if err := (&Contents{Links: []Link{{"a/b", "c"}}, Implied: []Name{"", "x"}}).Check(); err != nil {
		t.Error(err)
	}
}

func TestCode(t *testing.T) {
	for want, err := range map[Code]error{
		OK: nil, Unknown: errors.New("x"), Canceled: fmt.Errorf("x: %w", context.Canceled),
		InvalidArgument: fmt.Errorf("x: %w", refuse("x")), Internal: os.ErrPermission,
	} {
		if got := CodeOf(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
}

// Names in records are bytes.
func TestNames(t *testing.T) {
	for _, want := range []Name{"", "a/b", "%2f", "\xff\xfe/\x00", "new\nline", "ü", `"\`, "a+b c"} {
		text, err := want.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var got Name
		if err := got.UnmarshalText(text); err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%q became %q by %s", want, got, text)
		}
		for _, c := range text {
			if c < 0x20 || c > 0x7e {
				t.Errorf("%q is stored as %q", want, text)
				break
			}
		}
	}
	var n Name
	if err := n.UnmarshalText([]byte("%zz")); err == nil {
		t.Error("a broken name was taken")
	}
}
