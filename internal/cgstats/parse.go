package cgstats

import (
	"bytes"
	"math"
	"unicode/utf8"
)

// Unlimited is the value of an unset limit. The kernel writes "max" (cgroup v2) or the largest
// number of whole pages (v1).
const Unlimited = math.MaxUint64

// unlimitedFrom is the smallest v1 value that means no limit. The kernel's value depends on the
// page size; cAdvisor and kubelet use the same threshold.
const unlimitedFrom = 1 << 62

// parseUint parses a decimal number with an optional newline.
func parseUint(b []byte) (v uint64, ok bool) {
	b = bytes.TrimSuffix(b, newline)
	if len(b) == 0 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' || v > (math.MaxUint64-uint64(c-'0'))/10 {
			return 0, false
		}
		v = v*10 + uint64(c-'0')
	}
	return v, true
}

// parseLimit parses a limit: a number, or one of the kernel's words for no limit.
func parseLimit(b []byte) (v uint64, ok bool) {
	b = bytes.TrimSuffix(b, newline)
	if string(b) == "max" || string(b) == "-1" {
		return Unlimited, true
	}
	if v, ok = parseUint(b); ok && v >= unlimitedFrom {
		return Unlimited, true
	}
	return v, ok
}

var newline = []byte("\n")

// nextLine splits off the first line of b.
func nextLine(b []byte) (line, rest []byte) {
	line, rest, _ = bytes.Cut(b, newline)
	return line, rest
}

// nextField splits off the first field of a line. Blanks separate fields.
func nextField(line []byte) (field, rest []byte) {
	for len(line) > 0 && (line[0] == ' ' || line[0] == '\t') {
		line = line[1:]
	}
	end := bytes.IndexAny(line, " \t")
	if end < 0 {
		return line, nil
	}
	return line[:end], line[end:]
}

// flatKeyed calls set for each "key value" line. It skips other lines, which newer kernels may add.
func flatKeyed(b []byte, set func(key []byte, v uint64)) {
	for len(b) > 0 {
		var line []byte
		line, b = nextLine(b)
		key, rest := nextField(line)
		value, _ := nextField(rest)
		if v, ok := parseUint(value); ok && len(key) > 0 {
			set(key, v)
		}
	}
}

// parseCPUStat parses cpu.stat: everything on cgroup v2, only throttling on v1.
func parseCPUStat(b []byte, cpu *CPU) {
	flatKeyed(b, func(key []byte, v uint64) {
		switch string(key) {
		case "usage_usec":
			cpu.Usage = v * 1000
		case "user_usec":
			cpu.User, cpu.TimesKnown = v*1000, true
		case "system_usec":
			cpu.System = v * 1000
		case "nr_periods":
			cpu.Periods, cpu.QuotaKnown = v, true
		case "nr_throttled":
			cpu.ThrottledPeriods = v
		case "throttled_usec":
			cpu.Throttled = v * 1000
		case "throttled_time": // v1, in nanoseconds
			cpu.Throttled = v
		}
	})
}

// parseMemoryStat parses memory.stat. On cgroup v1 the names differ, and figures that include
// descendants begin with total. On v2 all figures include descendants.
func parseMemoryStat(b []byte, m *Memory, total []byte) {
	flatKeyed(b, func(key []byte, v uint64) {
		name, counts := bytes.CutPrefix(key, total)
		if !counts {
			return
		}
		switch string(name) {
		case "anon", "rss":
			m.RSS = v
		case "file", "cache":
			m.Cache = v
		case "kernel": // Linux 5.18
			m.Kernel = v
		case "file_mapped", "mapped_file":
			m.MappedFile = v
		case "active_file":
			m.ActiveFile = v
		case "inactive_file":
			m.InactiveFile = v
		case "pgfault":
			m.PageFaults = v
		case "pgmajfault":
			m.MajorPageFaults = v
		case "swap": // v1: with swap accounting
			m.Swap, m.SwapKnown = v, true
		}
	})
}

func parseMemoryStatV2(b []byte, m *Memory) { parseMemoryStat(b, m, nil) }
func parseMemoryStatV1(b []byte, m *Memory) { parseMemoryStat(b, m, total) }

// parsePressure parses a pressure file (Linux 4.20, Documentation/accounting/psi.rst).
func parsePressure(b []byte) (p Pressure) {
	for len(b) > 0 {
		var line []byte
		line, b = nextLine(b)
		kind, rest := nextField(line)
		switch string(kind) {
		case "some":
			p.Some, p.Known = parseStall(rest), true
		case "full":
			p.Full, p.Known = parseStall(rest), true
		}
	}
	return p
}

func parseStall(line []byte) (s Stall) {
	for len(line) > 0 {
		var field []byte
		field, line = nextField(line)
		key, value, _ := bytes.Cut(field, equals)
		switch string(key) {
		case "avg10":
			s.Avg10 = parsePercent(value)
		case "avg60":
			s.Avg60 = parsePercent(value)
		case "avg300":
			s.Avg300 = parsePercent(value)
		case "total":
			usec, _ := parseUint(value)
			s.Total = usec * 1000
		}
	}
	return s
}

