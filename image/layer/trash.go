package layer

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"
)

// trash deletes directories in the background. The directory trash is its
// queue: the goroutine looks into it whenever it is woken, so nothing put there is
// forgotten, be it by an error, the end of the process or of the machine.
type trash struct {
	dir    string
	remove func(dir string) error
	log    *slog.Logger
	prefix string // makes names differ from those of earlier processes
	count  atomic.Uint64
	wake   chan struct{} // holds one: look again
	quit   chan struct{}
	done   chan struct{}
}

func newTrash(dir string, remove func(string) error, log *slog.Logger) *trash {
	return &trash{
		dir: dir, remove: remove, log: log,
		prefix: strconv.FormatInt(time.Now().UnixNano(), 36),
		wake:   make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
}

// take moves path, on the same filesystem, into the trash.
func (t *trash) take(path string) error {
	name := fmt.Sprintf("%s-%d", t.prefix, t.count.Add(1))
	if err := os.Rename(path, filepath.Join(t.dir, name)); err != nil {
		return fmt.Errorf("discard: %w", err)
	}
	select {
	case t.wake <- struct{}{}:
	default: // it is going to look anyway
	}
	return nil
}

// start starts the goroutine, which looks at once.
func (t *trash) start() {
	go func() {
		defer close(t.done)
		for {
			t.empty()
			select {
			case <-t.wake:
			case <-t.quit:
				return
			}
		}
	}()
}

// stop waits for the goroutine to end, which finishes the deletion it is at.
func (t *trash) stop() {
	close(t.quit)
	<-t.done
}

// empty deletes what is in the trash. What cannot be deleted stays for the next time.
func (t *trash) empty() {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		t.log.Error("read trash of layers", "err", err)
	}
	for _, e := range entries {
		select {
		case <-t.quit:
			return
		default:
		}
		if err := t.remove(filepath.Join(t.dir, e.Name())); err != nil {
			t.log.Error("delete layer", "path", filepath.Join(t.dir, e.Name()), "err", err)
		}
	}
}
