package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/codes"

	"berth/image/erofs"
	"berth/image/tree"
	"berth/image/unpack"
	"berth/image/unpack/checksum"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

// twin has a store of each kind. Both must show the same content.
type twin struct{ directory, erofs *Store }

func newTwin(t testing.TB) twin {
	t.Helper()
	root := testutil.DiskDir(t) // a tmpfs can't be mounted from
	if err := erofs.Probe(root); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	open := func(name string, d Driver) *Store {
		s, err := Open(filepath.Join(root, name), d, Reserve{}, nil, discardLog())
		testutil.Must(t, err)
		t.Cleanup(func() { testutil.Must(t, s.Close()) })
		return s
	}
	return twin{open("directory", NewDirectory(unpack.Layer)), open("erofs", NewEROFS(unpack.Pack, 0))}
}

// Trees with the maximum of extended attributes are packed and mounted. Trees with more need
// another driver, for any type of entry.
func TestXattrLimitsOfTrees(t *testing.T) {
	root := filepath.Join(testutil.DiskDir(t), "store")
	s := openImages(t, root, Reserve{})
	defer func() { testutil.Must(t, s.Close()) }()
	attributes := func(h header, first, n, size int) header {
		h.PAXRecords = map[string]string{}
		for i := range n {
			h.PAXRecords[unpack.XattrRecord+fmt.Sprintf("user.%04d", first+i)] = strings.Repeat("v", size)
		}
		return h
	}
	const most, names = tree.MaxXattrs, tree.MaxXattrs * len("user.0000")
	for name, c := range map[string]struct {
		layer []header
		code  codes.Code
	}{
		"as many as there may be":   {[]header{attributes(file("f", "x"), 0, most, (tree.MaxXattrBytes-names)/most)}, codes.OK},
		"one more":                  {[]header{attributes(file("f", "x"), 0, most+1, 0)}, codes.FailedPrecondition},
		"a byte more each":          {[]header{attributes(file("f", "x"), 0, most, (tree.MaxXattrBytes-names)/most+1)}, codes.FailedPrecondition},
		"a directory listed twice":  {[]header{attributes(dir("d", 0o755), 0, most/2, 0), attributes(dir("d", 0o755), most/2, most/2, 0), file("f", "x")}, codes.OK},
		"and once more":             {[]header{attributes(dir("d", 0o755), 0, most, 0), attributes(dir("d", 0o755), most, 1, 0)}, codes.FailedPrecondition},
		"a value as long as may be": {[]header{attributes(file("f", "x"), 0, 1, tree.MaxXattrValue)}, codes.OK},
		"one of the most of Linux":  {[]header{attributes(file("f", "x"), 0, 1, 64<<10)}, codes.FailedPrecondition},
		"one that Linux refuses":    {[]header{attributes(file("f", "x"), 0, 1, 64<<10+1)}, codes.InvalidArgument},
	} {
		data := makeTar(t, c.layer...)
		id := digest.FromBytes(data)
		err := s.Create(t.Context(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{})
		if errdefs.Code(err) != c.code || errors.Is(err, ErrTooLarge) != (c.code == codes.FailedPrecondition) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			if got := shown(t, s, "f", id); got != "x" {
				t.Errorf("%s: %q", name, got)
			}
		}
	}
}

// create makes a layer in both stores, or in none: "" then.
func (w twin) create(t testing.TB, data []byte) digest.Digest {
	t.Helper()
	id := digest.FromBytes(data)
	var codes [2]string
	for i, s := range []*Store{w.directory, w.erofs} {
		err := s.Create(context.Background(), Source{DiffID: id}, bytes.NewReader(data), unpack.Limits{})
		if codes[i] = errdefs.Code(err).String(); err != nil {
			codes[i] += fmt.Sprint(" ", err)
		}
	}
	a, _, _ := strings.Cut(codes[0], " ")
	b, _, _ := strings.Cut(codes[1], " ")
	if a != b {
		t.Errorf("as a directory %s, as EROFS %s", codes[0], codes[1])
	}
	if a != "OK" {
		return ""
	}
	var sums [2]checksum.Sum
	for i, s := range []*Store{w.directory, w.erofs} {
		info, err := s.Info(id)
		testutil.Must(t, err)
		sums[i] = info.Sum
		checkSum(t, s, id)
		checkTar(t, s, id, data)
		count, err := Stored{Dir: s.layerDir(id), Kind: info.Kind}.Count(context.Background())
		if testutil.Must(t, err); count != info.Usage {
			t.Errorf("usage %+v, counted %+v", info.Usage, count)
		}
	}
	if sums[0] != sums[1] {
		t.Errorf("the sum of the directory is %s, of the tree %s", sums[0], sums[1])
	}
	return id
}

