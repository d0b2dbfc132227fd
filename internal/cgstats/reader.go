// Package cgstats reads what cgroups and network namespaces have used, straight
// from the kernel's files.
//
// # Contract
//
// A Reader belongs to one cgroup. It finds and opens its files with the first Read and
// keeps them open until Close, so that a Read is one pread(2) a file: five files on cgroup
// v1 (none where a controller is missing), nine on v2, one more for tasks. A node
// with 500 containers holds 2,500 or 4,500 descriptors for them, and only if
// somebody asks for statistics. What metrics alone need is opened when it is read.
//
// Any number of goroutines may read at the same time, and one may close meanwhile:
// there is no lock. Parsing allocates nothing.
//
// A cgroup that is gone is ErrGone. A controller that is not there, or that the
// kernel was built or told to go without, is no error: its part is not Known.
package cgstats

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ErrGone says that the cgroup, or the namespace's process, does not exist any more.
var ErrGone = errors.New("gone")

// Group names a cgroup's folders.
type Group struct {
	V2 bool
	// Dir returns the group's folder in the hierarchy of a v1 controller, "" if that is
	// not mounted. On v2 it is the same for all.
	Dir func(controller string) string
}

// Reader reads one cgroup.
type Reader struct {
	find  func() (Group, error)
	tasks bool
	files kept[*files]
}

// files are those of a Sample. A nil file is not there.
type files struct {
	group Group

	cpu, usage, stat, limit, swap, swapLimit *os.File
	cpuPSI, memoryPSI, ioPSI, tasks          *os.File
}

// New returns a reader of the group that find finds; nothing is done yet. With
// tasks, samples count the group's tasks.
func New(find func() (Group, error), tasks bool) *Reader { return &Reader{find: find, tasks: tasks} }

// Close closes the files. Reads fail with ErrGone from then on.
func (r *Reader) Close() error { return r.files.close() }

// Close closes the files that are there.
func (f *files) Close() error {
	var errs []error
	for _, file := range []*os.File{f.cpu, f.usage, f.stat, f.limit, f.swap, f.swapLimit, f.cpuPSI, f.memoryPSI, f.ioPSI, f.tasks} {
		if file != nil {
			errs = append(errs, file.Close())
		}
	}
	return errors.Join(errs...)
}

// Read fills s. The error is ErrGone, or what kept a file from being opened or read.
func (r *Reader) Read(s *Sample) error {
	f, err := r.files.get(r.open)
	if err != nil {
		return fmt.Errorf("open cgroup statistics: %w", gone(err))
	}
	*s = Sample{}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	if f.group.V2 {
		err = f.readV2(s, *buf)
	} else {
		err = f.readV1(s, *buf)
	}
	if err != nil {
		return fmt.Errorf("read cgroup statistics: %w", gone(err))
	}
	return nil
}

// bufferSize has room for any single file: memory.stat, the largest, has 2 to 3 KiB.
const bufferSize = 16 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferSize); return &b }}

