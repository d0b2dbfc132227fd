package fill

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/erofs"
	"berth/image/tree"
	"berth/internal/cleanup"
	"berth/internal/rootfs"
	"berth/internal/safefs"
	"berth/internal/task"
)

// probeBlocks is the size of the probe's data file, in blocks. Each is one file of the image.
const probeBlocks = 2

// probeTimeout limits the probe.
const probeTimeout = 10 * time.Second

// probe checks that the kernel reports reads and page faults of an EROFS image, before it takes the
// content from the data file in dir. It fills the file when they are reported, and compares what
// the readers get. The files have no names and the mount is detached, so nothing is left behind.
// The error is errors.ErrUnsupported if the kernel or the filesystem cannot report accesses.
func probe(dir string) (err error) {
	undo := cleanup.New()
	defer undo.Run(&err)
	g, err := newGroup()
	if err != nil {
		return err
	}
	undo.Add("close group", g.file.Close)
	image, err := unnamed(dir)
	if err != nil {
		return err
	}
	undo.Add("close image", image.Close)
	data, err := unnamed(dir)
	if err != nil {
		return err
	}
	undo.Add("close data", data.Close)
	if err := writeProbe(image, data); err != nil {
		return err
	}
	if err := g.mark(data); err != nil {
		return err
	}
	l := rootfs.Layer{Kind: rootfs.EROFS, Path: selfFD(image), Data: []string{selfFD(data)}}
	mount, err := l.Open()
	if err != nil {
		return orUnsupported(err)
	}
	undo.Add("close mount", mount.Close)
	filler := task.NewLifetime()
	undo.Add("end filler", func() error { return filler.WaitFor(probeTimeout) })
	undo.Add("stop filler", func() error { return g.file.SetReadDeadline(time.Unix(1, 0)) })
	if err := g.file.SetReadDeadline(time.Now().Add(probeTimeout)); err != nil {
		return orUnsupported(err)
	}
	filler.Spawn(func() { fillProbe(g, data) })
	for i, read := range []func(*os.File) ([]byte, error){readWhole, readMapped} {
		f, err := safefs.OpenRegular(mount, probeName(i))
		if err != nil {
			return err
		}
		got, err := read(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		if !bytes.Equal(got, probeContent(i)) {
			return fmt.Errorf("%w: the kernel does not report reads of EROFS files", errors.ErrUnsupported)
		}
	}
	return nil
}

func probeName(i int) string { return fmt.Sprintf("file%d", i) }

func probeContent(i int) []byte { return bytes.Repeat([]byte{'a' + byte(i)}, tree.BlockSize) }

// unnamed creates a file without a name, which the kernel deletes when it is closed.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file: %w", err)
	}
	return os.NewFile(uintptr(fd), "probe"), nil
}

// writeProbe writes the image, and makes the data file sparse.
func writeProbe(image, data *os.File) error {
	root := tree.NewDir()
	for i := range probeBlocks {
		root.Children[probeName(i)] = &tree.Node{Mode: unix.S_IFREG | 0o644,
			Data: tree.Data{Size: tree.BlockSize, Block: uint32(i)}}
	}
	if err := data.Truncate(probeBlocks * tree.BlockSize); err != nil {
		return fmt.Errorf("write a data file: %w", err)
	}
	_, err := erofs.Write(image, root, []int64{probeBlocks})
	return err
}

// fillProbe fills the blocks of each event, until an error. The data file was opened before the
// mark, so that its writes raise no events.
func fillProbe(g *group, data *os.File) {
	for {
		var p [eventSize]byte
		if g.read(p[:]) != nil {
			return
		}
		r := ring{mem: append(make([]byte, ringHead), append(p[:], make([]byte, slotSize-eventSize)...)...)}
		ev, err := r.event(0)
		response := allow
		for i := range probeBlocks {
			at := int64(i) * tree.BlockSize
			if err != nil || at >= ev.offset+ev.count || at+tree.BlockSize <= ev.offset {
				continue
			}
			if _, err := data.WriteAt(probeContent(i), at); err != nil {
				response = denyEIO
			}
		}
		if g.respond(ev.fd, response) != nil {
			return
		}
		unix.Close(int(ev.fd))
	}
}

func readWhole(f *os.File) ([]byte, error) {
	return io.ReadAll(io.LimitReader(f, 2*tree.BlockSize))
}

// readMapped reads through a mapping. The page fault happens in a system call. The Go scheduler
// cannot run another goroutine during a page fault elsewhere.
func readMapped(f *os.File) ([]byte, error) {
	mem, err := unix.Mmap(int(f.Fd()), 0, tree.BlockSize, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map a file of the probe: %w", err)
	}
	if err = unix.Madvise(mem, unix.MADV_POPULATE_READ); err != nil {
		return nil, errors.Join(fmt.Errorf("read a mapped file of the probe: %w", err), unix.Munmap(mem))
	}
	got := bytes.Clone(mem)
	return got, unix.Munmap(mem)
}