// compare mounts a chain with both drivers and compares the files.
func (w twin) compare(t testing.TB, chain ...digest.Digest) {
	t.Helper()
	var trees [2]map[string]string
	var failed [2]error
	for i, s := range []*Store{w.directory, w.erofs} {
		var layers []rootfs.Layer
		if layers, failed[i] = s.Stack(context.Background(), chain); failed[i] != nil {
			continue
		}
		if s == w.erofs && len(layers) != 1 {
			t.Errorf("%d layers", len(layers))
		}
		trees[i] = seen(t, layers)
	}
	if errdefs.Code(failed[0]) != errdefs.Code(failed[1]) {
		t.Errorf("as directories %v, as EROFS %v", failed[0], failed[1])
	}
	if failed[0] == nil && failed[1] == nil {
		for name, text := range trees[0] {
			if strings.Contains(text, unknownTime) {
				trees[1][name] = withoutTime(trees[1][name])
			}
		}
		compareTrees(t, trees[1], trees[0])
	}
}

// unknownTime replaces the time of a directory that a layer does not list and a layer below does.
// The directory driver loses this time.
const unknownTime = " mtime ? "

// withoutTime returns the description of a directory without its time.
func withoutTime(text string) string {
	before, after, _ := strings.Cut(text, " mtime ")
	_, xattrs, _ := strings.Cut(after, " ")
	return before + unknownTime + xattrs
}

var linkCount = regexp.MustCompile(" links [0-9]+ of ")

// seen describes all files that a container sees. It omits the modification time of directories
// that no layer lists, because drivers may choose it.
func seen(t testing.TB, layers []rootfs.Layer) map[string]string {
	t.Helper()
	dir := testutil.DiskDir(t)
	spec := rootfs.Spec{Layers: layers, Upper: dir + "/upper", Work: dir + "/work"}
	testutil.Must(t, spec.MakeUpper())
	testutil.Must(t, os.Mkdir(dir+"/root", 0o700))
	testutil.Must(t, spec.MountAt(dir+"/root"))
	defer func() { testutil.Must(t, unmount(dir+"/root")) }()
	all := fullTree(t, dir+"/root")
	for name, text := range all {
		// overlayfs counts names of a file that a layer above hides.
		text = linkCount.ReplaceAllString(text, " links of ")
		all[name] = text
		if strings.HasPrefix(text, "d ") {
			if strings.Contains(text, " mtime 0.000000000 ") || name == "." {
				all[name] = withoutTime(text)
			}
		}
	}
	return all
}

// Both drivers show the same files for the same tars, including odd ones.
func TestDriversAgree(t *testing.T) {
	w := newTwin(t)
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 11))
		data := make([]byte, 3*(1+r.IntN(40)))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		w.program(t, data)
		if t.Failed() {
			t.Fatalf("seed %d: %v", seed, describeProgram(data))
		}
	}
}

func describeProgram(data []byte) (text []string) {
	for i, l := range program(data) {
		for _, h := range l {
			text = append(text, fmt.Sprintf("%d:%c %s>%s", i, h.Typeflag, h.Name, h.Linkname))
		}
	}
	return text
}

// program creates and compares the layers of a program, and removes them.
func (w twin) program(t testing.TB, data []byte) {
	t.Helper()
	var chain []digest.Digest
	for _, l := range program(data) {
		if id := w.create(t, makeTar(t, l...)); id != "" && !slices.Contains(chain, id) {
			chain = append(chain, id)
		}
	}
	if len(chain) > 0 {
		w.compare(t, chain...)
	}
	for _, id := range chain {
		testutil.Must(t, w.directory.Remove(id))
		testutil.Must(t, w.erofs.Remove(id))
	}
}

// FuzzDrivers is TestDriversAgree for a fuzzer.
func FuzzDrivers(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x02\x00\x07\x00\x00\x04\x01\x06\x00\x11\x00"))
	f.Add([]byte("\x00\x10\x00\x07\x00\x00\x04\x00\x0b\x05\x10\x00\x07\x00\x00\x00\x17\x00\x04\x01\x0b"))
	f.Fuzz(func(t *testing.T, data []byte) { newTwin(t).program(t, data) })
}

