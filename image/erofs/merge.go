package erofs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"berth/image/tree"
)

const (
	// MaxMemory limits the memory for merging the layers of one image, and of all concurrent merges
	// of a Merger. It suffices for 140,000 files.
	MaxMemory = 64 << 20
	// maxTreeBytes limits the total size of the tree files of one image. Names and extended
	// attributes take memory in addition to the nodes.
	maxTreeBytes = 64 << 20
	// usualMemory is the memory of most trees for each byte on disk. A whiteout takes ten times as
	// much.
	usualMemory = 16
	leastMemory = 64 << 10 // small trees take more than usualMemory
)

// Files are the files of a layer: its tree (tree.Encode), which is not trusted, and its data.
type Files struct{ Tree, Data string }

// Merger merges layers and limits the memory of all its merges together.
type Merger struct {
	memory *semaphore.Weighted
	most   int64 // the size of memory
}

// NewMerger returns a Merger with so many bytes of memory, at most MaxMemory. 0 means MaxMemory.
func NewMerger(memory int64) *Merger {
	if memory = min(memory, MaxMemory); memory == 0 {
		memory = MaxMemory
	}
	return &Merger{semaphore.NewWeighted(memory), memory}
}

// Memory returns the limit of the merges' memory in bytes.
func (m *Merger) Memory() int64 { return m.most }

// Merge merges layers, lowest first, as tree.Merger does, and writes the image. It returns the
// indexes of the layers whose data the image refers to: its devices, in order. It waits for memory
// that other merges use. See tree.Merger for pay. The error is tree.ErrTooLarge for too many or too
// long names or attributes, and ctx's cause when ctx is done.
func (m *Merger) Merge(
	ctx context.Context, out io.Writer, layers []Files, pay func(steps int) error,
) (used []int, err error) {
	bytes, err := treeBytes(layers)
	if err != nil {
		return nil, err
	}
	usual := min(bytes*usualMemory+leastMemory, m.most)
	used, err = m.mergeWithin(ctx, out, layers, usual, pay)
	if errors.Is(err, tree.ErrTooLarge) && usual < m.most {
		return m.mergeWithin(ctx, out, layers, m.most, pay)
	}
	return used, err
}

// mergeWithin is Merge with a given memory. It writes nothing if the memory does not suffice.
func (m *Merger) mergeWithin(ctx context.Context, out io.Writer, layers []Files, memory int64,
	pay func(steps int) error) (used []int, err error) {
	if err := m.memory.Acquire(ctx, memory); err != nil {
		return nil, fmt.Errorf("wait for other merges: %w", context.Cause(ctx))
	}
	defer m.memory.Release(memory)
	root, blocks, err := mergeTrees(ctx, layers, memory, pay)
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

// treeBytes returns the size of the trees on disk.
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

// mergeTrees returns the merged tree of layers and the number of data blocks of each layer. left
// limits the memory of the trees.
func mergeTrees(
	ctx context.Context, layers []Files, left int64, pay func(steps int) error,
) (_ *tree.Node, blocks []int64, err error) {
	m := &tree.Merger{Pay: pay}
	blocks = make([]int64, len(layers))
	for i, files := range layers {
		var root *tree.Node
		var memory int64
		if root, memory, blocks[i], err = files.read(ctx, i, left); err != nil {
			return nil, nil, fmt.Errorf("tree of layer %d: %w", i, err)
		}
		left -= memory
		if err := m.Add(root); err != nil {
			return nil, nil, err
		}
	}
	return m.Root(), blocks, nil
}

// Read returns the tree of one layer.
func (f Files) Read() (*tree.Node, error) {
	root, _, _, err := f.read(context.Background(), 0, math.MaxInt64)
	return root, err
}

// read returns the tree with its data in the given device, its memory, and its number of data
// blocks.
func (f Files) read(ctx context.Context, device int, most int64) (root *tree.Node, memory, blocks int64, err error) {
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
	root, memory, err = tree.Decode(&pacedReader{ctx, in}, device, tree.Limit{
		Bytes:  maxTreeBytes,
		Memory: most,
		Blocks: blocks,
	})
	return root, memory, blocks, err
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

// number renumbers the data files that a tree uses, and returns the indexes of their layers.
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
