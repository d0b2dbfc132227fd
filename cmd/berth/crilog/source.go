package crilog

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
)

// maxRecord bounds a raw line of the file, in bytes. Runtimes split records at about 16 KiB. The
// excess of a longer line, which is not a record, is dropped.
const maxRecord = 256 << 10

// source reads whole lines from a growing file.
type source struct {
	file    *os.File
	info    os.FileInfo
	read    *bufio.Reader
	offset  int64  // bytes read, to detect truncation
	pending []byte // beginning of an incomplete line
}

func openSource(path string) (*source, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("read log %s: not a regular file", path)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &source{file: file, info: info, read: bufio.NewReaderSize(file, 64<<10)}, nil
}

func (s *source) Close() error { return s.file.Close() }

// next returns the next complete line, or io.EOF if there is none. A later call continues when the
// file has grown. The line is valid until the next call.
func (s *source) next() ([]byte, error) {
	for {
		part, err := s.read.ReadSlice('\n')
		s.offset += int64(len(part))
		if room := maxRecord - len(s.pending); len(part) > room {
			part = part[:room]
		}
		if err == nil && len(s.pending) == 0 {
			return part, nil
		}
		s.pending = append(s.pending, part...)
		switch {
		case err == nil:
			line := s.pending
			s.pending = nil
			return line, nil
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF):
			rewound, err := s.rewindIfTruncated()
			if err != nil {
				return nil, err
			}
			if !rewound {
				return nil, io.EOF
			}
		default:
			return nil, fmt.Errorf("read log %s: %w", s.file.Name(), err)
		}
	}
}

// rewindIfTruncated seeks to the start of a file that is shorter than the part already read
// (rotation by "copytruncate"), and reports whether it did.
func (s *source) rewindIfTruncated() (bool, error) {
	info, err := s.file.Stat()
	if err != nil {
		return false, fmt.Errorf("stat log %s: %w", s.file.Name(), err)
	}
	if info.Size() >= s.offset {
		return false, nil
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return false, fmt.Errorf("rewind log %s: %w", s.file.Name(), err)
	}
	s.read.Reset(s.file)
	s.offset, s.pending = 0, nil
	return true, nil
}

// replaced reports whether path is another file with content. Then the writer no longer writes to
// the present file.
func (s *source) replaced(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !os.SameFile(s.info, info) && info.Size() > 0
}
