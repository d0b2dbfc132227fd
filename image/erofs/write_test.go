package erofs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/tree"
	"berth/internal/rootfs"
	"berth/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.MainInMountNamespace(m)) }

// maker makes random trees with data.
type maker struct {
	*rand.Rand
	files   []*tree.Node
	data    []bytes.Buffer
	content map[*tree.Node][]byte
}

func newMaker(seed uint64, devices int) *maker {
	return &maker{Rand: rand.New(rand.NewPCG(seed, 7)), data: make([]bytes.Buffer, devices), content: map[*tree.Node][]byte{}}
}

func (m *maker) name() string {
	const chars = "!#+-.09AZaz_~\xff\x01 "
	long := []int{1, 3, 12, 40, 255}
	name := make([]byte, 1+m.IntN(long[m.IntN(len(long))]))
	for i := range name {
		name[i] = chars[m.IntN(len(chars))]
	}
	return string(name)
}

func (m *maker) text(most int) string {
	b := make([]byte, 0, most+8)
	for n := m.IntN(most + 1); ; b = binary.LittleEndian.AppendUint64(b, m.Uint64()) {
		if len(b) >= n {
			return string(b[:n])
		}
	}
}

func (m *maker) attributes(n *tree.Node) *tree.Node {
	n.Mode |= m.Uint32N(0o10000)
	if n.Type() == unix.S_IFLNK {
		n.Mode |= 0o777
	}
	n.UID, n.GID, n.Sec, n.Nsec = m.Uint32()>>1, m.Uint32()>>1, m.Int64N(1<<40)-1<<33, m.Uint32N(1e9)
	if t := n.Type(); m.IntN(6) == 0 && (t == unix.S_IFREG || t == unix.S_IFDIR) {
		names := map[string]bool{}
		for range 1 + m.IntN(5) {
			names[fmt.Sprintf("user.%x", m.Uint32N(1<<m.IntN(20)))] = true
		}
		for _, name := range slices.Sorted(func(yield func(string) bool) {
			for name := range names {
				if !yield(name) {
					return
				}
			}
		}) {
			n.Xattrs = append(n.Xattrs, tree.Xattr{Name: name, Value: m.text([]int{4, 100, 9000, tree.MaxXattrValue / 4}[m.IntN(4)])})
		}
	}
	return n
}

func (m *maker) file() *tree.Node {
	n := m.attributes(&tree.Node{Mode: unix.S_IFREG})
	content := []byte(m.text([]int{0, 10, 4096, 20_000}[m.IntN(4)]))
	if m.IntN(40) == 0 { // holes
		content = make([]byte, m.IntN(1<<m.IntN(24)))
		n.Data.Size = int64(len(content))
		n.Data.ChunkBits = tree.ChunkBitsOf(n.Data.Size)
		n.Data.Holes = bytes.Repeat([]byte{0xff}, int(n.Data.Chunks()+7)/8)
		for range m.IntN(3) {
			if len(content) > 0 {
				at := m.IntN(len(content))
				content[at] = 'x'
				chunk := at / tree.BlockSize >> n.Data.ChunkBits
				n.Data.Holes[chunk/8] &^= 1 << (chunk % 8)
			}
		}
	}
	n.Data.Size, n.Data.Device = int64(len(content)), m.IntN(len(m.data))
	data := &m.data[n.Data.Device]
	n.Data.Block = uint32(data.Len() / tree.BlockSize)
	data.Write(content)
	data.Write(make([]byte, roundUp(int64(data.Len()), blockSize)-int64(data.Len())))
	m.content[n] = content
	m.files = append(m.files, n)
	return n
}

func (m *maker) node(depth int) *tree.Node {
	if depth > 0 && m.IntN(3) == 0 {
		return m.directory(depth-1, m.IntN(20))
	}
	switch m.IntN(8) {
	case 0:
		target := m.text([]int{1, 100, 4094}[m.IntN(3)])
		return m.attributes(&tree.Node{Mode: unix.S_IFLNK, Target: "t" + strings.ReplaceAll(target, "\x00", "x")})
	case 1:
		return m.attributes(&tree.Node{Mode: unix.S_IFIFO})
	case 2:
		return m.attributes(&tree.Node{Mode: []uint32{unix.S_IFBLK, unix.S_IFCHR}[m.IntN(2)], Major: 1 + m.Uint32N(0xfff), Minor: m.Uint32N(1 << 20)})
	case 3:
		if len(m.files) > 0 {
			return m.files[m.IntN(len(m.files))]
		}
	}
	return m.file()
}

func (m *maker) directory(depth, entries int) *tree.Node {
	n := m.attributes(&tree.Node{Mode: unix.S_IFDIR, Children: map[string]*tree.Node{}})
	for range entries {
		if name := m.name(); name != "." && name != ".." && n.Children[name] == nil {
			n.Children[name] = m.node(depth)
		}
	}
	return n
}

