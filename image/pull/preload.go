package pull

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
)

const (
	// preloadPeriod is how often directories are read without an event. A directory may be missing
	// at first.
	preloadPeriod = time.Minute
	// preloadSettle is how long an archive must be unchanged, because a program may still write it.
	preloadSettle = 2 * time.Second
	// preloadRetry is the time after which an archive that failed is loaded again.
	preloadRetry = 10 * time.Minute
)

// Preload loads the archives in directories and the archives that appear there, until ctx ends. It
// pins their images. It logs an error for each bad archive and continues. An archive that an
// earlier daemon loaded is read again only if it has changed, or if its images were removed.
func (p *Puller) Preload(ctx context.Context, dirs []string) {
	l := &preloader{puller: p, failed: map[string]time.Time{}, done: map[string]bool{}, refused: map[string]bool{}}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		p.log.Warn("cannot watch image directories, reading them every minute", "error", err)
		watcher = &fsnotify.Watcher{} // its channels are nil: no events
	} else {
		defer watcher.Close() // it always returns nil
	}
	for {
		for _, dir := range dirs {
			if err == nil {
				_ = watcher.Add(dir) // again, because the directory may be new; a missing directory is watched later
			}
			l.scan(ctx, dir)
		}
		again := preloadPeriod
		if l.unsettled {
			again, l.unsettled = preloadSettle, false
		}
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-watcher.Events:
		case e := <-watcher.Errors:
			p.log.Debug("watch image directories", "error", e)
		}
		timer.Stop()
		if ctx.Err() != nil {
			return
		}
	}
}

// preloader remembers which archives need no work. One goroutine uses it.
type preloader struct {
	puller    *Puller
	failed    map[string]time.Time // by origin: when to try again
	done      map[string]bool      // origins that this daemon has seen loaded
	unsettled bool                 // an archive changed a moment ago
	refused   map[string]bool      // directories that others can write
}

// scan loads the new archives of a directory.
func (p *preloader) scan(ctx context.Context, dir string) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(entries) == 0 {
		return
	}
	if err == nil {
		err = onlyRootWrites(dir)
	}
	if err != nil {
		if !p.refused[dir] {
			p.puller.log.Error("image directory not used", "directory", dir, "error", err)
		}
		p.refused[dir] = true
		return
	}
	delete(p.refused, dir)
	for _, entry := range entries {
		if ctx.Err() == nil && !strings.HasPrefix(entry.Name(), ".") {
			p.load(ctx, filepath.Join(dir, entry.Name()))
		}
	}
}

// onlyRootWrites returns an error for a directory that another user could put images into.
func onlyRootWrites(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("stat %s: %w", dir, err)
	}
	if st.Uid != 0 || st.Mode&0o022 != 0 {
		return errdefs.FailedPrecondition("only root may be able to write it; its owner is %d and its mode %#o",
			st.Uid, st.Mode&0o7777)
	}
	return nil
}

// load loads an archive unless it is unchanged.
func (p *preloader) load(ctx context.Context, path string) {
	origin, changed, err := originOf(path)
	switch {
	case err != nil: // the archive was removed, or is a directory without an image
		return
	case p.done[origin], time.Now().Before(p.failed[origin]):
		return
	case p.puller.store.Snapshot().HasOrigin(origin):
		p.done[origin] = true
		return
	case time.Since(changed) < preloadSettle && time.Since(changed) >= 0:
		p.unsettled = true
		return
	}
	if _, err := p.puller.LoadFile(ctx, path, LoadOptions{Pin: true, origin: origin}); err != nil {
		if ctx.Err() == nil {
			p.puller.log.Error("load image archive", "file", path, "error", err)
		}
		p.failed[origin] = time.Now().Add(preloadRetry)
		return
	}
	p.done[origin] = true
}

// originOf returns a text that identifies a file and its version, and the time of the file's last
// change. For a directory it describes the index of the OCI layout.
func originOf(path string) (origin string, changed time.Time, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", changed, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := unix.Stat(filepath.Join(path, "index.json"), &st); err != nil {
			return "", changed, err
		}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return "", changed, errdefs.InvalidArgument("%s is not a regular file", path)
	}
	origin = fmt.Sprintf("%s %d %d %d.%09d", path, st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec)
	return origin, time.Unix(st.Ctim.Unix()), nil
}
