package image

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"berth/image/layer"
	"berth/image/registry/registrytest"
)

const mib = 1 << 20

// disk is a filesystem of 100 MiB, on which a store's layers are, and other things.
type disk struct {
	store  atomic.Pointer[Store]
	others atomic.Int64 // bytes
	static atomic.Bool  // the layers count as others
}

const (
	diskSize   = 100 * mib
	mayBeTaken = 80 * mib // while images sleep
)

func (d *disk) statfs(string) (unix.Statfs_t, error) {
	used := uint64(d.others.Load())
	if s := d.store.Load(); s != nil && !d.static.Load() {
		used += s.layers.Usage().Bytes
	}
	free := diskSize/512 - used/512
	return unix.Statfs_t{Bsize: 512, Blocks: diskSize / 512, Bfree: free, Bavail: free, Files: 1 << 20, Ffree: 1 << 20}, nil
}

// fill makes the disk so many bytes fuller than it may be, once nothing is being deleted.
func (s *sleepers) fill(excess int64) {
	s.t.Helper()
	s.await("nothing to be deleted", func() bool { return s.layers.deleting() == 0 })
	s.disk.others.Store(mayBeTaken + excess - int64(s.layers.Usage().Bytes))
}

// sleepers is a store on such a disk, whose images sleep.
type sleepers struct {
	*Store
	t    *testing.T
	disk *disk
	reg  *registrytest.Server
	name map[string]string // of an image, by its ID
}

// asleep returns a store with the images that fill pulls, all of which sleep.
func asleep(t *testing.T, fill func(s *sleepers)) *sleepers {
	t.Helper()
	cfg := driversConfig(t)
	s := &sleepers{t: t, disk: new(disk), reg: registrytest.New(t), name: map[string]string{}}
	cfg.Reserve.Statfs, cfg.MaxFullAsleep = s.disk.statfs, float64(mayBeTaken)/diskSize
	s.Store = restart(t, nil, cfg.with("auto", works))
	fill(s)
	s.Store = restart(t, s.Store, cfg.with("auto", cannot))
	s.disk.store.Store(s.Store)
	return s
}

// three pulls three images of a megabyte each.
func three(s *sleepers) {
	for _, name := range []string{"a", "b", "c"} {
		s.put(name, name, large(s.t, name))
	}
}

// large is a layer of a megabyte and a little more.
func large(t *testing.T, name string) registrytest.Layer {
	return plain(t, name, strings.Repeat(name, mib))
}

// put pulls an image as NAME:v1, and calls it something.
func (s *sleepers) put(called, name string, layers ...registrytest.Layer) *Image {
	s.t.Helper()
	s.reg.PutImage(name, "v1", called, layers...)
	img := pull(s.t, s.Store, s.reg.Host()+"/"+name+":v1")
	s.name[img.ID] = called
	return img
}

