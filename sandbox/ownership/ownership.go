// Package ownership protects running pods from a daemon with the wrong root or state directory.
//
// A daemon removes objects that it finds without a record. If root is empty, unmounted or foreign,
// it would remove every container of the node. With another state directory it would end all pods
// as after a reboot. Both directories have the identity of root (state.Identity). Records show
// which objects root knows.
//
// # Contract
//
// Check and Unknown change nothing, and work beside a running daemon. Claim is called by the daemon
// that holds the locks of both directories, before it opens anything below them.
package ownership

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// Claim is Check for a daemon that starts. It then writes the identity of root to both directories.
// If a directory is full or read-only, it logs that and continues. The next daemon then writes the
// identity.
func Claim(dirs state.Dirs, log *slog.Logger) error {
	if err := Check(dirs); err != nil {
		return err
	}
	return Identify(dirs, log)
}

// Identify is Claim, but does not call Check. It is for a daemon that must remove the objects that
// root does not know.
func Identify(dirs state.Dirs, log *slog.Logger) error {
	err := dirs.Identify()
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EROFS) {
		log.Warn("write the identity of root: until it is written, a root that is not mounted is noticed less surely",
			"error", err)
		return nil
	}
	return err
}

// Check returns FailedPrecondition if a daemon with these directories would end running pods. That
// is so if root does not know them, if all of their records are damaged, or if the state directory
// does not have them. It returns nil if single records are lost or damaged. The daemon removes the
// objects of such records.
func Check(dirs state.Dirs) error {
	s, err := read(dirs)
	if err != nil {
		return err
	}
	if why := s.whyLost(); why != "" {
		return s.refuseRoot(why)
	}
	return s.checkState()
}

// Unknown returns the running objects that root does not know. It considers pods and containers of
// the state directory, and containers whose monitors were installed below root.
func Unknown(dirs state.Dirs) ([]Launch, error) {
	s, err := read(dirs)
	if err != nil {
		return nil, err
	}
	return append(s.unknown, s.orphans...), nil
}

// survey has the information of both directories about the pods of this node.
type survey struct {
	dirs     state.Dirs
	root     state.Identity // in root
	state    state.Identity // in the state directory
	copied   bool           // root is a copy of the root that the state directory knows
	recorded map[string]bool
	changed  time.Time // last change of the records; zero: a folder of them is missing
	knows    bool      // the record of a running object can be read
	// Running objects of the state directory, if none of their records can be read.
	damaged   []Launch
	unknown   []Launch // in the state directory, without a record
	orphans   []Launch // without a record and without state
	displaced []Launch // with a record, but without readable state
}

// read lists objects before records, because an object has a record until it is removed. Whether an
// object lives is examined last.
func read(dirs state.Dirs) (*survey, error) {
	s := &survey{dirs: dirs}
	if err := s.readIdentities(); err != nil {
		return nil, err
	}
	ids, err := launched(dirs)
	if err != nil {
		return nil, err
	}
	monitors, err := monitorsOf(dirs.Root)
	if err != nil {
		return nil, err
	}
	if s.recorded, s.changed, err = state.Recorded(dirs.Root); err != nil {
		return nil, err
	}
	if err := s.addLaunched(ids); err != nil {
		return nil, err
	}
	return s, s.addStateless(monitors, ids)
}

// addLaunched examines the launches of the state directory.
func (s *survey) addLaunched(ids []string) (err error) {
	for _, id := range ids {
		if s.recorded[id] {
			err = s.addKnown(id)
		} else {
			err = s.addUnknown(id)
		}
		if err != nil {
			return err
		}
	}
	if s.knows {
		s.damaged = nil
	}
	return nil
}

// addKnown examines a recorded launch. Whether it lives matters only if its state is damaged, or
// while no readable record of a living one is found. A node has hundreds of launches, and no client
// is answered meanwhile.
func (s *survey) addKnown(id string) error {
	l, err := readLaunch(s.dirs, id)
	if err != nil || s.knows && !l.damaged {
		return err
	}
	living, err := addRunning(nil, l)
	if err != nil || len(living) == 0 {
		return err
	}
	s.damaged = append(s.damaged, l)
	if l.damaged {
		s.displaced = append(s.displaced, l)
	}
	if !s.knows {
		s.knows, err = isReadable(s.dirs, id)
	}
	return err
}

// addUnknown examines a launch without a record.
func (s *survey) addUnknown(id string) error {
	living, err := addLiving(nil, s.dirs, id)
	if err != nil || len(living) == 0 {
		return err
	}
	info, err := os.Stat(filepath.Join(s.dirs.Shim(id), proto.ShimFile))
	if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the process of %s: %w", id, err)
	}
	living[0].At = info.ModTime()
	s.unknown = append(s.unknown, living[0])
	return nil
}

// addStateless examines objects that are not among the launches of the state directory: those of
// monitors, and pauses that records name.
func (s *survey) addStateless(candidates []Launch, launched []string) error {
	bootID, err := host.BootID()
	if err != nil {
		return err
	}
	for id := range s.recorded {
		candidates = append(candidates, Launch{ID: id})
	}
	present := map[string]bool{}
	for _, id := range launched {
		present[id] = true
	}
	for _, l := range candidates {
		if present[l.ID] {
			continue
		}
		has, err := s.dirs.HasState(l.ID)
		if err == nil && !has && l.Init == 0 {
			l, err = pauseOf(s.dirs, l.ID, bootID)
		}
		if err != nil {
			return err
		}
		if has {
			continue
		}
		to := &s.orphans
		if s.recorded[l.ID] {
			to = &s.displaced
		}
		if *to, err = addRunning(*to, l); err != nil {
			return err
		}
	}
	return nil
}

