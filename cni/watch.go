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
	maxPathSteps = 255 // components walked, symlink targets included
	maxSubdirs   = 64  // plugin directories watched below the configuration directory
)

// watcher reports changes of a directory by inotify, also when the directory does
// not exist yet, or a part of its path is removed, renamed, re-created or a
// symlink that changes: it watches every directory on the way. It belongs to one
// goroutine.
type watcher struct {
	fs   *fsnotify.Watcher
	dir  string
	plan watchPlan
}

// watchPlan is what must be watched for one directory, as the filesystem is now.
type watchPlan struct {
	dirs   []string // to watch: the directories on the way, then the leaves
	names  []string // entries on the way, whose own change matters
	leaves []string // directories in which every entry matters
}

func newWatcher(dir string) (*watcher, error) {
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	return &watcher{fs: fs, dir: filepath.Clean(dir)}, nil
}

// sync watches what must be watched now. What is read after it returned, and then
// changes, is reported. Watches are made anew since a path may be another
// directory than before; a directory that appears between the look and the watch
// is found by looking again.
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

// concerns reports whether an event is about the configuration.
func (w *watcher) concerns(ev fsnotify.Event) bool {
	if ev.Op == fsnotify.Chmod {
		return false
	}
	name := filepath.Clean(ev.Name) // entries of / arrive as //name
	return slices.Contains(w.plan.names, name) || slices.Contains(w.plan.leaves, filepath.Dir(name))
}

// planWatch walks to dir, through symlinks, as far as it exists.
func planWatch(dir string) watchPlan {
	var p watchPlan
	at, rest := "/", components(dir)
	for steps := 0; len(rest) > 0; steps++ {
		next := filepath.Join(at, rest[0]) // ".." is right: at has no symlinks
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

// subdirs returns the directories in dir: plugins of a network may live there.
func subdirs(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // load reads dir too and reports
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() && len(dirs) < maxSubdirs {
			dirs = append(dirs, filepath.Join(dir, e.Name()))
		}
	}
	return dirs
}