// left is what sleeps still.
func (s *sleepers) left() string {
	var names []string
	for _, id := range s.Asleep() {
		names = append(names, s.name[id])
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// want checks what sleeps still when nothing goes on any more.
func (s *sleepers) want(names string) {
	s.t.Helper()
	if err := s.Close(); err != nil {
		s.t.Fatal(err)
	}
	if left := s.left(); left != names {
		s.t.Errorf("%q sleep, want %q", left, names)
	}
}

// await waits for something.
func (s *sleepers) await(what string, is func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); {
		if time.Now().After(deadline) {
			s.t.Fatalf("still not: %s; %q sleep", what, s.left())
		}
	}
}

// giveUp gives sleepers up for a pull of so many bytes.
func (s *sleepers) giveUp(wanted uint64) {
	s.t.Helper()
	if err := s.giveUpSleepers(s.t.Context(), wanted); err != nil {
		s.t.Fatal(err)
	}
}

// A pull has as many images go as are in its way, and no more.
func TestPullNeedsRoomOfSleepers(t *testing.T) {
	s := asleep(t, three)
	s.fill(-mib / 2)
	s.put("new", "new", large(t, "n"))
	s.want("b c")
}

func TestPullHasRoomBesideSleepers(t *testing.T) {
	s := asleep(t, three)
	s.fill(-2 * mib)
	s.put("new", "new", large(t, "n"))
	s.want("a b c")
}

// A pull that fetches nothing needs no room.
func TestPullOfWhatIsThereKeepsSleepers(t *testing.T) {
	s := asleep(t, three)
	s.put("new", "new", large(t, "n"))
	s.fill(mib)
	s.put("again", "again", large(t, "n"))
	s.want("a b c")
}

// For what would not fit without any of them either, whatever a manifest says, none goes.
func TestPullThatCannotFitKeepsSleepers(t *testing.T) {
	s := asleep(t, three)
	s.fill(0)
	s.giveUp(diskSize - mayBeTaken + 4*mib)
	if left := s.left(); left != "a b c" {
		t.Errorf("%q sleep", left)
	}
	s.giveUp(diskSize - mayBeTaken + 2*mib)
	s.want("")
}

// kubelet asks what images take, and removes some: it need not pull.
func TestKubeletSeesAFullDiskOfSleepers(t *testing.T) {
	for what, ask := range map[string]func(s *sleepers) error{
		"ImageFsInfo": func(s *sleepers) error { _, err := s.Usage(t.Context()); return err },
		"RemoveImage": func(s *sleepers) error { return s.Remove(t.Context(), "nothing.example/of:that") },
	} {
		t.Run(what, func(t *testing.T) {
			s := asleep(t, three)
			s.fill(mib / 2)
			if err := ask(s); err != nil {
				t.Fatal(err)
			}
			s.await("one is gone", func() bool { return len(s.Asleep()) == 2 })
			if err := ask(s); err != nil {
				t.Fatal(err)
			}
			s.want("b c")
		})
	}
}

// Images go that have lost their tags, and of the rest the oldest.
func TestSleeperWithoutTagsGoesFirst(t *testing.T) {
	s := asleep(t, func(s *sleepers) {
		three(s)
		s.put("newer b", "b", large(t, "x"))
	})
	s.fill(mib / 2)
	s.giveUp(0)
	if left := s.left(); left != "a c newer b" {
		t.Errorf("%q sleep", left)
	}
	s.fill(mib / 2)
	s.giveUp(0)
	s.want("c newer b")
}

// What others have too is not freed.
func TestSleepersThatShareLayers(t *testing.T) {
	s := asleep(t, func(s *sleepers) {
		s.put("a", "a", large(t, "s"), plain(t, "a", "1"))
		s.put("b", "b", large(t, "s"), plain(t, "b", "2"))
		s.put("c", "c", large(t, "c"))
	})
	s.fill(mib / 2)
	s.giveUp(0)
	s.want("c")
}

// Pinned images stay, and those that are being made anew: they would lose their names.
func TestSleepersThatStay(t *testing.T) {
	s := asleep(t, three)
	for id, rec := range s.index.Load().records {
		switch s.name[id] {
		case "a":
			if err := s.refs.acquire(t.Context(), pullPrefix+"of a", rec.layers()); err != nil {
				t.Fatal(err)
			}
		case "b":
			s.pinned = map[string]bool{id: true}
		}
	}
	s.fill(3 * mib)
	s.giveUp(0)
	if left := s.left(); left != "a b" {
		t.Errorf("%q sleep", left)
	}
	s.refs.release(pullPrefix + "of a")
	s.pinned = nil
	s.giveUp(0)
	s.want("")
}

// An image that is pulled anew keeps its names, however full the disk is.
func TestSleeperMakesRoomForItself(t *testing.T) {
	s := asleep(t, three)
	s.fill(3 * mib)
	a := s.reg.Host() + "/a:v1"
	img := s.put("a", "same", large(t, "a"))
	if !slices.Contains(img.RepoTags, a) {
		t.Errorf("it has the tags %v", img.RepoTags)
	}
	s.want("")
}

// What is being deleted, however long that takes, is not in the way any more.
func TestSleepersThatAreBeingDeleted(t *testing.T) {
	s := asleep(t, three)
	deleter := s.layers.asleep
	if err := deleter.Close(); err != nil { // nothing is deleted from here on
		t.Fatal(err)
	}
	s.disk.static.Store(true)
	s.disk.others.Store(mayBeTaken + mib/2)
	s.giveUp(0)
	s.giveUp(0)
	if left := s.left(); left != "b c" {
		t.Errorf("%q sleep", left)
	}
	s.giveUp(mib)
	s.layers.all = slices.DeleteFunc(s.layers.all, func(o *layer.Store) bool { return o == deleter }) // it is closed already
	s.want("c")
}
