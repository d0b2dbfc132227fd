package launcher

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/checkpoint-restore/go-criu/v8/rpc"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/shim/launcher/criu"
	"berth/shim/proto"
)

// dump is the state of one dump request.
type dump struct {
	*proto.Dump
	l      *launcher
	config configs.Config
	state  *libcontainer.State
	pids   []int // the container's processes, before the freeze
	criu   *criu.Process
	opts   *rpc.CriuOpts
	images *os.File
	yard   *os.File // links to the node's mounts of cgroups
	result proto.Dumped
}

// serveDump carries out a dump request. An error means that the daemon is gone.
func (l *launcher) serveDump(request *proto.Dump, files []*os.File) error {
	failpoint.Reach("launcher.dump-ordered")
	d := &dump{Dump: request, l: l}
	err := d.prepare(files)
	if err != nil {
		return l.reply(proto.Reply{Error: toReply(errors.Join(err, d.end(0)))})
	}
	err = l.reply(proto.Reply{Dump: &d.result})
	var r proto.Request
	if err == nil {
		_, err = l.conn.Receive(&r)
	}
	if err != nil || !r.DumpNow {
		if endErr := d.end(0); endErr != nil {
			return errors.Join(err, endErr)
		}
		return err
	}
	err = d.run()
	failpoint.Reach("launcher.dump-ended")
	if err != nil {
		return l.reply(proto.Reply{Error: toReply(errors.Join(err, d.end(abortGrace)))})
	}
	err = l.reply(proto.Reply{Dump: &d.result}) // the container is frozen until then
	return errors.Join(err, d.end(abortGrace))
}

// prepare does everything that the container needs not be frozen for.
func (d *dump) prepare(files []*os.File) (err error) {
	if err := d.TakeFiles(files); err != nil {
		return err
	}
	if err := d.load(); err != nil {
		return err
	}
	if d.criu, err = criu.Start(d.CRIU, d.ID); err != nil {
		return err
	}
	if d.result.CRIU, err = d.criu.Version(); err != nil {
		return err
	}
	if err := d.result.CRIU.Check(); err != nil {
		return proto.Errorf(proto.FailedPrecondition, "%v", err)
	}
	if err := d.checkDumpable(); err != nil {
		return err
	}
	if err := d.openImages(); err != nil {
		return err
	}
	if err := d.setOptions(); err != nil {
		return err
	}
	return d.writeDescriptors()
}

// load reads libcontainer's state of the container.
func (d *dump) load() error {
	found, err := d.l.load(d.l.settings.StateRoot, d.ID)
	if errors.Is(err, libcontainer.ErrNotExist) {
		return proto.Errorf(proto.FailedPrecondition, "it is not running")
	}
	if err != nil {
		return fmt.Errorf("load its state: %w", err)
	}
	d.config = found.config
	if d.state, err = found.container.State(); err != nil {
		return fmt.Errorf("read its state: %w", err)
	}
	if d.freezer() == "" {
		return proto.Errorf(proto.FailedPrecondition, "the node has no freezer cgroup")
	}
	d.pids, err = cgroup.ProcsIn(d.freezer())
	return err
}

// freezer returns the directory of the cgroup that freezes the container.
func (d *dump) freezer() string {
	if cgroups.IsCgroup2UnifiedMode() {
		return d.state.CgroupPaths[""]
	}
	return d.state.CgroupPaths["freezer"]
}

// openImages makes and opens the directory of CRIU's images.
func (d *dump) openImages() error {
	dir := int(d.Dir.Fd())
	failpoint.Reach("launcher.make-images")
	if err := unix.Mkdirat(dir, proto.ImagesDir, 0o700); err != nil {
		return fmt.Errorf("make directory for images: %w", os.NewSyscallError("mkdirat", err))
	}
	failpoint.Reach("launcher.images-made")
	fd, err := unix.Openat(dir, proto.ImagesDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open directory for images: %w", os.NewSyscallError("openat", err))
	}
	d.images = os.NewFile(uintptr(fd), proto.ImagesDir)
	return nil
}

// Limits of a dump.
const (
	// ghostLimit is the maximum size of a deleted file that is still open, in bytes.
	ghostLimit = 256 << 20
	// seizeTime is how long CRIU may take to stop the container's processes, in seconds. They are
	// frozen already. A process in uninterruptible sleep may freeze, and may still not stop.
	seizeTime = 10
	// criuLogLevel is the level of dump.log: errors and warnings.
	criuLogLevel = 2
)

