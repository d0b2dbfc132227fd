package erofs

import (
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"berth/image/tree"
)

const (
	// MaxNames is how many names the layers of one image have at most, together, and those that a Merger works on at a
	// time: one in memory takes some 400 bytes.
	MaxNames = 1 << 20
	// maxTreeBytes bounds the trees of one image on disk, for the names and extended attributes in them.
	maxTreeBytes = 64 << 20
	// leastName is less than any name takes on disk.
	leastName = 3
)

// Files are those of a layer: its tree (tree.Encode), of which nothing is believed, and its data.
type Files struct{ Tree, Data string }

// Merger merges layers. What all its merges have in memory at a time is bounded.
type Merger struct {
	names *semaphore.Weighted // that may be in memory
	most  int64               // of these
}

// NewMerger returns a Merger that is at nothing.
func NewMerger() *Merger { return newMerger(MaxNames) }

func newMerger(names int64) *Merger { return &Merger{semaphore.NewWeighted(names), names} }

// Merge writes the image of layers, lowest first, as tree.Merger merges them, and returns those whose data it refers to, by index: its
// devices, in order. It waits for other merges where together they would need too much memory. pay is tree.Merger's. tree.ErrTooLarge
// if the layers have too many names or too long ones. It ends with ctx, and with its cause.
func (m *Merger) Merge(ctx context.Context, out io.Writer, layers []Files, pay func(steps int) error) (used []int, err error) {
	bytes, err := treeBytes(layers)
	if err != nil {
		return nil, err
	}
	names := min(bytes/leastName, m.most) // or fewer
	if err := m.names.Acquire(ctx, names); err != nil {
		return nil, fmt.Errorf("wait for other images that are merged: %w", context.Cause(ctx))
	}
	defer m.names.Release(names)
	root, blocks, err := mergeTrees(ctx, layers, m.most, pay)
	if err != nil {
		return nil, err
	}
	used = number(root, len(layers))
	devices := make([]int64, 0, len(used))
	for _, i := range used {
		devices = append(devices, blocks[i])
	}
	_, err = Write(&pacedWriter{ctx, out}, root, devices)
	return used, err
}

// treeBytes is how large the trees are on disk.
func treeBytes(layers []Files) (sum int64, err error) {
	for _, files := range layers {
		st, err := os.Stat(files.Tree)
		if err != nil {
			return 0, err
		}
		if sum += st.Size(); sum > maxTreeBytes {
			return 0, tree.ErrTooLarge
		}
	}
	return sum, nil
}

// mergeTrees returns the merged tree of layers with so many names at most, and how many blocks of data each layer has.
func mergeTrees(ctx context.Context, layers []Files, left int64, pay func(steps int) error) (_ *tree.Node, blocks []int64, err error) {
	m := &tree.Merger{Pay: pay}
	blocks = make([]int64, len(layers))
	for i, files := range layers {
		var root *tree.Node
		var names int64
		if root, names, blocks[i], err = files.read(ctx, i, left); err != nil {
			return nil, nil, fmt.Errorf("tree of layer %d: %w", i, err)
		}
		left -= names
		if err := m.Add(root); err != nil {
			return nil, nil, err
		}
	}
	return m.Root(), blocks, nil
}

// Read returns the tree of one layer.
func (f Files) Read() (*tree.Node, error) {
	root, _, _, err := f.read(context.Background(), 0, MaxNames)
	return root, err
}

// read returns the tree with its data in the given device, how many names it has, and how many blocks its data has.
func (f Files) read(ctx context.Context, device int, most int64) (root *tree.Node, names, blocks int64, err error) {
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
	root, names, err = tree.Decode(&pacedReader{ctx, in}, device, tree.Limit{Bytes: maxTreeBytes, Nodes: most, Blocks: blocks})
	return root, names, blocks, err
}

// pacedReader reads until ctx ends.
type pacedReader struct {
	ctx context.Context
	in  io.Reader
}

func (r *pacedReader) Read(b []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.in.Read(b)
}

// pacedWriter writes until ctx ends.
type pacedWriter struct {
	ctx context.Context
	out io.Writer
}

func (w *pacedWriter) Write(b []byte) (int, error) {
	if w.ctx.Err() != nil {
		return 0, context.Cause(w.ctx)
	}
	return w.out.Write(b)
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
