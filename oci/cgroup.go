package oci

import (
	"path"
	"regexp"
	"strings"

	"berth/internal/errdefs"
)

// Default cgroup parents of pods and containers.
const (
	DefaultCgroupParent = "/berth"       // cgroupfs driver
	DefaultSlice        = "system.slice" // systemd driver
)

// scopePrefix is the prefix of berth's scopes: berth-<ID>.scope.
const scopePrefix = "berth"

var (
	cgroupID  = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)
	sliceName = regexp.MustCompile(`^[a-zA-Z0-9_.\\@-]+\.slice$`)
)

// CgroupsPath returns the cgroup of a container or pod in the form of the spec's linux.cgroupsPath.
//
// With the cgroupfs driver the form is "<parent>/<id>", and parent is an absolute path below the
// mounts of the cgroup hierarchies. With the systemd driver the form is "<slice>:berth:<id>", and
// parent is the name of a slice, or its path in kubelet's form:
// "/kubepods.slice/kubepods-besteffort.slice". An empty parent is [DefaultCgroupParent] or
// [DefaultSlice]. CgroupsPath refuses a parent in the other driver's form, because kubelet and
// berth then use different drivers.
func CgroupsPath(parent, id string, systemdDriver bool) (string, error) {
	if !cgroupID.MatchString(id) || len(id) > 128 || strings.HasSuffix(id, ".slice") {
		return "", errdefs.InvalidArgument("cgroup: %q is not an ID", id)
	}
	if systemdDriver {
		return systemdPath(parent, id)
	}
	return cgroupfsPath(parent, id)
}

// IsSystemdPath reports whether CgroupsPath made a path for the systemd driver.
func IsSystemdPath(cgroupsPath string) bool { return !path.IsAbs(cgroupsPath) }

func cgroupfsPath(parent, id string) (string, error) {
	if parent == "" {
		parent = DefaultCgroupParent
	}
	if strings.HasSuffix(parent, ".slice") {
		return "", errdefs.InvalidArgument("cgroup parent %q is a systemd slice, but berth uses the cgroupfs driver", parent)
	}
	if !path.IsAbs(parent) || strings.ContainsFunc(parent, isControl) {
		return "", errdefs.InvalidArgument("cgroup parent %q is not an absolute path", parent)
	}
	for part := range strings.SplitSeq(parent, "/") {
		if part == ".." {
			return "", errdefs.InvalidArgument("cgroup parent %q contains ..", parent)
		}
	}
	return path.Join(parent, id), nil
}

func systemdPath(parent, id string) (string, error) {
	if parent == "" {
		parent = DefaultSlice
	}
	slice := path.Base(parent)
	if !strings.HasSuffix(slice, ".slice") {
		return "", errdefs.InvalidArgument("cgroup parent %q is not a slice, but berth uses the systemd driver", parent)
	}
	// A longer unit name exceeds the limit of file names (UNIT_NAME_MAX).
	if !sliceName.MatchString(slice) || len(slice) > 255 {
		return "", errdefs.InvalidArgument("cgroup parent %q: %q is not the name of a slice", parent, slice)
	}
	expanded, ok := expandSlice(slice)
	if !ok {
		return "", errdefs.InvalidArgument("cgroup parent %q: %q is not the name of a slice", parent, slice)
	}
	if strings.Contains(parent, "/") && parent != expanded {
		return "", errdefs.InvalidArgument("cgroup parent %q: systemd has the slice %s at %s", parent, slice, expanded)
	}
	return slice + ":" + scopePrefix + ":" + id, nil
}

// CgroupPath returns the directory of a result of [CgroupsPath], below the mounts of the
// hierarchies.
func CgroupPath(cgroupsPath string) string {
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return cgroupsPath
	}
	expanded, _ := expandSlice(parts[0]) // checked by CgroupsPath
	return path.Join(expanded, parts[1]+"-"+parts[2]+".scope")
}

// expandSlice returns the cgroup path of a slice. Dashes in its name separate its ancestors
// (systemd.slice(5)), so a-b.slice is at /a.slice/a-b.slice.
func expandSlice(slice string) (string, bool) {
	name := strings.TrimSuffix(slice, ".slice")
	if name == "-" {
		return "/-.slice", true // the root slice
	}
	var expanded, prefix strings.Builder
	for part := range strings.SplitSeq(name, "-") {
		if part == "" {
			return "", false
		}
		prefix.WriteString(part)
		expanded.WriteString("/" + prefix.String() + ".slice")
		prefix.WriteByte('-')
	}
	return expanded.String(), true
}

func isControl(r rune) bool { return r < ' ' || r == 0x7f }
