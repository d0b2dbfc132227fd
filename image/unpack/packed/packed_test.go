package packed

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/image/tree"
)

// layer is a tree with its data: f and its second name b, a/g in front of it, an empty file, a whiteout, a link to a layer below.
func layer() (*tree.Node, []byte) {
	file := func(block uint32, size int64) *tree.Node {
		return &tree.Node{Mode: unix.S_IFREG | 0o644, Data: tree.Data{Block: block, Size: size}}
	}
	root, dir, f := tree.NewDir(), tree.NewDir(), file(1, 3)
	dir.Children = map[string]*tree.Node{"g": file(0, 2), "w": {Mode: unix.S_IFCHR}}
	root.Children = map[string]*tree.Node{"a": dir, "b": f, "empty": file(2, 0), "f": f, "l": {Target: "below"}}
	data := make([]byte, 2*tree.BlockSize)
	copy(data, "gg")
	copy(data[tree.BlockSize:], "fff")
	return root, data
}

// blobOf is the blob of a layer.
func blobOf(t *testing.T, root *tree.Node, data []byte) []byte {
	t.Helper()
	var encoded bytes.Buffer
	if err := tree.Encode(&encoded, root); err != nil {
		t.Fatal(err)
	}
	var files [2]*os.File
	for i, content := range [][]byte{data, encoded.Bytes()} {
		f, err := os.CreateTemp(t.TempDir(), "")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(content); err != nil {
			t.Fatal(err)
		}
		files[i] = f
	}
	whole, size, err := Blob(files[0], files[1])
	if err != nil {
		t.Fatal(err)
	}
	blob, err := io.ReadAll(whole)
	if err != nil || int64(len(blob)) != size {
		t.Fatalf("%d bytes, said to be %d, %v", len(blob), size, err)
	}
	return blob
}

// entries reads a blob: each entry by its path, with its content or first name.
func entries(blob []byte, memory int64) (list []string, err error) {
	r, err := NewReader(bytes.NewReader(blob), memory)
	if err != nil {
		return nil, err
	}
	err = r.Each(func(e Entry) error {
		text := e.Path()
		switch {
		case e.First != nil:
			text += " is " + e.First.Path()
		case e.Content != nil:
			content, err := io.ReadAll(e.Content)
			if err != nil {
				return err
			}
			text += ": " + string(content)
		}
		list = append(list, text)
		return nil
	})
	return list, err
}

func TestEach(t *testing.T) {
	root, data := layer()
	list, err := entries(blobOf(t, root, data), 1<<20)
	want := []string{"", "a", "a/w", "empty: ", "l", "a/g: gg", "b: fff", "f is b"}
	if err != nil || !slices.Equal(list, want) {
		t.Errorf("%q, %v; want %q", list, err, want)
	}
}

// Whatever a blob is, it is either read to its end or refused with the error that the package doc says.
func TestRefused(t *testing.T) {
	root, data := layer()
	good := blobOf(t, root, data)
	large := slices.Clone(good)
	binary.BigEndian.PutUint64(large[len(magic):], 1<<40)
	root.Children["a"].Children["g"].Data.Block = 1 // as f
	shared := blobOf(t, root, data)
	for name, c := range map[string]struct {
		blob   []byte
		memory int64
		want   error
	}{
		"nothing":         {nil, 1 << 20, io.ErrUnexpectedEOF},
		"short":           {good[:len(magic)+3], 1 << 20, io.ErrUnexpectedEOF},
		"a tar":           {[]byte(strings.Repeat("x", 512)), 1 << 20, tree.ErrMalformed},
		"half a tree":     {good[:len(magic)+16+20], 1 << 20, tree.ErrMalformed},
		"no data":         {good[:len(good)-len(data)], 1 << 20, io.ErrUnexpectedEOF},
		"not all data":    {good[:len(good)-tree.BlockSize+1], 1 << 20, io.ErrUnexpectedEOF},
		"a large tree":    {large, 1 << 20, tree.ErrTooLarge},
		"a little memory": {good, 300, tree.ErrTooLarge},
		"data of another": {shared, 1 << 20, tree.ErrMalformed},
	} {
		if _, err := entries(c.blob, c.memory); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}
