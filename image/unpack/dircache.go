package unpack

import (
	"container/list"

	"berth/internal/safefs"
)

// maxOpenDirs is how many directories one layer keeps open while it is
// unpacked. Tars list a directory's entries together, so a few directories are enough.
const maxOpenDirs = 32

// dirCache keeps directories open by path, to resolve fewer paths. This is safe while no directory
// or symlink on a path is replaced. Nothing else writes to the tree, and the unpacker clears the
// cache when it removes a directory or symlink. New entries cannot change a resolved path.
//
// A directory that leaves the cache stays open until reap, because the current entry may use it.
type dirCache struct {
	order   *list.List // of *openDir, the last used first
	byPath  map[string]*list.Element
	retired []*safefs.Dir
}

type openDir struct {
	path string
	dir  *safefs.Dir
}

func newDirCache() *dirCache { return &dirCache{order: list.New(), byPath: map[string]*list.Element{}} }

// get returns the directory kept for path, or nil.
func (c *dirCache) get(path string) *safefs.Dir {
	e := c.byPath[path]
	if e == nil {
		return nil
	}
	c.order.MoveToFront(e)
	return e.Value.(*openDir).dir
}

// put keeps dir, found at path, and owns it from now on.
func (c *dirCache) put(path string, dir *safefs.Dir) *safefs.Dir {
	c.byPath[path] = c.order.PushFront(&openDir{path, dir})
	if c.order.Len() > maxOpenDirs {
		c.retire(c.order.Back())
	}
	return dir
}

// clear forgets all directories.
func (c *dirCache) clear() {
	for c.order.Len() > 0 {
		c.retire(c.order.Back())
	}
}

func (c *dirCache) retire(e *list.Element) {
	d := c.order.Remove(e).(*openDir)
	delete(c.byPath, d.path)
	c.retired = append(c.retired, d.dir)
}

// reap closes the directories that have left the cache.
func (c *dirCache) reap() {
	for _, d := range c.retired {
		d.Close() // opened with O_PATH, so Close cannot lose data
	}
	c.retired = c.retired[:0]
}

func (c *dirCache) close() {
	c.clear()
	c.reap()
}