// setOptions sets CRIU's options as libcontainer does for runc, with two differences. The restore
// closes established TCP connections (run sets this option). The network is not locked during the
// dump, because the container continues, and no connection is repaired. A deleted file that has
// another link is refused (link_remap is off). CRIU would link it again only until the container
// continues, and the copy of the writable layer would not have the link.
func (d *dump) setOptions() error {
	d.opts = &rpc.CriuOpts{
		ImagesDirFd:       ptr(int32(d.images.Fd())),
		WorkDirFd:         ptr(int32(d.Dir.Fd())),
		LogLevel:          ptr(int32(criuLogLevel)),
		LogFile:           ptr(proto.DumpLog),
		Pid:               ptr(int32(d.state.InitProcessPid)),
		LeaveRunning:      ptr(true),
		NotifyScripts:     ptr(false),
		ManageCgroups:     ptr(true),
		ManageCgroupsMode: ptr(rpc.CriuCgMode_SOFT),
		ExtUnixSk:         ptr(true),
		FileLocks:         ptr(true),
		NetworkLock:       ptr(rpc.CriuNetworkLockMethod_SKIP),
		OrphanPtsMaster:   ptr(true),
		GhostLimit:        ptr(uint32(ghostLimit)),
		Timeout:           ptr(uint32(seizeTime)),
		FreezeCgroup:      ptr(d.freezer()),
	}
	if err := d.addCgroupYard(); err != nil {
		return err
	}
	if err := d.addNamespaces(); err != nil {
		return err
	}
	return errors.Join(d.addMounts(), d.addNullDevices(), d.addWatches())
}

// addCgroupYard gives CRIU the node's mounts of cgroups. If a hierarchy is not mounted, CRIU mounts
// all.
func (d *dump) addCgroupYard() (err error) {
	list, err := hierarchiesOf(d.state.InitProcessPid)
	if err != nil || slices.ContainsFunc(list, func(h hierarchy) bool { return h.mount == "" }) {
		return err
	}
	if d.yard, err = linkHierarchies(list); err != nil {
		return fmt.Errorf("link cgroups for CRIU: %w", err)
	}
	d.opts.CgroupYard = ptr(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), d.yard.Fd()))
	return nil
}

// addNamespaces names the namespaces of the pod, which the images do not contain.
func (d *dump) addNamespaces() error {
	for kind, key := range map[configs.NamespaceType]string{configs.NEWNET: "net", configs.NEWPID: "pid"} {
		path := d.config.Namespaces.PathOf(kind)
		if path == "" {
			continue
		}
		var ns unix.Stat_t
		if err := unix.Stat(path, &ns); err != nil {
			return fmt.Errorf("namespace %s: %w", path, err)
		}
		name := strings.ToUpper(key[:1]) + key[1:]
		d.opts.External = append(d.opts.External, fmt.Sprintf("%s[%d]:extRoot%sNS", key, ns.Ino, name))
	}
	return nil
}

// addMounts names the mounts that the images do not contain: bind mounts, masked files, and
// devices.
func (d *dump) addMounts() error {
	root := fmt.Sprintf("/proc/%d/root", d.state.InitProcessPid)
	private := d.config.Namespaces.Contains(configs.NEWCGROUP)
	for _, m := range d.config.Mounts {
		switch {
		case m.Device == "bind":
			d.external(root, m.Destination)
			d.result.BindMounts = append(d.result.BindMounts, m.Destination)
		case m.Device == "cgroup" && !private && !cgroups.IsCgroup2UnifiedMode():
			mounts, err := cgroups.GetCgroupMounts(false)
			if err != nil {
				return err
			}
			for _, hierarchy := range mounts {
				d.external(root, filepath.Join(m.Destination, filepath.Base(hierarchy.Mountpoint)))
			}
		}
	}
	for _, path := range d.config.MaskPaths {
		// A masked directory is a tmpfs, which the images contain.
		if info, err := os.Stat(root + path); err == nil && !info.IsDir() {
			d.opts.ExtMnt = append(d.opts.ExtMnt, &rpc.ExtMountMap{Key: ptr(path), Val: ptr("/dev/null")})
		}
	}
	for _, node := range d.config.Devices {
		d.external(root, node.Path)
	}
	return nil
}

