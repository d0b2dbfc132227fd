package archive

import (
	"context"
	"crypto/sha256"
	"hash"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"time"

	"berth/internal/safefs"
)

// Early hashes the memory of processes while CRIU still writes it, so that Seal has less to read.
// CRIU writes these files from the beginning to the end. The containers are frozen meanwhile, so
// Early works only while a processor has nothing else to do. It is not safe for concurrent use.
type Early struct {
	dir    *os.File // the archive
	files  map[string]*partial
	buffer []byte
}

// partial is a file whose first n bytes are hashed.
type partial struct {
	file *os.File
	hash hash.Hash
	n    int64
}

const (
	// earlyChunk is how much of a file is read at once, in bytes.
	earlyChunk = 256 << 10
	// earlyPause is the pause if CRIU has written nothing new, or no processor is idle.
	earlyPause = 5 * time.Millisecond
)

// NewEarly returns an Early for the archive in dir. The caller must call Close.
func NewEarly(dir *os.File) *Early {
	return &Early{dir: dir, files: map[string]*partial{}, buffer: make([]byte, earlyChunk)}
}

// Run hashes what CRIU writes into the directories of containers, until ctx ends. A file that
// cannot be read is left to Seal, which reports the error.
func (e *Early) Run(ctx context.Context, containers ...string) {
	for ctx.Err() == nil {
		if idleProcessor() && e.advance() {
			continue
		}
		for _, name := range containers {
			e.find(path.Join(name, ImagesDir))
		}
		select {
		case <-ctx.Done():
		case <-time.After(earlyPause):
		}
	}
}

// idleProcessor returns whether there are more processors than threads that want one. /proc/loadavg
// counts this thread, too.
func idleProcessor() bool {
	content, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return false
	}
	fields := strings.Fields(string(content))
	const runnable = 3 // "runnable/all"
	if len(fields) <= runnable {
		return false
	}
	text, _, _ := strings.Cut(fields[runnable], "/")
	n, err := strconv.Atoi(text)
	return err == nil && n <= runtime.NumCPU()
}

// advance hashes the next chunk of each file. It returns whether there was any.
func (e *Early) advance() (read bool) {
	for _, p := range e.files {
		n, _ := p.file.ReadAt(e.buffer, p.n) // io.EOF, or Seal finds the error
		p.hash.Write(e.buffer[:n])           // never fails
		p.n += int64(n)
		read = read || n > 0
	}
	return read
}

// find opens the files of memory in a directory of CRIU's images.
func (e *Early) find(images string) {
	dir, err := safefs.OpenDir(e.dir, images)
	if err != nil {
		return // CRIU has not made it yet
	}
	defer dir.Close() // it was only read
	names, err := dir.Names()
	if err != nil {
		return
	}
	for _, name := range names {
		full := path.Join(images, name)
		if e.files[full] != nil || !strings.HasPrefix(name, "pages-") {
			continue
		}
		if file, err := dir.OpenRegular(name, os.O_RDONLY); err == nil {
			e.files[full] = &partial{file: file, hash: sha256.New()}
		}
	}
}

// begin returns a hash for a file and the number of bytes that it contains already. Each file is
// begun once.
func (e *Early) begin(name string) (hash.Hash, int64) {
	if e != nil && e.files[name] != nil {
		return e.files[name].hash, e.files[name].n
	}
	return sha256.New(), 0
}

// Close closes the files.
func (e *Early) Close() {
	for _, p := range e.files {
		_ = p.file.Close() // it was only read
	}
}