func (r *Reader) open() (*files, error) {
	group, err := r.find()
	if err != nil {
		return nil, err
	}
	f := &files{group: group}
	o := opener{group: group}
	if group.V2 {
		f.cpu = o.open("cpu", "cpu.stat")
		f.usage, f.stat, f.limit = o.open("memory", "memory.current"), o.open("memory", "memory.stat"), o.open("memory", "memory.max")
		f.swap, f.swapLimit = o.open("memory", "memory.swap.current"), o.open("memory", "memory.swap.max")
		f.cpuPSI, f.memoryPSI, f.ioPSI = o.open("cpu", "cpu.pressure"), o.open("memory", "memory.pressure"), o.open("io", "io.pressure")
	} else {
		f.cpu = o.open("cpuacct", "cpuacct.usage")
		f.usage, f.stat, f.limit = o.open("memory", "memory.usage_in_bytes"), o.open("memory", "memory.stat"), o.open("memory", "memory.limit_in_bytes")
		f.swapLimit = o.open("memory", "memory.memsw.limit_in_bytes")
	}
	if r.tasks {
		f.tasks = o.open("pids", "pids.current")
	}
	if o.err == nil && f.cpu == nil && f.usage == nil {
		o.err = ErrGone // without any of the two it is no group of ours
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

// open returns a file of the group, nil if there is none.
func (o *opener) open(controller, name string) *os.File {
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

// openFile opens a file of the kernel's. os.Open would have the poller watch it,
// which cgroup files allow, and wake up for their events.
func openFile(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (f *files) readV2(s *Sample, buf []byte) error {
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
	s.Tasks, _, err = number(f.tasks, buf, parseUint)
	return err
}

func (f *files) readV1(s *Sample, buf []byte) (err error) {
	if s.CPU.Usage, s.CPU.Known, err = number(f.cpu, buf, parseUint); err != nil {
		return err
	}
	s.At = time.Now()
	if err := f.readMemory(&s.Memory, buf, parseMemoryStatV1); err != nil {
		return err
	}
	both, known, err := number(f.swapLimit, buf, parseLimit) // of memory and swap together
	if err != nil {
		return err
	}
	s.Memory.SwapKnown = s.Memory.SwapKnown && known
	s.Memory.SwapLimit = Unlimited
	if both != Unlimited && s.Memory.Limit != Unlimited {
		s.Memory.SwapLimit = less(both, s.Memory.Limit)
	}
	s.Tasks, _, err = number(f.tasks, buf, parseUint)
	return err
}

func (f *files) readMemory(m *Memory, buf []byte, parseStat func([]byte, *Memory)) (err error) {
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

func (f *files) readPressure(s *Sample, buf []byte) error {
	for _, p := range [...]struct {
		file *os.File
		into *Pressure
	}{{f.cpuPSI, &s.CPU.Pressure}, {f.memoryPSI, &s.Memory.Pressure}, {f.ioPSI, &s.IO}} {
		b, err := content(p.file, buf)
		if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // psi=0, or cgroup.pressure is 0 (Linux 6.1)
			return err
		}
		*p.into = parsePressure(b)
	}
	return nil
}

// content reads a file that the kernel writes in one go. It is nil without a file.
func content(f *os.File, buf []byte) ([]byte, error) {
	if f == nil {
		return nil, nil
	}
	n, err := f.ReadAt(buf, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	return buf[:n], nil
}

// number reads a file that holds one number.
func number(f *os.File, buf []byte, parse func([]byte) (uint64, bool)) (v uint64, known bool, err error) {
	b, err := content(f, buf)
	if err != nil || b == nil {
		return 0, false, err
	}
	if v, known = parse(b); !known {
		return 0, false, fmt.Errorf("%s: %.40q is not a number", f.Name(), b)
	}
	return v, true, nil
}

// gone turns the errors that mean it into ErrGone: a file of a removed cgroup gives
// ENODEV, a file of an ended process ESRCH.
func gone(err error) error {
	for _, e := range []error{unix.ENODEV, unix.ENOENT, unix.ESRCH, os.ErrClosed} {
		if errors.Is(err, e) {
			return ErrGone
		}
	}
	return err
}

// NetDev reads the interfaces of the network namespace that a process is in. It opens
// its file with the first Read, which keeps the namespace in existence until Close.
type NetDev struct {
	pid   int
	alive func() bool
	file  kept[*os.File]
}

// NewNetDev returns a reader for the network namespace of a process. alive tells
// whether the ID still means that process.
func NewNetDev(pid int, alive func() bool) *NetDev { return &NetDev{pid: pid, alive: alive} }

// Read returns all interfaces but the loopback device. The error is ErrGone, or what
// kept the file from being opened or read.
func (d *NetDev) Read() ([]Interface, error) {
	f, err := d.file.get(d.open)
	if err != nil {
		return nil, fmt.Errorf("open network statistics: %w", gone(err))
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	b, err := readAll(f, *buf)
	if err != nil {
		return nil, fmt.Errorf("read network statistics: %w", gone(err))
	}
	return parseInterfaces(b, nil), nil
}

// Close gives the namespace back. Reads fail with ErrGone from then on.
func (d *NetDev) Close() error { return d.file.close() }

func (d *NetDev) open() (*os.File, error) {
	f, err := openFile(fmt.Sprintf("/proc/%d/net/dev", d.pid))
	if err == nil && !d.alive() { // it may be another's file
		err = errors.Join(ErrGone, f.Close())
	}
	return f, err
}

// readAll reads a file that the kernel writes record by record: each read returns
// whole records. It uses buf while that is large enough.
func readAll(f *os.File, buf []byte) ([]byte, error) {
	used := 0
	for {
		if used == len(buf) {
			buf = append(buf, make([]byte, len(buf))...)
		}
		n, err := f.ReadAt(buf[used:], int64(used))
		used += n
		if err == io.EOF {
			return buf[:used], nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// ReadDetail fills what only metrics need. It opens and closes the files for that.
func (r *Reader) ReadDetail(d *Detail) error {
	f, err := r.files.get(r.open)
	if err != nil {
		return fmt.Errorf("open cgroup statistics: %w", gone(err))
	}
	*d = Detail{TasksMax: Unlimited}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	v := detailReader{opener: opener{group: f.group}, buf: *buf}
	if f.group.V2 {
		v.readV2(d)
	} else {
		v.readV1(d)
	}
	v.readTasks(d)
	nameDevices(d.Devices)
	if v.err != nil {
		return fmt.Errorf("read cgroup details: %w", gone(v.err))
	}
	return nil
}

// detailReader reads files until one fails. Those that are not there are left out.
type detailReader struct {
	opener
	buf []byte
}

func (v *detailReader) content(controller, name string) []byte {
	f := v.open(controller, name)
	if f == nil {
		return nil
	}
	b, err := readAll(f, v.buf)
	if err = errors.Join(err, f.Close()); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		v.err = err
		return nil
	}
	return b
}

func (v *detailReader) number(controller, name string, parse func([]byte) (uint64, bool)) uint64 {
	n, _ := parse(v.content(controller, name))
	return n
}

func (v *detailReader) readV2(d *Detail) {
	parseCPUStat(v.content("cpu", "cpu.stat"), &d.CPU)
	d.MaxUsage = v.number("memory", "memory.peak", parseUint) // Linux 5.19
	d.Reservation = v.number("memory", "memory.low", parseLimit)
	parseEvents(v.content("memory", "memory.events"), d)
	d.Devices = parseIOStat(v.content("io", "io.stat"), nil)
	v.readHugePages(d, "hugetlb.*.current", ".current", "")
}

func (v *detailReader) readV1(d *Detail) {
	d.CPU.Usage = v.number("cpuacct", "cpuacct.usage", parseUint)
	d.CPU.User = v.number("cpuacct", "cpuacct.usage_user", parseUint) // Linux 4.11
	d.CPU.System = v.number("cpuacct", "cpuacct.usage_sys", parseUint)
	parseCPUStat(v.content("cpu", "cpu.stat"), &d.CPU)
	d.MaxUsage = v.number("memory", "memory.max_usage_in_bytes", parseUint)
	d.Reservation = v.number("memory", "memory.soft_limit_in_bytes", parseLimit)
	d.KernelMemory = v.number("memory", "memory.kmem.usage_in_bytes", parseUint)
	d.LimitHits = v.number("memory", "memory.failcnt", parseUint)
	parseEvents(v.content("memory", "memory.oom_control"), d)
	d.Devices = parseBlkio(v.content("blkio", "blkio.throttle.io_service_bytes_recursive"), nil, setBytes)
	d.Devices = parseBlkio(v.content("blkio", "blkio.throttle.io_serviced_recursive"), d.Devices, setOperations)
	v.readHugePages(d, "hugetlb.*.usage_in_bytes", ".usage_in_bytes", ".max_usage_in_bytes")
}

func (v *detailReader) readTasks(d *Detail) {
	d.Tasks = v.number("pids", "pids.current", parseUint)
	if b := v.content("pids", "pids.max"); b != nil {
		d.TasksMax, _ = parseLimit(b)
	}
	for _, c := range v.content("pids", "cgroup.procs") {
		if c == '\n' {
			d.Processes++
		}
	}
}

// nameDevices looks the devices' names up. One that is gone keeps its numbers.
func nameDevices(devices []Device) {
	for i := range devices {
		d := &devices[i]
		if target, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", d.Major, d.Minor)); err == nil {
			d.Name = filepath.Base(target)
		}
	}
}

// readHugePages reads one file a page size, whose names tell the sizes.
func (v *detailReader) readHugePages(d *Detail, pattern, usage, peak string) {
	dir := v.group.Dir("hugetlb")
	if dir == "" {
		return
	}
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil { // a pattern that is none
		v.err = err
		return
	}
	for _, path := range found {
		size := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), "hugetlb."), usage)
		if strings.Contains(size, ".rsvd") {
			continue
		}
		pages := HugePages{Size: size, Usage: v.number("hugetlb", "hugetlb."+size+usage, parseUint)}
		if peak != "" {
			pages.Max = v.number("hugetlb", "hugetlb."+size+peak, parseUint)
		}
		d.HugePages = append(d.HugePages, pages)
	}
}
