// Package cgstats reads the usage of cgroups and network namespaces from the kernel's files.
//
// # Contract
//
// A Reader belongs to one cgroup. The first Read opens the files, which stay open until Close, so a
// Read is one pread(2) per file. A Read takes five files on cgroup v1 (fewer if a controller is
// missing), nine on v2, and one for tasks. A node with 500 containers needs 2,500 or 4,500
// descriptors, but only after a client has asked for statistics. Files that only metrics need are
// opened for each read.
//
// Any number of goroutines may read at the same time, and one may close the Reader meanwhile. A
// Reader has no lock. A NetDev admits one reader at a time. Parsing allocates no memory.
//
// A container can choose the names and the number of its interfaces. Names are returned only if
// they are valid UTF-8, and the number is limited.
//
// The error for a removed cgroup is ErrGone. A missing or disabled controller is no error. Its part
// of a Sample is not Known.
package cgstats

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone means that the cgroup, or the namespace's process, no longer exists.
var ErrGone = errors.New("gone")

// Group describes a cgroup's directories.
type Group struct {
	V2 bool
	// Dir returns the group's directory in the hierarchy of a v1 controller, or "" if the
	// controller is not mounted. On v2 all controllers share one directory.
	Dir func(controller string) string
}

// Reader reads one cgroup.
type Reader struct {
	find  func() (Group, error)
	tasks bool
	files kept[*files]
}

// files are the open files of a Sample. A file that does not exist is nil.
type files struct {
	group Group

	cpu, usage, stat, limit, swap, swapLimit *file
	cpuPSI, memoryPSI, ioPSI, tasks          *file
}

// New returns a reader of the group that find returns. The first read opens the files. With tasks,
// samples count the group's tasks.
func New(find func() (Group, error), tasks bool) *Reader { return &Reader{find: find, tasks: tasks} }

// Close closes the files. Later reads fail with ErrGone.
func (r *Reader) Close() error { return r.files.close() }

// Close closes all open files.
func (f *files) Close() error {
	var errs []error
	for _, file := range []*file{f.cpu, f.usage, f.stat, f.limit, f.swap, f.swapLimit, f.cpuPSI, f.memoryPSI, f.ioPSI,
		f.tasks} {
		if file != nil {
			errs = append(errs, file.Close())
		}
	}
	return errors.Join(errs...)
}

// Read fills s. The error is ErrGone, or the error of opening or reading a file.
func (r *Reader) Read(s *Sample) error {
	f, err := r.files.get(r.open)
	if err != nil {
		return fmt.Errorf("open cgroup statistics: %w", gone(err))
	}
	*s = Sample{}
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	if f.group.V2 {
		err = f.readV2(s, buf)
	} else {
		err = f.readV1(s, buf)
	}
	if err != nil {
		return fmt.Errorf("read cgroup statistics: %w", gone(err))
	}
	return nil
}

func (r *Reader) open() (*files, error) {
	group, err := r.find()
	if err != nil {
		return nil, err
	}
	f := &files{group: group}
	o := opener{group: group}
	if group.V2 {
		f.cpu = o.open("cpu", "cpu.stat")
		f.usage, f.stat, f.limit = o.open("memory", "memory.current"), o.open("memory",
			"memory.stat"), o.open("memory", "memory.max")
		f.swap, f.swapLimit = o.open("memory", "memory.swap.current"), o.open("memory", "memory.swap.max")
		f.cpuPSI, f.memoryPSI, f.ioPSI = o.open("cpu", "cpu.pressure"), o.open("memory",
			"memory.pressure"), o.open("io", "io.pressure")
	} else {
		f.cpu = o.open("cpuacct", "cpuacct.usage")
		f.usage, f.stat, f.limit = o.open("memory", "memory.usage_in_bytes"), o.open("memory",
			"memory.stat"), o.open("memory", "memory.limit_in_bytes")
		f.swapLimit = o.open("memory", "memory.memsw.limit_in_bytes")
	}
	if r.tasks {
		f.tasks = o.open("pids", "pids.current")
	}
	if o.err == nil && f.cpu == nil && f.usage == nil {
		o.err = ErrGone // if both files are missing, it is not a cgroup
	}
	if o.err != nil {
		return nil, errors.Join(o.err, f.Close())
	}
	return f, nil
}

// opener opens files until one fails.
type opener struct {
	group Group
	err   error
}

// open returns a file of the group, or nil if it does not exist.
func (o *opener) open(controller, name string) *file {
	dir := o.group.Dir(controller)
	if o.err != nil || dir == "" {
		return nil
	}
	f, err := openFile(filepath.Join(dir, name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		o.err = err
	}
	return f
}

func (f *files) readV2(s *Sample, buf *buffer) error {
	b, err := content(f.cpu, buf)
	if err != nil {
		return err
	}
	s.At = time.Now()
	s.CPU.Known = b != nil
	parseCPUStat(b, &s.CPU)
	if err := f.readMemory(&s.Memory, buf, parseMemoryStatV2); err != nil {
		return err
	}
	if s.Memory.Swap, s.Memory.SwapKnown, err = number(f.swap, buf, parseUint); err != nil {
		return err
	}
	if s.Memory.SwapLimit, _, err = number(f.swapLimit, buf, parseLimit); err != nil {
		return err
	}
	if err := f.readPressure(s, buf); err != nil {
		return err
	}
	s.Tasks, s.TasksKnown, err = number(f.tasks, buf, parseUint)
	return err
}

func (f *files) readV1(s *Sample, buf *buffer) (err error) {
	if s.CPU.Usage, s.CPU.Known, err = number(f.cpu, buf, parseUint); err != nil {
		return err
	}
	s.At = time.Now()
	if err := f.readMemory(&s.Memory, buf, parseMemoryStatV1); err != nil {
		return err
	}
	both, known, err := number(f.swapLimit, buf, parseLimit) // memory plus swap
	if err != nil {
		return err
	}
	s.Memory.SwapKnown = s.Memory.SwapKnown && known
	s.Memory.SwapLimit = Unlimited
	if both != Unlimited && s.Memory.Limit != Unlimited {
		s.Memory.SwapLimit = less(both, s.Memory.Limit)
	}
	s.Tasks, s.TasksKnown, err = number(f.tasks, buf, parseUint)
	return err
}

func (f *files) readMemory(m *Memory, buf *buffer, parseStat func([]byte, *Memory)) (err error) {
	if m.Usage, m.Known, err = number(f.usage, buf, parseUint); err != nil || !m.Known {
		return err
	}
	if m.Limit, _, err = number(f.limit, buf, parseLimit); err != nil {
		return err
	}
	b, err := content(f.stat, buf)
	parseStat(b, m)
	return err
}

func (f *files) readPressure(s *Sample, buf *buffer) error {
	for _, p := range [...]struct {
		file *file
		into *Pressure
	}{{f.cpuPSI, &s.CPU.Pressure}, {f.memoryPSI, &s.Memory.Pressure}, {f.ioPSI, &s.IO}} {
		b, err := content(p.file, buf)
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // boot option psi=0, or cgroup.pressure is 0 (Linux 6.1)
			return err
		}
		*p.into = parsePressure(b)
	}
	return nil
}

// gone converts the errors of removed objects to ErrGone. A file of a removed cgroup returns
// ENODEV, and a file of an ended process returns ESRCH.
func gone(err error) error {
	for _, e := range []error{unix.ENODEV, unix.ENOENT, unix.ESRCH, os.ErrClosed} {
		if errors.Is(err, e) {
			return ErrGone
		}
	}
	return err
}
