package tree

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var limit = Limit{Bytes: 1 << 20, Memory: 1 << 20, Blocks: 1 << 30}

const (
	goodCapability = "\x00\x00\x00\x02" + "\x00\x20\x00\x00" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00"
	goodACL        = "\x02\x00\x00\x00" + "\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\xe8\x03\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
		"\x10\x00\x07\x00\xff\xff\xff\xff" + "\x20\x00\x01\x00\xff\xff\xff\xff"
)

// sample has a node of every kind.
func sample() *Node {
	file := &Node{
		Mode: unix.S_IFREG | 0o4755, UID: math.MaxUint32 - 1, GID: 7, Sec: -5, Nsec: 999_999_999,
		Xattrs: []Xattr{{"security.capability", goodCapability}, {"user.a", ""}},
		Data:   Data{Size: 5 << 30, Block: 9, ChunkBits: ChunkBitsOf(5 << 30), Holes: bytes.Repeat([]byte{1}, 320)},
	}
	root := NewDir()
	root.Opaque = true
	root.Children = map[string]*Node{
		"a": file, "b": file, "c": {Mode: unix.S_IFCHR}, "d": {Target: "x/y"}, "e": {Mode: unix.S_IFLNK | 0o777, Target: "t"},
		"f": {Mode: unix.S_IFBLK | 0o600, Major: maxMajor, Minor: maxMinor}, "g": {Mode: unix.S_IFIFO}, "h": {Mode: unix.S_IFREG},
		"i": {Mode: unix.S_IFDIR | 0o1777, Implied: true, Children: map[string]*Node{"again": file}}, "j": {Mode: unix.S_IFCHR, Minor: 1},
	}
	return root
}

func encoded(t testing.TB, n *Node) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := Encode(&b, n); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Decode returns the encoded tree, including hard links.
func TestDecode(t *testing.T) {
	data := encoded(t, sample())
	got, memory, err := Decode(bytes.NewReader(data), 0, limit)
	if least := int64(12*NodeMemory + 2*XattrMemory); err != nil || memory <= least || memory > limit.Memory {
		t.Fatal(memory, err)
	}
	if again := encoded(t, got); !bytes.Equal(again, data) {
		t.Errorf("%q\n%q", again, data)
	}
	if got.Children["a"] != got.Children["i"].Children["again"] || got.Children["a"].Data.Block != 9 || !got.Children["i"].Implied || !got.Opaque {
		t.Error("not what it was")
	}
}

