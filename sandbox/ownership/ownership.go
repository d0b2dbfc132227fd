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
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/sandbox/state"
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
// is so if root does not know them, or if their state is in another directory. It returns nil if
// the records of single pods are lost, which the daemon removes.
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
	unknown  []Launch  // in the state directory, without a record
	orphans  []Launch  // without a record and without state
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
	var monitors []Launch
	if s.root.ID == "" || s.state.ID == "" { // otherwise the state directory has all objects that were started
		if monitors, err = monitorsOf(dirs.Root); err != nil {
			return nil, err
		}
	}
	if s.recorded, s.changed, err = state.Recorded(dirs.Root); err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, id := range ids {
		known[id] = true
		if s.recorded[id] {
			continue
		}
		if s.unknown, err = addLiving(s.unknown, dirs, id); err != nil {
			return nil, err
		}
	}
	for _, m := range monitors {
		if !known[m.ID] && !s.recorded[m.ID] {
			s.orphans = append(s.orphans, m)
		}
	}
	return s, nil
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

// whyLost returns the reason why root does not know any of the running objects, for error texts. It
// returns "" if all are known, or if only single records are lost.
func (s *survey) whyLost() string {
	switch {
	case len(s.unknown) == 0 && len(s.orphans) == 0:
		return ""
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
	for _, l := range s.unknown {
		if l.At.After(s.changed) {
			return "it is older than they are, as a restored backup is"
		}
	}
	return ""
}

// refuseRoot names the mount and the remedy.
func (s *survey) refuseRoot(why string) error {
	lost := append(s.unknown, s.orphans...)
	was := ""
	if s.state.ID != "" {
		was = fmt.Sprintf(" They were started with root %s%s.", s.state.Root, placed(s.state.Device, s.state.Mount))
	}
	return errdefs.FailedPrecondition("root %s%s does not know %d pods and containers that run on this node (%s): %s.%s"+
		" Berth would kill them. Mount the filesystem of root, or correct root and state in the configuration, and start"+
		" berth again; until then they keep running. To give them up, run \"berth reset\" or restart the node",
		s.dirs.Root, s.place(), len(lost), names(lost), why, was)
}

// place returns where root is at present.
func (s *survey) place() string {
	mount, err := host.MountOf(s.dirs.Root)
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

// checkState refuses another state directory while the recorded one has pods that run.
func (s *survey) checkState() error {
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
