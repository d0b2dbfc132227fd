package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Pressure is the line "some" of a pressure file (Documentation/accounting/psi.rst): the time in
// which at least one process waited for a resource.
type Pressure struct {
	Waited time.Duration // in total, since the cgroup exists
	Recent float64       // share of the last ten seconds, 0 to 1
}

// ReadPressure reads the pressure file of a cgroup in the v2 hierarchy at root. resource is "cpu",
// "io" or "memory". ok is false if the cgroup does not exist, or if the kernel does not measure
// pressure.
func ReadPressure(root, path, resource string) (p Pressure, ok bool, err error) {
	file := filepath.Join(root, path, resource+".pressure")
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errors.ErrUnsupported) {
		return Pressure{}, false, nil
	}
	if err != nil {
		return Pressure{}, false, fmt.Errorf("read pressure: %w", err)
	}
	if p, err = parsePressure(string(text)); err != nil {
		return Pressure{}, false, fmt.Errorf("read pressure: %s: %w", file, err)
	}
	return p, true, nil
}

// parsePressure parses "some avg10=0.12 avg60=0.00 avg300=0.00 total=4321", and further lines,
// which it ignores. The total is in microseconds.
func parsePressure(text string) (p Pressure, err error) {
	line, _, _ := strings.Cut(text, "\n")
	fields := strings.Fields(line)
	if len(fields) == 0 || fields[0] != "some" {
		return p, fmt.Errorf("unknown format %q", line)
	}
	for _, field := range fields[1:] {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "avg10":
			percent, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return p, fmt.Errorf("%s: %w", key, err)
			}
			p.Recent = percent / 100
		case "total":
			total, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return p, fmt.Errorf("%s: %w", key, err)
			}
			p.Waited = time.Duration(total) * time.Microsecond
		}
	}
	return p, nil
}

// Top returns the topmost cgroup of a pod's cgroup_parent (CRI LinuxPodSandboxConfig), such as
// kubepods.slice or kubepods. The parent is a path, or with systemd the name of a slice, whose
// parents are parts of its name (systemd.slice(5)).
func Top(parent string) string {
	parent = strings.Trim(parent, "/")
	if top, _, isPath := strings.Cut(parent, "/"); isPath {
		parent = top
	}
	if name, isSlice := strings.CutSuffix(parent, ".slice"); isSlice {
		top, _, _ := strings.Cut(name, "-")
		return top + ".slice"
	}
	return parent
}
