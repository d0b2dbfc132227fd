package verify

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fsnotify"
	ghost_file "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	pipe_data "github.com/checkpoint-restore/go-criu/v8/crit/images/pipe-data"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap_file_path "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	sk_packet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/tty"
	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

// file is an open file of the images.
type file struct {
	kind     fdinfo.FdTypes
	external bool // it comes from outside the container
}

// checkFiles checks the open files of all processes.
func (c *check) checkFiles() error {
	entries, err := entriesOf[fdinfo.FileEntry](c.images, "files.img", "FILES", nil)
	if err != nil {
		return err
	}
	c.files = make(map[uint32]file, len(entries))
	for _, e := range entries {
		if _, ok := c.files[e.GetId()]; ok {
			c.differ(fmt.Sprintf("file %d", e.GetId()), "two entries", "one")
		}
		c.files[e.GetId()] = file{kind: e.GetType(), external: e.GetReg().GetExt()}
		c.checkFile(e)
	}
	c.checkPeers(entries)
	for _, step := range []func() error{c.checkTerminals, c.checkRemaps, c.checkGhosts, c.readQueues} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// checkFile checks a file by its kind. Kinds without a case are differences.
func (c *check) checkFile(e *fdinfo.FileEntry) {
	field := fmt.Sprintf("file %d", e.GetId())
	missing := false
	switch e.GetType() {
	case fdinfo.FdTypes_REG:
		missing = e.Reg == nil
		c.checkRegular(field, e.GetReg())
	case fdinfo.FdTypes_PIPE:
		missing = e.Pipe == nil
		c.checkOwner(field, e.GetPipe().GetFown())
	case fdinfo.FdTypes_FIFO:
		missing = e.Fifo == nil
	case fdinfo.FdTypes_EVENTFD:
		missing = e.Efd == nil
		c.checkOwner(field, e.GetEfd().GetFown())
	case fdinfo.FdTypes_EVENTPOLL:
		missing = e.Epfd == nil
		c.checkOwner(field, e.GetEpfd().GetFown())
	case fdinfo.FdTypes_SIGNALFD:
		missing = e.Sgfd == nil
		c.checkOwner(field, e.GetSgfd().GetFown())
	case fdinfo.FdTypes_TIMERFD:
		missing = e.Tfd == nil
		c.checkOwner(field, e.GetTfd().GetFown())
		c.checkClock(field, e.GetTfd().GetClockid())
	case fdinfo.FdTypes_MEMFD:
		missing = e.Memfd == nil
		c.checkOwner(field, e.GetMemfd().GetFown())
	case fdinfo.FdTypes_PIDFD:
		missing = e.Pidfd == nil
		c.checkOwner(field, e.GetPidfd().GetFown())
	case fdinfo.FdTypes_INOTIFY:
		missing = e.Ify == nil
		c.checkInotify(field, e.GetIfy())
	case fdinfo.FdTypes_TTY:
		missing = e.Tty == nil
		c.checkOpenFlags(field, e.GetTty().GetFlags())
		c.checkOwner(field, e.GetTty().GetFown())
	case fdinfo.FdTypes_UNIXSK:
		missing = e.Usk == nil
		c.checkUnix(field, e.GetUsk())
	case fdinfo.FdTypes_INETSK:
		missing = e.Isk == nil
		c.checkInet(field, e.GetIsk())
	case fdinfo.FdTypes_NETLINKSK:
		missing = e.Nlsk == nil
		c.checkNetlink(field, e.GetNlsk())
	default:
		c.differ(field, strings.ToLower(e.GetType().String()), "a kind that berth can restore")
	}
	if missing {
		c.differ(field, strings.ToLower(e.GetType().String())+" without its entry", "one entry")
	}
}

// checkRegular checks a file with a path. CRIU opens it below the root of one of the mounts.
func (c *check) checkRegular(field string, f *regfile.RegFileEntry) {
	c.checkOwner(field, f.GetFown())
	name := f.GetName()
	if f.GetExt() {
		if !slices.Contains(c.e.ExternalFiles, name) {
			c.differ(field, "the external file "+name, "a file of the container")
		}
		return
	}
	if !path.IsAbs(name) || path.Clean(name) != name {
		c.differ(field, "the path "+name, "a path in the container")
	}
	if c.ofProcess(name) {
		c.differ(field, name, "no file of a process")
	}
	c.checkOpenFlags(field, f.GetFlags())
	if !c.mounts[f.GetMntId()] {
		c.differ(field, fmt.Sprintf("%s on mount %d", name, f.GetMntId()), "a mount of the spec")
	}
	switch f.GetMode() & unix.S_IFMT {
	case 0, unix.S_IFREG, unix.S_IFDIR, unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFLNK:
	default:
		c.differ(field, fmt.Sprintf("mode %o", f.GetMode()), "a file or directory")
	}
}

// ofProcess returns whether a path is in the directory of a process in /proc. CRIU opens files as
// root, before a process has the rights of the spec: it could give a process another one's memory.
func (c *check) ofProcess(name string) bool {
	return slices.ContainsFunc(c.e.Spec.Mounts, func(m specs.Mount) bool {
		below, is := strings.CutPrefix(name, strings.TrimSuffix(path.Clean(m.Destination), "/")+"/")
		first, _, _ := strings.Cut(below, "/")
		_, err := strconv.Atoi(first)
		return m.Type == "proc" && is && (err == nil || first == "self" || first == "thread-self")
	})
}

// checkOpenFlags refuses flags that make or empty a file. The kernel reports none of them for an
// open file.
func (c *check) checkOpenFlags(field string, flags uint32) {
	if making := flags & (unix.O_CREAT | unix.O_EXCL | unix.O_TRUNC); making != 0 {
		c.differ(field+": flags", fmt.Sprintf("%#o", making), "none that make or empty a file")
	}
}

// checkOwner checks to whom a file sends signals, and with whose rights (F_SETOWN).
func (c *check) checkOwner(field string, o *fown.FownEntry) {
	if o.GetPid() == 0 || c.e.may(capability.CAP_SETUID) {
		return
	}
	if uid := c.e.Spec.Process.User.UID; o.GetUid() != uid || o.GetEuid() != uid {
		c.differ(field+": sender of signals", fmt.Sprint(o.GetUid()), fmt.Sprint(uid))
	}
}

// checkClock refuses the clocks that wake the machine (CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM).
func (c *check) checkClock(field string, clock uint32) {
	if !slices.Contains([]uint32{unix.CLOCK_REALTIME, unix.CLOCK_MONOTONIC, unix.CLOCK_BOOTTIME}, clock) {
		c.differ(field+": clock", fmt.Sprint(clock), "a clock that wakes no machine")
	}
}

// checkInotify refuses watches without a path: CRIU opens the file of a handle, which can be
// anywhere on the filesystem.
func (c *check) checkInotify(field string, f *fsnotify.InotifyFileEntry) {
	c.checkOwner(field, f.GetFown())
	for _, watch := range f.GetWd() {
		if p := watch.GetFHandle().GetPath(); !path.IsAbs("/"+p) || p == "" || slices.Contains(strings.Split(p, "/"), "..") {
			c.differ(field+": inotify watch", quoted(p), "a path in the container")
		}
	}
}

// checkTerminals accepts only pseudoterminals of the container and controlling terminals.
func (c *check) checkTerminals() error {
	all, err := entriesOf[tty.TtyInfoEntry](c.images, "tty-info.img", "TTY_INFO", nil)
	for _, t := range all {
		if kind := t.GetType(); kind != tty.TtyType_PTY && kind != tty.TtyType_CTTY {
			c.differ(fmt.Sprintf("terminal %d", t.GetId()), strings.ToLower(kind.String()), "a pseudoterminal")
		}
	}
	return err
}

// checkRemaps checks the list of deleted files.
func (c *check) checkRemaps() error {
	all, err := entriesOf[remap_file_path.RemapFilePathEntry](c.images, "remap-fpath.img", "REMAP_FPATH", nil)
	for _, r := range all {
		field := fmt.Sprintf("deleted file %d", r.GetOrigId())
		if f, ok := c.files[r.GetOrigId()]; !ok || f.external {
			c.differ(field, "no file of the images", "a file of the container")
		}
		// LINKED names a file of the images, PROCFS a process of the images.
		if r.GetRemapType() == remap_file_path.RemapType_LINKED && c.files[r.GetRemapId()].kind != fdinfo.FdTypes_REG {
			c.differ(field, fmt.Sprintf("a link to file %d", r.GetRemapId()), "a file of the container")
		}
	}
	return err
}

// checkGhosts checks the deleted files that CRIU creates again. The content follows the entry.
func (c *check) checkGhosts() error {
	for id, name := range c.images.numbered("ghost-file") {
		field := fmt.Sprintf("deleted file %d", id)
		ghost, err := c.readGhost(name)
		if err != nil {
			return err
		}
		switch kind := ghost.GetMode() & unix.S_IFMT; kind {
		case unix.S_IFREG, unix.S_IFDIR, unix.S_IFIFO, unix.S_IFSOCK: // CRIU could follow a link when it opens others
		default:
			c.differ(field, fmt.Sprintf("a device or a file of type %o", kind), "a file")
		}
		if ghost.GetMode()&(unix.S_ISUID|unix.S_ISGID) != 0 {
			c.differ(field, "a set-id file", "a file without set-id bits")
		}
	}
	return nil
}

// readGhost returns the entry of a deleted file.
func (c *check) readGhost(name string) (*ghost_file.GhostFileEntry, error) {
	image, err := c.images.open(name)
	if err != nil {
		return nil, err
	}
	defer image.Close() // it was only read
	if err := c.images.checkMagic(image, "GHOST_FILE"); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	ghost := new(ghost_file.GhostFileEntry)
	if err := c.images.next(image, name, func() proto.Message { return ghost }); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return ghost, nil
}

// readQueues reads the data in pipes and sockets, to find out that it is complete.
func (c *check) readQueues() error {
	for name, kind := range map[string]string{"pipes-data.img": "PIPES_DATA", "fifo-data.img": "FIFO_DATA"} {
		_, err := entriesOf(c.images, name, kind, func(e *pipe_data.PipeDataEntry, f *os.File) error {
			return skip(f, int64(e.GetBytes()))
		})
		if err != nil {
			return err
		}
	}
	all, err := entriesOf(c.images, "sk-queues.img", "SK_QUEUES", func(e *sk_packet.SkPacketEntry, f *os.File) error {
		return skip(f, int64(e.GetLength()))
	})
	for _, packet := range all {
		for _, scm := range packet.GetScm() {
			for _, id := range scm.GetRights() {
				if f, ok := c.files[id]; !ok || f.external {
					field := fmt.Sprintf("message of socket %d", packet.GetIdFor())
					c.differ(field, fmt.Sprintf("file %d", id), "a file of the container")
				}
			}
		}
	}
	return err
}
