package cgstats

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// ReadDetail fills d, which only metrics need. It opens and closes its files with each call.
func (r *Reader) ReadDetail(d *Detail) error {
	f, err := r.files.get(r.open)
	if err != nil {
		return fmt.Errorf("open cgroup statistics: %w", gone(err))
	}
	*d = Detail{}
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	v := detailReader{opener: opener{group: f.group}, buf: buf}
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

// detailReader reads files until one fails. It skips files that do not exist.
type detailReader struct {
	opener
	buf *buffer
}

// maxDetail limits the size of a file, in bytes. The largest file, cgroup.procs, has the IDs of a
// group's processes. A node has at most 4 Mi processes (PID_MAX_LIMIT).
const maxDetail = 64 << 20

// content returns a file's content, or nil if the file does not exist.
func (v *detailReader) content(controller, name string) []byte {
	f := v.open(controller, name)
	if f == nil {
		return nil
	}
	b, err := readAll(f, v.buf, maxDetail)
	if err = errors.Join(err, f.Close()); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		v.err = err
		return nil
	}
	return b
}

func (v *detailReader) number(controller, name string, parse func([]byte) (uint64, bool)) (f Figure) {
	b := v.content(controller, name)
	if b == nil {
		return Figure{}
	}
	if f.Value, f.Known = parse(b); !f.Known {
		v.err = fmt.Errorf("%s of controller %q: %.40q is not a number", name, controller, b)
	}
	return f
}

func (v *detailReader) readV2(d *Detail) {
	stat := v.content("cpu", "cpu.stat")
	d.CPU.Known = stat != nil
	parseCPUStat(stat, &d.CPU)
	d.MaxUsage = v.number("memory", "memory.peak", parseUint) // Linux 5.19
	d.Reservation = v.number("memory", "memory.low", parseLimit)
	parseEvents(v.content("memory", "memory.events"), d)
	d.Devices = parseIOStat(v.content("io", "io.stat"), nil)
	v.readHugePages(d, "hugetlb.*.current", ".current", "")
}

func (v *detailReader) readV1(d *Detail) {
	usage := v.number("cpuacct", "cpuacct.usage", parseUint)
	user := v.number("cpuacct", "cpuacct.usage_user", parseUint) // Linux 4.11
	system := v.number("cpuacct", "cpuacct.usage_sys", parseUint)
	d.CPU = CPU{
		Known:      usage.Known,
		Usage:      usage.Value,
		TimesKnown: user.Known && system.Known,
		User:       user.Value,
		System:     system.Value,
	}
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
	d.TasksMax = v.number("pids", "pids.max", parseLimit)
	procs := v.content("pids", "cgroup.procs")
	d.Processes = Figure{uint64(bytes.Count(procs, newline)), procs != nil}
}

// nameDevices sets the devices' names. If a device was removed, its numbers are used as its name.
func nameDevices(devices []Device) {
	for i := range devices {
		d := &devices[i]
		if target, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", d.Major, d.Minor)); err == nil {
			d.Name = filepath.Base(target)
		}
	}
}

// readHugePages reads one file per page size. The file names contain the sizes.
func (v *detailReader) readHugePages(d *Detail, pattern, usage, peak string) {
	dir := v.group.Dir("hugetlb")
	if dir == "" {
		return
	}
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil { // an invalid pattern
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