// external adds a mount point of the container. CRIU compares the path without symbolic links.
func (d *dump) external(root, path string) {
	if resolved, err := resolveIn(root, path); err == nil {
		path = resolved
	}
	d.opts.ExtMnt = append(d.opts.ExtMnt, &rpc.ExtMountMap{Key: ptr(path), Val: ptr(path)})
}

// resolveIn returns the path of a file below root without symbolic links.
func resolveIn(root, path string) (string, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", os.NewSyscallError("open", err)
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, strings.TrimPrefix(path, "/"), &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return "", os.NewSyscallError("openat2", err)
	}
	defer unix.Close(fd)
	return pathBelow(dir, fd)
}

// pathBelow returns the path of an open file below an open directory.
func pathBelow(dir, fd int) (string, error) {
	whole, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", err
	}
	base, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir))
	if err != nil {
		return "", err
	}
	rest, found := strings.CutPrefix(whole, strings.TrimSuffix(base, "/"))
	if !found || rest == "" {
		return "", errors.New("it is outside of the root")
	}
	return rest, nil
}

// nullKey is the name of berth's private null devices (newNull) in the images. It has the form of a
// pipe's name, because libcontainer's restore replaces only descriptors of that form.
const nullKey = "pipe:[berth-null]"

// addNullDevices names the null devices that are the processes' streams. The devices are in no
// mount namespace, so CRIU could not find them.
func (d *dump) addNullDevices() error {
	found := map[string]bool{}
	for _, pid := range d.pids {
		for fd := range 3 {
			id, err := nullDevice(pid, fd)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) && !errors.Is(err, unix.EINVAL) {
				return err // EINVAL: from its mountinfo, while the process ends
			}
			if id != "" {
				found[id] = true
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(found)) {
		d.opts.External = append(d.opts.External, id+":"+nullKey)
	}
	return nil
}

// nullDevice returns CRIU's name of a process's descriptor if it is a null device of newNull, and
// "" otherwise.
func nullDevice(pid, fd int) (string, error) {
	path := fmt.Sprintf("/proc/%d/fd/%d", pid, fd)
	if target, err := os.Readlink(path); err != nil || target != os.DevNull {
		return "", err
	}
	info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, fd))
	if err != nil {
		return "", err
	}
	var mount int
	for line := range strings.Lines(string(info)) {
		if _, err := fmt.Sscanf(line, "mnt_id: %d", &mount); err == nil {
			break
		}
	}
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(table)) {
		if strings.HasPrefix(line, fmt.Sprintf("%d ", mount)) {
			return "", nil // of the container's own /dev
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("file[%x:%x]", mount, st.Ino), nil
}

// descriptorsFile has the names of the first process's streams. runc and CRI-O read it, too.
const descriptorsFile = "descriptors.json"

// writeDescriptors writes the streams' names beside the images, where libcontainer's restore looks
// for them.
func (d *dump) writeDescriptors() error {
	names := slices.Clone(d.state.ExternalDescriptors)
	for fd := range min(len(names), 3) {
		if id, err := nullDevice(d.state.InitProcessPid, fd); err == nil && id != "" {
			names[fd] = nullKey
		}
	}
	data, err := json.Marshal(names)
	if err != nil {
		return err
	}
	failpoint.Reach("launcher.write-descriptors")
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
	fd, err := unix.Openat(int(d.images.Fd()), descriptorsFile, flags, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", descriptorsFile, noSpace(err))
	}
	f := os.NewFile(uintptr(fd), descriptorsFile)
	_, err = f.Write(data)
	failpoint.Reach("launcher.descriptors-written")
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", descriptorsFile, noSpace(err))
	}
	return nil
}

// noSpace adds the gRPC code if the cause of an error is a full filesystem or quota.
func noSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return proto.Errorf(proto.ResourceExhausted, "%v", err)
	}
	return err
}

// abortGrace is how long CRIU may take to end by itself after an abort. A kill at the wrong time
// can end a process of the container.
const abortGrace = 5 * time.Second

// run dumps the frozen container. If the daemon leaves, the dump is aborted. After success CRIU
// only has to exit.
func (d *dump) run() error {
	if err := d.checkTree(); err != nil {
		return err
	}
	connected, err := d.mayBeConnected()
	if err != nil {
		return err
	}
	d.opts.TcpClose = ptr(connected)
	stop := d.watchDaemon()
	err = d.criu.Dump(d.opts)
	stop()
	if err != nil {
		return d.explain(err)
	}
	return nil
}