// written writes the image and its data files, and returns the layer.
func (m *maker) written(t testing.TB, root *tree.Node) rootfs.Layer {
	t.Helper()
	dir := testutil.DiskDir(t)
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, "image")}
	var blocks []int64
	for i := range m.data {
		path := filepath.Join(dir, fmt.Sprint("data", i))
		testutil.Must(t, os.WriteFile(path, m.data[i].Bytes(), 0o600))
		l.Data = append(l.Data, path)
		blocks = append(blocks, int64(m.data[i].Len()/blockSize))
	}
	var image bytes.Buffer
	size, err := Write(&image, root, blocks)
	testutil.Must(t, err)
	if size != int64(image.Len()) || size%blockSize != 0 {
		t.Errorf("%d bytes, said to be %d", image.Len(), size)
	}
	testutil.Must(t, os.WriteFile(l.Path, image.Bytes(), 0o600))
	return l
}

// fsck has erofs-utils check the image, which reads all of it.
func fsck(t testing.TB, l rootfs.Layer) {
	t.Helper()
	args := []string{"--extract"}
	for _, d := range l.Data {
		args = append(args, "--device="+d)
	}
	out, err := exec.Command("fsck.erofs", append(args, l.Path)...).CombinedOutput()
	if strings.Contains(string(out), "unrecognized option") { // before erofs-utils 1.5 it reads the metadata only
		out, err = exec.Command("fsck.erofs", l.Path).CombinedOutput()
	}
	if err != nil {
		t.Errorf("fsck.erofs: %v\n%s", err, out)
	}
}

// compare compares the mounted image with a tree.
func (m *maker) compare(t testing.TB, path string, n *tree.Node, seen map[*tree.Node]uint64) {
	t.Helper()
	var st unix.Stat_t
	testutil.Must(t, unix.Lstat(path, &st))
	size := n.Data.Size
	switch n.Type() {
	case unix.S_IFLNK:
		size = int64(len(n.Target))
	case unix.S_IFDIR:
		size = st.Size
	}
	dev := uint64(0)
	if n.Major > 0 {
		dev = unix.Mkdev(n.Major, n.Minor)
	}
	if st.Mode != n.Mode || st.Uid != n.UID || st.Gid != n.GID || st.Mtim.Sec != n.Sec || st.Mtim.Nsec != int64(n.Nsec) || st.Size != size || st.Rdev != dev {
		t.Errorf("%q is %+v, not %+v", path, st, n)
	}
	if ino, ok := seen[n]; ok && ino != st.Ino {
		t.Errorf("%q is inode %d and %d", path, st.Ino, ino)
	}
	seen[n] = st.Ino
	for _, x := range n.Xattrs {
		value := make([]byte, tree.MaxXattrValue)
		got, err := unix.Lgetxattr(path, x.Name, value)
		if err != nil || string(value[:max(got, 0)]) != x.Value {
			t.Errorf("%q has %s of %d bytes, not %d: %v", path, x.Name, got, len(x.Value), err)
		}
	}
	names, err := unix.Llistxattr(path, make([]byte, 64<<10))
	testutil.Must(t, err)
	if (names > 0) != (len(n.Xattrs) > 0) {
		t.Errorf("%q lists %d bytes of attributes", path, names)
	}
	m.compareContent(t, path, n, seen)
	if n.IsDir() {
		if want := 2 + len(slices.Collect(func(yield func(string) bool) {
			for name, child := range n.Children {
				if child.IsDir() && !yield(name) {
					return
				}
			}
		})); int(st.Nlink) != want {
			t.Errorf("%q has %d links, not %d", path, st.Nlink, want)
		}
	}
}

func (m *maker) compareContent(t testing.TB, path string, n *tree.Node, seen map[*tree.Node]uint64) {
	t.Helper()
	switch n.Type() {
	case unix.S_IFREG:
		got, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, m.content[n]) {
			t.Errorf("%q has other content (%d bytes): %v", path, len(got), err)
		}
	case unix.S_IFLNK:
		if got, err := os.Readlink(path); err != nil || got != n.Target {
			t.Errorf("%q leads to %q, %v", path, got, err)
		}
	case unix.S_IFDIR:
		entries, err := os.ReadDir(path)
		testutil.Must(t, err)
		if len(entries) != len(n.Children) {
			t.Errorf("%q has %d entries, not %d", path, len(entries), len(n.Children))
		}
		for name, child := range n.Children {
			m.compare(t, filepath.Join(path, name), child, seen)
		}
	}
}

// attached mounts the layer at a path.
func attached(t testing.TB, l rootfs.Layer) string {
	t.Helper()
	mount, err := l.Open()
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: the kernel's part, fsck.erofs has read the image: ", err)
	}
	testutil.Must(t, err)
	defer mount.Close()
	place := t.TempDir()
	testutil.Must(t, rootfs.Attach(mount, place))
	t.Cleanup(func() { testutil.Must(t, unix.Unmount(place, 0)) })
	return place
}