// A tree that no filesystem can have, or that is beyond the limits, is refused.
func TestDecodeRefuses(t *testing.T) {
	with := func(change func(root, file *Node)) []byte {
		root := sample()
		change(root, root.Children["a"])
		return encoded(t, root)
	}
	cases := map[string][]byte{
		"nothing":         nil,
		"another version": []byte("berth tree 2\n"),
		"more behind":     append(encoded(t, sample()), 0),
		"a file as root":  encoded(t, &Node{Mode: unix.S_IFREG}),
		"owner":           with(func(_, f *Node) { f.UID = math.MaxUint32 }),
		"nanoseconds":     with(func(_, f *Node) { f.Nsec = 1e9 }),
		"behind the data": with(func(_, f *Node) { f.Data.Block = 1<<30 - 3 }),
		"holes":           with(func(_, f *Node) { f.Data.Holes = f.Data.Holes[1:] }),
		"chunks":          with(func(_, f *Node) { f.Data.ChunkBits++ }),
		"a capability":    with(func(_, f *Node) { f.Xattrs = []Xattr{{capability, goodCapability[1:]}} }),
		"version 1":       with(func(_, f *Node) { f.Xattrs = []Xattr{{capability, "\x00\x00\x00\x01" + goodCapability[4:]}} }),
		"an ACL":          with(func(_, f *Node) { f.Xattrs = []Xattr{{AccessACL, goodACL[:len(goodACL)-8]}} }),
		"ACL's version":   with(func(_, f *Node) { f.Xattrs = []Xattr{{AccessACL, "\x01" + goodACL[1:]}} }),
		"a mode as ACL":   with(func(_, f *Node) { f.Xattrs = []Xattr{{AccessACL, goodACL[:4]}} }),
		"file's default":  with(func(_, f *Node) { f.Xattrs = []Xattr{{DefaultACL, goodACL}} }),
		"symlink's user":  with(func(r, _ *Node) { r.Children["e"].Xattrs = []Xattr{{"user.a", ""}} }),
		"overlay's xattr": with(func(_, f *Node) { f.Xattrs = []Xattr{{"trusted.overlay.redirect", "/"}} }),
		"overlay's user":  with(func(_, f *Node) { f.Xattrs = []Xattr{{"user.overlay.redirect", "/"}} }),
		"xattrs' order":   with(func(_, f *Node) { f.Xattrs = []Xattr{{"user.b", ""}, {"user.a", ""}} }),
		"large xattrs": with(func(_, f *Node) {
			v := strings.Repeat("x", MaxXattrValue)
			f.Xattrs = []Xattr{{"user.a", v}, {"user.b", v}, {"user.c", v}, {"user.d", v}}
		}),
		"slash":          with(func(r, f *Node) { r.Children["x/y"] = f }),
		"dots":           with(func(r, f *Node) { r.Children[".."] = f }),
		"zero":           with(func(r, f *Node) { r.Children["x\x00"] = f }),
		"long name":      with(func(r, f *Node) { r.Children[strings.Repeat("n", 256)] = f }),
		"minor":          with(func(r, _ *Node) { r.Children["f"].Minor++ }),
		"empty target":   with(func(r, _ *Node) { r.Children["e"].Target = "" }),
		"zero in target": with(func(r, _ *Node) { r.Children["e"].Target = "a\x00" }),
		"deep": with(func(r, _ *Node) {
			for range 17 {
				d := NewDir()
				r.Children[strings.Repeat("d", 250)] = d
				r = d
			}
		}),
	}
	for name, data := range cases {
		if _, _, err := Decode(bytes.NewReader(data), 0, limit); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	data := encoded(t, sample())
	for n := range data {
		if _, _, err := Decode(bytes.NewReader(data[:n]), 0, limit); err == nil {
			t.Errorf("%d bytes of %d are a tree", n, len(data))
		}
	}
	for _, l := range []Limit{{Bytes: int64(len(data)) - 1, Memory: 1 << 20, Blocks: 1 << 30}, {Bytes: 1 << 20, Memory: 11 * NodeMemory, Blocks: 1 << 30}} {
		if _, _, err := Decode(bytes.NewReader(data), 0, l); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%+v: %v", l, err)
		}
	}
}

// Extended attributes that Linux accepts are decoded.
func TestDecodeXattrs(t *testing.T) {
	root := sample()
	root.Children["a"].Xattrs = []Xattr{{capability, goodCapability}, {AccessACL, goodACL}, {"user.a", "\x00"}}
	root.Children["i"].Xattrs = []Xattr{{AccessACL, goodACL}, {DefaultACL, goodACL}}
	if _, _, err := Decode(bytes.NewReader(encoded(t, root)), 0, limit); err != nil {
		t.Error(err)
	}
}

// Every step of resolving a hard link costs effort, also steps through symlinks without a target.
func TestMergerPaysEffort(t *testing.T) {
	root := NewDir()
	root.Children["d"] = NewDir()
	root.Children["s"] = &Node{Mode: unix.S_IFLNK | 0o777, Target: strings.Repeat("x/", 2000)}
	links := NewDir()
	const names = 100
	for i := range names {
		links.Children[strings.Repeat("l", i+1)] = &Node{Target: "s/f"}
	}
	paid, enough := 0, errors.New("enough")
	m := &Merger{Pay: func(steps int) error {
		if paid += steps; paid > names*2000/namesPerStep {
			return enough
		}
		return nil
	}}
	if err := m.Add(root); err != nil {
		t.Fatal(err)
	}
	if err := m.Add(links); !errors.Is(err, enough) {
		t.Errorf("%d steps: %v", paid, err)
	}
}