// watchDaemon aborts the dump when the daemon has left. stop ends the watch.
func (d *dump) watchDaemon() (stop func()) {
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		var r proto.Request
		if _, err := d.l.conn.Receive(&r); errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		_ = d.criu.Abort() // if that fails, CRIU is killed
		select {
		case <-done:
		case <-time.After(abortGrace):
			failpoint.Reach("launcher.kill-dump")
			_ = d.criu.Kill() // end tries again and reports the error
		}
	})
	return sync.OnceFunc(func() {
		close(done)
		_ = d.l.conn.SetDeadline(time.Unix(1, 0)) // it fails only on a closed connection, which has no readers
		watching.Wait()
		_ = d.l.conn.SetDeadline(time.Time{})
	})
}

// end ends CRIU and closes the files.
func (d *dump) end(grace time.Duration) error {
	var err error
	if d.criu != nil {
		err = d.criu.End(grace)
		d.criu = nil
	}
	for _, f := range []*os.File{d.images, d.yard, d.Dir} {
		if f != nil {
			err = errors.Join(err, ignore(f.Close(), os.ErrClosed))
		}
	}
	return err
}

// maxLogged is how much of CRIU's log explain reads, in bytes.
const maxLogged = 64 << 10

// explain names the cause of a failed dump. CRIU's answer has no reason, so it comes from CRIU's
// log. If CRIU cannot dump something, the error is FailedPrecondition.
func (d *dump) explain(cause error) error {
	errs := d.loggedErrors()
	text := cause.Error()
	if len(errs) > 0 {
		text += ": " + strings.Join(errs[max(0, len(errs)-3):], "; ")
	}
	switch {
	case strings.Contains(text, unix.ENOSPC.Error()) || strings.Contains(text, "No space left on device") || isFull(d.Dir):
		return proto.Errorf(proto.ResourceExhausted, "the filesystem of the checkpoint is full: %s", text)
	case !errors.Is(cause, criu.ErrRefused):
		return errors.New(text)
	}
	for _, line := range errs {
		for _, known := range undumpableResources {
			if strings.Contains(line, known.logged) {
				return proto.Errorf(proto.FailedPrecondition, "%s: %s", known.words, line)
			}
		}
	}
	return proto.Errorf(proto.FailedPrecondition, "%s", text)
}

// undumpableResources are the words for errors in CRIU's log.
var undumpableResources = []struct{ logged, words string }{
	{"Unseizable non-zombie", "a process is in uninterruptible sleep"},
	{"Can't dump half of stream unix connection", "it has a unix socket that is connected to another container or to the node"},
	{"External socket is used", "it has a unix socket that is connected to another container or to the node"},
	{"Can't lookup mount=", "it has an open file outside of its mounts"},
	{"increase limit", fmt.Sprintf("it has a deleted open file larger than %d MiB", ghostLimit>>20)},
	{"Use link-remap option", "it has a deleted open file with another link"},
	{"Can't dump that handle", "it watches a file with inotify whose path cannot be found"},
	{"anon_inode", "it has an open file of a kind that CRIU does not know"},
	{"of that type", "it has an open file of a kind that CRIU does not know"},
	{"dangling tty", "it has a terminal that is not its own"},
}

// loggedErrors returns the errors in CRIU's log.
func (d *dump) loggedErrors() (errs []string) {
	fd, err := unix.Openat(int(d.Dir.Fd()), proto.DumpLog, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), proto.DumpLog)
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxLogged {
		_, _ = f.Seek(-maxLogged, io.SeekEnd) // then the log is read from its start
	}
	data, err := io.ReadAll(io.LimitReader(f, maxLogged))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(data)) {
		if _, text, found := strings.Cut(line, "Error ("); found {
			_, text, _ = strings.Cut(text, "): ")
			errs = append(errs, strings.TrimSpace(text))
		}
	}
	return errs
}

// fullBelow is the free space, in bytes, below which a filesystem counts as full.
const fullBelow = 64 << 10

func isFull(dir *os.File) bool {
	var s unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &s); err != nil {
		return false
	}
	return s.Bavail*uint64(s.Bsize) < fullBelow
}

func ptr[T any](v T) *T { return &v }
