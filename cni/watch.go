package cni

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
)

const (
	maxPathSteps = 255 // path components to walk, including symlink targets
	maxSubdirs   = 64  // watched plugin directories below the configuration directory
)

// watcher reports changes of a directory by inotify. It watches every directory on the path. So it
// also reports when the directory appears, when a part of its path is removed or renamed, and when
// a symlink changes. One goroutine uses it.
type watcher struct {
	fs   *fsnotify.Watcher
	dir  string
	plan watchPlan
}

// watchPlan lists the inotify watches that a directory needs at present.
type watchPlan struct {
	dirs   []string // all watches: the directories on the path, then the leaves
	names  []string // path components whose own change matters
	leaves []string // directories whose entries all matter
}

func newWatcher(dir string) (*watcher, error) {
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &watcher{fs: fs, dir: filepath.Clean(dir)}, nil
}

// sync sets the watches for the present state of the path. Each later change is reported. It
// replaces all watches, because a path may lead to another directory than before. It repeats the
// plan, because a directory may have appeared before its watch.
func (w *watcher) sync() error {
	for range maxPathSteps {
		plan := planWatch(w.dir)
		if err := w.watch(plan.dirs); err != nil {
			return err
		}
		w.plan = plan
		if slices.Equal(planWatch(w.dir).dirs, plan.dirs) {
			return nil
		}
	}
	return errors.New("path keeps changing")
}

func (w *watcher) watch(dirs []string) error {
	for _, dir := range w.fs.WatchList() {
		// An error means that the kernel dropped the watch already.
		_ = w.fs.Remove(dir)
	}
	for _, dir := range dirs {
		if err := w.fs.Add(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
			return &os.PathError{Op: "watch", Path: dir, Err: err}
		}
	}
	return nil
}

// concerns reports whether an event affects the configuration.
func (w *watcher) concerns(ev fsnotify.Event) bool {
	if ev.Op == fsnotify.Chmod {
		return false
	}
	name := filepath.Clean(ev.Name) // events in / have names that begin with //
	return slices.Contains(w.plan.names, name) || slices.Contains(w.plan.leaves, filepath.Dir(name))
}

// planWatch walks to dir through symlinks, as far as the path exists.
func planWatch(dir string) watchPlan {
	var p watchPlan
	at, rest := "/", components(dir)
	for steps := 0; len(rest) > 0; steps++ {
		next := filepath.Join(at, rest[0]) // this resolves ".." correctly, because at has no symlinks
		p.dirs = append(p.dirs, at)
		p.names = append(p.names, next)
		info, err := os.Lstat(next)
		if err != nil || steps == maxPathSteps {
			return p
		}
		rest = rest[1:]
		switch {
		case info.Mode()&os.ModeSymlink != 0:
			target, err := os.Readlink(next)
			if err != nil {
				return p
			}
			if filepath.IsAbs(target) {
				at = "/"
			}
			rest = append(components(target), rest...)
		case info.IsDir():
			at = next
		default:
			return p
		}
	}
	p.leaves = append([]string{at}, subdirs(at)...)
	p.dirs = append(p.dirs, p.leaves...)
	return p
}

func components(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// subdirs returns the directories in dir, which may contain plugins of a network.
func subdirs(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // load reports the error
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() && len(dirs) < maxSubdirs {
			dirs = append(dirs, filepath.Join(dir, e.Name()))
		}
	}
	return dirs
}