// Adding the names of links costs effort, too, but not for each parent directory.
func TestPlacingPaysEffort(t *testing.T) {
	below, layer := NewDir(), NewDir()
	below.Children["f"] = &Node{Mode: unix.S_IFREG}
	dir := layer
	for range 100 {
		dir.Children["d"] = NewDir()
		dir = dir.Children["d"]
	}
	const links = 50
	for i := range links {
		dir.Children[fmt.Sprint(i)] = &Node{Target: "f"}
	}
	paid := 0
	m := &Merger{Pay: func(steps int) error { paid += steps; return nil }}
	for _, l := range []*Node{below, layer} {
		if err := m.Add(l); err != nil {
			t.Fatal(err)
		}
	}
	if paid != 2*links {
		t.Errorf("%d steps for %d links, which are found and placed", paid, links)
	}
}

// Errors of links name the link, although the links do not store their paths.
func TestMergerNamesLinks(t *testing.T) {
	root := NewDir()
	dir := root
	for range 16 {
		next := NewDir()
		dir.Children[strings.Repeat("d", 200)] = next
		dir = next
	}
	dir.Children["b"], dir.Children["a"] = &Node{Target: "no/where"}, &Node{Target: "f"}
	m := &Merger{Pay: func(int) error { return nil }}
	below := NewDir()
	below.Children["f"] = &Node{Mode: unix.S_IFREG}
	if err := m.Add(below); err != nil {
		t.Fatal(err)
	}
	err := m.Add(root)
	if !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), `to "no/where"`) || !strings.Contains(err.Error(), `hard link "ddd`) {
		t.Error(err)
	}
	delete(dir.Children, "b")
	dir.Children["a"] = &Node{Target: "f"} // the merge that failed has taken the nodes over
	m = &Merger{Pay: m.Pay}
	for _, layer := range []*Node{below, root} {
		if err := m.Add(layer); err != nil {
			t.Fatal(err)
		}
	}
	at := m.Root()
	for range 16 {
		at = at.Children[strings.Repeat("d", 200)]
	}
	if at.Children["a"] != below.Children["f"] {
		t.Error("the link is not the file")
	}
}

// FuzzDecode decodes arbitrary bytes. A valid tree is merged and encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	f.Add(encoded(f, sample()))
	f.Add(encoded(f, NewDir()))
	f.Fuzz(func(t *testing.T, data []byte) {
		root, memory, err := Decode(bytes.NewReader(data), 0, limit)
		if err != nil {
			return
		}
		if memory > limit.Memory {
			t.Errorf("%d bytes of memory", memory)
		}
		again := encoded(t, root)
		if second, _, err := Decode(bytes.NewReader(again), 0, limit); err != nil || !bytes.Equal(encoded(t, second), again) {
			t.Errorf("decoded again: %v", err)
		}
		steps := 0
		m := &Merger{Pay: func(n int) error {
			if steps += n; steps > 1<<20 {
				return ErrTooLarge
			}
			return nil
		}}
		if m.Add(sample()) == nil {
			t.Error("a link to nowhere")
		}
		m = &Merger{Pay: m.Pay}
		for range 2 {
			if err := m.Add(root); err != nil {
				return
			}
			checkMerged(t, m.Root())
			if root, _, err = Decode(bytes.NewReader(data), 1, limit); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func checkMerged(t *testing.T, n *Node) {
	for name, child := range n.Children {
		if child.IsWhiteout() || child.IsLink() || child.Opaque || child.Implied {
			t.Errorf("%q is %+v", name, child)
		}
		checkMerged(t, child)
	}
}