// Both drivers show the same attributes, holes, devices, long names and large directories.
func TestDriversAgreeOnAttributes(t *testing.T) {
	acl := func(entries ...uint16) string {
		b := []byte{2, 0, 0, 0}
		for i := 0; i < len(entries); i += 3 {
			b = append(b, byte(entries[i]), 0, byte(entries[i+1]), 0, byte(entries[i+2]), byte(entries[i+2]>>8), 0, 0)
		}
		return string(b)
	}
	full := acl(1, 7, 0, 2, 6, 1000, 4, 5, 0, 16, 7, 0, 32, 1, 0)
	long := strings.Repeat("n", 255)
	var many []header
	for i := range 3000 {
		many = append(many, file(fmt.Sprintf("many/file-%d", i), fmt.Sprint(i)))
	}
	zero := func(n int) string { return string(make([]byte, n)) }
	cases := map[string][]header{
		"xattrs": {
			file("f", "x").xattr("user.a", "1").xattr("user.b", "").xattr("security.capability", string(capability())),
			dir("d", 0o1777).xattr("user.dir", "y"), dir("d", 0o700).xattr("user.second", "z"),
			symlink("s", "f").xattr("user.a", "1"), device(tar.TypeFifo, "p", 0, 0).xattr("user.a", "1"),
			file("o", "").xattr("trusted.overlay.opaque", "y").xattr("user.overlay.x", "y").xattr("security.selinux", "l"),
		},
		"ACLs": {
			mode(file("f", "x").xattr("system.posix_acl_access", full), 0o640), dir("d", 0o750).xattr("system.posix_acl_access", full).xattr("system.posix_acl_default", full),
			dir("d", 0o705), file("plain", "x").xattr("system.posix_acl_access", acl(1, 7, 0, 4, 5, 0, 32, 1, 0)),
			file("empty", "").xattr("system.posix_acl_access", acl()), symlink("s", "f").xattr("system.posix_acl_access", full),
		},
		"a bad ACL":            {file("f", "x").xattr("system.posix_acl_access", acl(4, 7, 0))},
		"a short ACL":          {file("f", "x").xattr("system.posix_acl_access", "\x02")},
		"another ACL version":  {file("f", "x").xattr("system.posix_acl_access", "\x09\x00\x00\x00")},
		"a default ACL":        {file("f", "x").xattr("system.posix_acl_default", full)},
		"a bad capability":     {file("f", "x").xattr("security.capability", "123")},
		"a huge xattr":         {file("f", "x").xattr("user.a", strings.Repeat("x", 64<<10+1))},
		"an xattr without end": {file("f", "x").xattr("user."+strings.Repeat("x", 260), "1")},
		"an xattr named user":  {file("f", "x").xattr("user.", "1")},
		"devices": {
			device(tar.TypeChar, "null", 1, 3), device(tar.TypeBlock, "disk", 0xfff, 0xfffff), device(tar.TypeChar, "zero", 0, 0), device(tar.TypeChar, "minor", 0, 1),
			mode(device(tar.TypeFifo, "p", 9, 9), 0o4755).owned(1, 2),
		},
		"names":           {file(long, "1"), dir(long[:254]+"/", 0o755), file("a/"+long+"/"+long[:200], "2"), file("b/.wh."+long[:200], ""), symlink("l", strings.Repeat("t/", 2000)), file("ü\xff\x01", "3")},
		"a long name":     {file(long+"x", "1")},
		"a long target":   {symlink("l", strings.Repeat("t", 4096))},
		"a long whiteout": {file(".wh."+strings.Repeat("w", 256), "")},
		"modes":           {mode(file("s", "x").owned(5, 6), 0o6755), mode(file("n", ""), 0), dir("sticky", 0o3777).owned(1<<31, 1<<32-2)},
		"owners":          {file("s", "x").owned(1<<32-1, 0)},
		"many":            many,
		"links":           {file("a", "1"), hardlink("b", "a"), hardlink("c/d", "b"), file("a", "2"), hardlink("a", "a"), hardlink("x", "x")},
		"none":            {},
		"zeros": { // long runs become holes
			file("all", zero(1<<20)), file("begin", zero(300_000)+"x"), file("end", "x"+zero(700_000)), file("both", zero(512<<10)+"x"+zero(512<<10)),
			file("one", "\x00"), file("block", zero(128<<10)), file("after", "text"),
		},
	}
	w := newTwin(t)
	bottom := w.create(t, makeTar(t, base()...))
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		t.Run(name, func(t *testing.T) {
			if id := w.create(t, makeTar(t, cases[name]...)); id != "" {
				w.compare(t, id)
				w.compare(t, bottom, id)
			}
		})
	}
}

// A directory that is a hard link to itself stays as it is. kaniko writes one for the root.
func TestDirectoryLinkedToItself(t *testing.T) {
	w := newTwin(t)
	id := w.create(t, makeTar(t, dir("./", 0o711).owned(1, 2), hardlink("/", "."), hardlink("./", "/"), hardlink("..", "../.."),
		dir("d", 0o700), hardlink("d/", "/d"), file("d/f", "x")))
	if id == "" {
		t.Fatal("it is refused")
	}
	w.compare(t, id)
	for _, s := range []*Store{w.directory, w.erofs} {
		if got := shown(t, s, "d/f", id); got != "x" {
			t.Errorf("content %q", got)
		}
	}
}

// Both drivers show the same files for tars that GNU tar writes of random trees, including sparse
// files.
func TestDriversAgreeOnTars(t *testing.T) {
	w := newTwin(t)
	var chain []digest.Digest
	for seed := range uint64(4) {
		root := t.TempDir()
		corpus(t, root, seed)
		sparseFiles(t, root)
		chain = append(chain, w.create(t, gnuTar(t, root, "--sparse")))
		w.compare(t, chain...)
	}
}

// gnuTar is the tar of a directory by GNU tar.
func gnuTar(t testing.TB, dir string, args ...string) []byte {
	t.Helper()
	data, err := exec.Command("tar", append([]string{"-C", dir, "--numeric-owner", "--xattrs", "--xattrs-include=*", "--format=pax", "-c", "."}, args...)...).Output()
	testutil.Must(t, err)
	return data
}
