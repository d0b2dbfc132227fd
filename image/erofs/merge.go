package erofs

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"berth/image/tree"
)

// Bounds of what is merged in one process: a node in memory takes some 400 bytes.
const (
	maxTreeBytes = 64 << 20 // of one layer's tree, on disk
	// MaxNames is how many names the layers of one image have at most, together.
	MaxNames = 1 << 20
)

// Files are those of a layer: its tree (tree.Encode), of which nothing is believed, and its data.
type Files struct{ Tree, Data string }

// Merge writes the image of layers, lowest first, as tree.Merger merges them, and returns those whose data it refers to, by index: its
// devices, in order. pay is Merger's. tree.ErrTooLarge if they have too many names.
func Merge(out io.Writer, layers []Files, pay func() error) (used []int, err error) {
	m := &tree.Merger{Pay: pay}
	blocks := make([]int64, len(layers))
	left := int64(MaxNames)
	for i, files := range layers {
		var root *tree.Node
		var names int64
		if root, names, blocks[i], err = files.read(i, left); err != nil {
			return nil, fmt.Errorf("tree of layer %d: %w", i, err)
		}
		left -= names
		if err := m.Add(root); err != nil {
			return nil, err
		}
	}
	used = number(m.Root(), len(layers))
	devices := make([]int64, 0, len(used))
	for _, i := range used {
		devices = append(devices, blocks[i])
	}
	_, err = Write(out, m.Root(), devices)
	return used, err
}

// Read returns the tree of one layer.
func (f Files) Read() (*tree.Node, error) {
	root, _, _, err := f.read(0, MaxNames)
	return root, err
}

// read returns the tree with its data in the given device, how many names it has, and how many blocks its data has.
func (f Files) read(device int, most int64) (root *tree.Node, names, blocks int64, err error) {
	st, err := os.Stat(f.Data)
	if err != nil {
		return nil, 0, 0, err
	}
	in, err := os.Open(f.Tree)
	if err != nil {
		return nil, 0, 0, err
	}
	defer in.Close() // read only
	blocks = st.Size() / tree.BlockSize
	root, names, err = tree.Decode(in, device, tree.Limit{Bytes: maxTreeBytes, Nodes: most, Blocks: blocks})
	return root, names, blocks, err
}

// number finds out which layers' data a tree refers to, and numbers these anew.
func number(root *tree.Node, layers int) (used []int) {
	files := make([][]*tree.Node, layers)
	known := map[*tree.Node]bool{}
	var walk func(n *tree.Node)
	walk = func(n *tree.Node) {
		for _, child := range n.Children {
			walk(child)
		}
		if n.Type() == unix.S_IFREG && n.Data.Size > 0 && !known[n] {
			known[n] = true
			files[n.Data.Device] = append(files[n.Data.Device], n)
		}
	}
	walk(root)
	for layer, list := range files {
		if len(list) == 0 {
			continue
		}
		for _, n := range list {
			n.Data.Device = len(used)
		}
		used = append(used, layer)
	}
	return used
}
