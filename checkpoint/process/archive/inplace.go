package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/internal/safefs"
)

// ErrNotInPlace is PackInPlace's error if the archive can only be copied.
var ErrNotInPlace = errors.New("checkpoint: the filesystem cannot make a tar of a file")

// PackInPlace makes the archive in dir a tar, as Pack does, without a copy of its largest file.
// The largest file becomes the tar. The filesystem inserts room for the headers before its content
// (fallocate with FALLOC_FL_INSERT_RANGE, on ext4 and XFS). The other files follow. The result is
// open for reading and writing, and keeps its name in dir.
//
// After ErrNotInPlace the archive is unchanged. After another error it is damaged.
func PackInPlace(ctx context.Context, dir *os.File) (_ *os.File, err error) {
	largest, err := findLargest(dir)
	if err != nil {
		return nil, err
	}
	if largest.Size < largeFile {
		return nil, ErrNotInPlace
	}
	file, err := safefs.Open(dir, largest.Path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	front, packed, err := packFront(ctx, dir, file, largest)
	if err == nil {
		err = insertRoom(file, front)
	}
	if err != nil {
		return nil, err
	}
	if err := packRest(ctx, dir, file, largest.Path, packed); err != nil {
		return nil, fmt.Errorf("write checkpoint: %w", err)
	}
	return file, nil
}

// findLargest returns the largest file of an archive, without its hash.
func findLargest(dir *os.File) (largest File, err error) {
	err = eachFile(dir, func(e entry) error {
		if e.path != ManifestFile && e.st.Size > largest.Size {
			largest = File{Path: e.path, Size: e.st.Size}
		}
		return nil
	})
	return largest, err
}

// packFront returns the manifest and the headers, which precede the content of the largest file in
// the tar. Its length is a multiple of the filesystem's block size. packed are the directories in
// it.
func packFront(ctx context.Context, dir, file *os.File, largest File) (_ []byte, packed map[string]bool, err error) {
	var front bytes.Buffer
	p := newPacker(ctx, &front)
	err = eachFile(dir, func(e entry) error {
		if e.path != ManifestFile {
			return nil
		}
		return p.add(e)
	})
	if err == nil {
		err = p.addDirectory(path.Dir(largest.Path))
	}
	if err == nil {
		err = p.w.Flush() // pads the manifest
	}
	var block int64
	if err == nil {
		block, err = blockSize(file)
	}
	var header []byte
	if err == nil {
		header, err = padHeader(int64(front.Len()), largest, block)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("write checkpoint: %w", err)
	}
	return append(front.Bytes(), header...), p.packed, nil
}

// insertRoom moves the content of a file back and writes front before it.
func insertRoom(file *os.File, front []byte) error {
	failpoint.Reach("checkpoint.insert-room")
	err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_INSERT_RANGE, 0, int64(len(front)))
	failpoint.Reach("checkpoint.room-inserted")
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EIO) {
		return os.NewSyscallError("fallocate", err)
	}
	if err != nil {
		return ErrNotInPlace
	}
	_, err = file.WriteAt(front, 0)
	return err
}

// packRest appends the other files of the archive to the largest one.
func packRest(ctx context.Context, dir, file *os.File, largest string, packed map[string]bool) error {
	size, err := file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	p := newPacker(ctx, file)
	p.file, p.packed = file, packed
	if err := p.resume(size); err != nil {
		return err
	}
	err = eachFile(dir, func(e entry) error {
		if e.path == ManifestFile || e.path == largest {
			return nil
		}
		return p.add(e)
	})
	if err != nil {
		return err
	}
	return p.w.Close()
}