func (s *survey) readIdentities() (err error) {
	if s.root, err = state.ReadIdentity(s.dirs.Root); err != nil {
		return err
	}
	if s.state, err = state.ReadIdentity(s.dirs.State); err != nil {
		return err
	}
	inode, err := state.InodeOf(s.dirs.Root)
	s.copied = inode != s.state.Inode
	return err
}

// whyLost returns the reason why root does not know running objects, for error texts. It returns ""
// if all are known, or if only single records are lost.
func (s *survey) whyLost() string {
	switch {
	case len(s.unknown)+len(s.orphans)+len(s.damaged) == 0:
		return ""
	case len(s.unknown)+len(s.orphans) == 0:
		return "all of their records are damaged"
	case s.root.ID == "" && s.changed.IsZero():
		return "no berth has used this directory"
	case s.state.ID != "" && s.root.ID != s.state.ID:
		return "it is another root than the one that they were started with"
	case s.state.ID != "" && s.copied:
		return "it is a copy of the root that they were started with, made before they were"
	case s.changed.IsZero():
		return "its folders of records were removed"
	case len(s.orphans) > 0:
		return "the state directory does not know them either"
	}
	if why := s.whyOlder(time.Now()); why != "" || s.knows {
		return why
	}
	return "their records were removed"
}

// whyOlder compares times of the unknown objects and of the records. Both come from the same clock,
// which may have been set meanwhile.
func (s *survey) whyOlder(now time.Time) string {
	for _, l := range s.unknown {
		switch {
		case l.At.After(now), s.changed.After(now):
			return "the clock was set back, so it may be older than they are"
		case l.At.After(s.changed):
			return "it is older than they are, as a restored backup is"
		}
	}
	return ""
}

// refuseRoot names the mount and the remedy.
func (s *survey) refuseRoot(why string) error {
	lost := slices.Concat(s.unknown, s.orphans, s.damaged)
	was := ""
	if s.state.ID != "" {
		was = fmt.Sprintf(" They were started with root %s%s.", s.state.Root, placed(s.state.Device, s.state.Mount))
	}
	return errdefs.FailedPrecondition("root %s%s does not know %d pods and containers that run on this node (%s): %s.%s"+
		" Berth would kill them. Mount the filesystem of root, or correct root and state in the configuration, and start"+
		" berth again; until then they keep running. To give them up, run \"berth reset\" or restart the node",
		s.dirs.Root, placeOf(s.dirs.Root), len(lost), names(lost), why, was)
}

// placeOf returns where a directory is at present.
func placeOf(dir string) string {
	mount, err := host.MountOf(dir)
	if err != nil { // for example, it does not exist
		return ""
	}
	return placed(mount.Source, mount.Mountpoint)
}

// placed names a mount. It returns "" for an unknown device.
func placed(device, mountpoint string) string {
	if mountpoint == "" {
		return ""
	}
	return fmt.Sprintf(" (on %s, mounted at %s)", device, mountpoint)
}

// names returns the first IDs.
func names(of []Launch) string {
	const most = 3
	var ids []string
	for _, l := range of[:min(most, len(of))] {
		ids = append(ids, l.ID[:12])
	}
	if len(of) > most {
		ids = append(ids, "…")
	}
	return strings.Join(ids, ", ")
}

// checkState refuses a state directory that does not have the pods that run.
func (s *survey) checkState() error {
	if err := s.checkRecordedState(); err != nil || len(s.displaced) == 0 {
		return err
	}
	return errdefs.FailedPrecondition("state %s%s does not have %d pods and containers that run on this node (%s): it was"+
		" moved, emptied or damaged, or another filesystem covers it. Berth would kill them. Unmount that filesystem, or"+
		" correct state in the configuration, and start berth again; until then they keep running. To give them up, run"+
		" \"berth reset\" or restart the node",
		s.dirs.State, placeOf(s.dirs.State), len(s.displaced), names(s.displaced))
}

// checkRecordedState refuses another state directory while the recorded one has pods that run.
func (s *survey) checkRecordedState() error {
	old := s.dirs
	old.State = s.root.State
	if old.State == "" || filepath.Clean(old.State) == filepath.Clean(s.dirs.State) || sameFile(old.State, s.dirs.State) {
		return nil
	}
	ids, err := launched(old)
	if err != nil {
		return err
	}
	var left []Launch
	for _, id := range ids {
		if s.recorded[id] {
			if left, err = addLiving(left, old, id); err != nil {
				return err
			}
		}
	}
	if len(left) == 0 {
		return nil
	}
	return errdefs.FailedPrecondition("state %s is not the state directory of %d pods and containers that run on this"+
		" node (%s): they use %s. Berth would kill them. Set state to %s and start berth again; until then they keep"+
		" running. To change it, remove all pods first, with \"berth reset --state %s\" or by a restart of the node",
		s.dirs.State, len(left), names(left), old.State, old.State, old.State)
}

func sameFile(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}