var equals, point, colon, total = []byte("="), []byte("."), []byte(":"), []byte("total_")

// parsePercent parses "12.34", the kernel's only form of averages.
func parsePercent(b []byte) float64 {
	whole, fraction, _ := bytes.Cut(b, point)
	w, _ := parseUint(whole)
	f, _ := parseUint(fraction)
	scale := 1.0
	for range fraction {
		scale *= 10
	}
	return float64(w) + float64(f)/scale
}

// parseEvents parses memory.events of cgroup v2, or memory.oom_control of v1.
func parseEvents(b []byte, d *Detail) {
	flatKeyed(b, func(key []byte, v uint64) {
		switch string(key) {
		case "max":
			d.LimitHits = Figure{v, true}
		case "oom_kill": // v1: Linux 4.13
			d.OOMKills = Figure{v, true}
		}
	})
}

// parseIOStat parses io.stat of cgroup v2.
func parseIOStat(b []byte, devices []Device) []Device {
	for len(b) > 0 {
		var line []byte
		line, b = nextLine(b)
		number, rest := nextField(line)
		d, ok := parseDevice(number)
		if !ok {
			continue
		}
		for len(rest) > 0 {
			var field []byte
			field, rest = nextField(rest)
			key, value, _ := bytes.Cut(field, equals)
			v, _ := parseUint(value)
			switch string(key) {
			case "rbytes":
				d.ReadBytes = v
			case "wbytes":
				d.WriteBytes = v
			case "rios":
				d.Reads = v
			case "wios":
				d.Writes = v
			}
		}
		devices = append(devices, d)
	}
	return devices
}

// parseBlkio parses a blkio file of cgroup v1, with lines such as "8:0 Read 4096". set adds each
// value to its device.
func parseBlkio(b []byte, devices []Device, set func(d *Device, operation []byte, v uint64)) []Device {
	for len(b) > 0 {
		var line []byte
		line, b = nextLine(b)
		number, rest := nextField(line)
		operation, rest := nextField(rest)
		value, _ := nextField(rest)
		device, ok := parseDevice(number)
		v, isNumber := parseUint(value)
		if !ok || !isNumber {
			continue // the last line: "Total 4096"
		}
		i := 0
		for i < len(devices) && (devices[i].Major != device.Major || devices[i].Minor != device.Minor) {
			i++
		}
		if i == len(devices) {
			devices = append(devices, device)
		}
		set(&devices[i], operation, v)
	}
	return devices
}

func setBytes(d *Device, operation []byte, v uint64) {
	switch string(operation) {
	case "Read":
		d.ReadBytes = v
	case "Write":
		d.WriteBytes = v
	}
}

func setOperations(d *Device, operation []byte, v uint64) {
	switch string(operation) {
	case "Read":
		d.Reads = v
	case "Write":
		d.Writes = v
	}
}

// parseDevice parses "8:0".
func parseDevice(b []byte) (d Device, ok bool) {
	major, minor, _ := bytes.Cut(b, colon)
	x, ok1 := parseUint(major)
	y, ok2 := parseUint(minor)
	if !ok1 || !ok2 || x > math.MaxUint32 || y > math.MaxUint32 {
		return d, false
	}
	return Device{Major: uint32(x), Minor: uint32(y)}, true
}

// parseInterfaces parses /proc/PID/net/dev (proc_pid_net(5)). Like other runtimes it skips
// loopback, whose traffic never leaves the pod. The kernel allows nearly any byte in a name
// (dev_valid_name in net/core/dev.c), but protocol buffers only allow UTF-8. An interface with
// another name is skipped, because it would invalidate the whole message with the usage of all
// pods.
func parseInterfaces(b []byte, interfaces []Interface) []Interface {
	for len(b) > 0 {
		var line []byte
		line, b = nextLine(b)
		name, rest, isInterface := cutLast(line)
		if !isInterface || string(name) == "lo" || !utf8.Valid(name) {
			continue
		}
		var columns [16]uint64 // eight for receiving, eight for sending
		count := 0
		for count < len(columns) {
			var field []byte
			if field, rest = nextField(rest); len(field) == 0 {
				break
			}
			v, ok := parseUint(field)
			if !ok {
				break
			}
			columns[count] = v
			count++
		}
		if count < len(columns) {
			continue // a header line
		}
		interfaces = append(interfaces, Interface{Name: string(name),
			Rx: Traffic{Bytes: columns[0], Packets: columns[1], Errors: columns[2], Dropped: columns[3]},
			Tx: Traffic{Bytes: columns[8], Packets: columns[9], Errors: columns[10], Dropped: columns[11]}})
	}
	return interfaces
}

// cutLast splits "  eth0: 1 2" at its last colon. An alias contains a colon.
func cutLast(line []byte) (name, rest []byte, ok bool) {
	i := bytes.LastIndexByte(line, ':')
	if i < 0 {
		return nil, nil, false
	}
	name = bytes.TrimLeft(line[:i], " \t")
	return name, line[i+1:], len(name) > 0
}