// The kernel and erofs-utils read back the tree that was written.
func TestWrite(t *testing.T) {
	for seed := range uint64(12) {
		m := newMaker(seed, 1+int(seed%3)*12)
		root := m.directory(5, 12)
		l := m.written(t, root)
		fsck(t, l)
		m.compare(t, attached(t, l), root, map[*tree.Node]uint64{})
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
}

// Directories with many blocks, with one block that is exactly full, and with only the two entries
// that all directories have.
func TestWriteDirectories(t *testing.T) {
	m := newMaker(1, 1)
	root := m.directory(0, 0)
	for _, entries := range []int{0, 1, 15, 16, 150, 151, 152, 3000} {
		dir := m.directory(0, 0)
		for i := range entries {
			dir.Children[fmt.Sprintf("entry-%0*d", 9, i)] = m.attributes(&tree.Node{Mode: unix.S_IFIFO})
		}
		root.Children[fmt.Sprint(entries)] = dir
	}
	full := m.directory(0, 0)
	for i := range 14 { // 27 bytes for . and .., 14 times 267, 331 left
		full.Children[fmt.Sprintf("%0255d", i)] = m.file()
	}
	full.Children[strings.Repeat("x", 255)] = m.file()
	full.Children[strings.Repeat("y", 331-267-direntSize)] = m.file()
	root.Children["full"] = full
	l := m.written(t, root)
	fsck(t, l)
	m.compare(t, attached(t, l), root, map[*tree.Node]uint64{})
}

// A file of more than a chunk can hold is in several.
func TestWriteLargeFile(t *testing.T) {
	const tib = 1 << 40
	root := tree.NewDir()
	file := &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Size: 9*tib + 5, Block: 7}}
	root.Children["file"] = file
	devices := []int64{7 + file.Data.Blocks()}
	var image bytes.Buffer
	_, err := Write(&image, root, devices)
	testutil.Must(t, err)
	readsBack(t, image.Bytes(), root, devices)
	dir := testutil.DiskDir(t)
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: filepath.Join(dir, "image"), Data: []string{filepath.Join(dir, "data")}}
	testutil.Must(t, os.WriteFile(l.Path, image.Bytes(), 0o600))
	data, err := os.Create(l.Data[0])
	testutil.Must(t, err)
	defer data.Close()
	const text, at = "far away", 8*tib + 4000
	if _, err := data.WriteAt([]byte(text), 7*blockSize+at); errors.Is(err, unix.EFBIG) {
		t.Skip("NOT TESTED: the kernel's part, for this filesystem has no files that large")
	} else {
		testutil.Must(t, err)
	}
	testutil.Must(t, data.Truncate(devices[0]*blockSize))
	f, err := os.Open(filepath.Join(attached(t, l), "file"))
	testutil.Must(t, err)
	defer f.Close()
	got := make([]byte, len(text))
	_, err = f.ReadAt(got, at)
	if testutil.Must(t, err); string(got) != text {
		t.Errorf("%q", got)
	}
}

// The same tree gives the same image.
func TestWriteIsReproducible(t *testing.T) {
	var images [2]bytes.Buffer
	for i := range images {
		m := newMaker(5, 2)
		_, err := Write(&images[i], m.directory(5, 20), []int64{1 << 20, 1 << 20})
		testutil.Must(t, err)
	}
	if !bytes.Equal(images[0].Bytes(), images[1].Bytes()) {
		t.Error("two images differ")
	}
}

// Write refuses nodes that an image cannot have, and files whose data is outside of the devices.
func TestWriteRefuses(t *testing.T) {
	file := func(block uint32, size int64, device int) *tree.Node {
		return &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Size: size, Block: block, Device: device}}
	}
	for name, n := range map[string]*tree.Node{
		"whiteout": {Mode: unix.S_IFCHR}, "link": {Target: "x"}, "socket": {Mode: unix.S_IFSOCK},
		"behind the end": file(1, 2*tree.BlockSize, 0), "no device": file(0, 1, 1), "negative device": file(0, 1, -1),
	} {
		root := tree.NewDir()
		root.Children["x"] = n
		if _, err := Write(&bytes.Buffer{}, root, []int64{2}); err == nil {
			t.Errorf("%s: written", name)
		}
	}
	if _, err := Write(&bytes.Buffer{}, &tree.Node{Mode: unix.S_IFREG}, nil); err == nil {
		t.Error("a root that is a file")
	}
	if _, err := Write(fullDisk{}, tree.NewDir(), nil); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("a disk that takes nothing: %v", err)
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, fs.ErrInvalid }

// BenchmarkWrite writes the image of 24,000 files.
func BenchmarkWrite(b *testing.B) {
	root := tree.NewDir()
	for d := range 600 {
		dir := tree.NewDir()
		for f := range 39 {
			dir.Children[fmt.Sprintf("file-%d", f)] = &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Size: 10000, Block: uint32(d*39+f) * 3}}
		}
		root.Children[fmt.Sprintf("directory-%d", d)] = dir
	}
	b.ReportAllocs()
	for b.Loop() {
		var out bytes.Buffer
		size, err := Write(&out, root, []int64{1 << 20})
		testutil.Must(b, err)
		b.SetBytes(size)
	}
}
