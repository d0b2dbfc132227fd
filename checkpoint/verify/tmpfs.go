package verify

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Limits of the content of tmpfs mounts.
const (
	maxTmpfs      = 4 << 30 // bytes of all
	maxTmpfsFiles = 1 << 18
	maxLinks      = 1 << 14 // symbolic links of one tmpfs, with up to 4 KiB each
)

// deviceNumber identifies a device.
type deviceNumber struct {
	block        bool
	major, minor int64
}

// defaultDevices are the devices that every container has (runtime-spec, "Default Devices").
var defaultDevices = []deviceNumber{
	{false, 1, 3}, {false, 1, 5}, {false, 1, 7}, {false, 1, 8}, {false, 1, 9}, {false, 5, 0},
}

// checkTmpfs checks the content of tmpfs mounts. CRIU extracts it with tar.
func (c *check) checkTmpfs() error {
	t := tmpfsCheck{check: c, room: maxTmpfs, files: maxTmpfsFiles}
	for _, name := range c.images.names {
		if !strings.HasPrefix(name, "tmpfs-") || !strings.HasSuffix(name, ".tar.gz.img") {
			continue
		}
		if err := t.checkArchive(name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

type tmpfsCheck struct {
	*check
	room  int64
	files int
}

func (t *tmpfsCheck) checkArchive(name string) error {
	file, err := t.images.open(name)
	if err != nil {
		return err
	}
	defer file.Close() // it was only read
	unzipped, err := gzip.NewReader(bufio.NewReader(file))
	if err != nil {
		return err
	}
	limited := &io.LimitedReader{R: unzipped, N: t.room}
	links := map[string]bool{}
	r := tar.NewReader(limited)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			if limited.N == 0 {
				break
			}
			return err
		}
		t.files--
		t.checkEntry("image "+name, h, links)
		if t.files < 0 {
			break
		}
	}
	t.room = limited.N
	if t.room == 0 || t.files < 0 {
		t.differ("tmpfs", "more data or files than the limit", fmt.Sprintf("%d bytes, %d files", maxTmpfs, maxTmpfsFiles))
	}
	return nil
}

// checkEntry checks one file of a tmpfs. links are the symbolic links so far: nothing may be below
// one.
func (t *tmpfsCheck) checkEntry(field string, h *tar.Header, links map[string]bool) {
	name := strings.TrimSuffix(strings.TrimPrefix(h.Name, "./"), "/")
	if name == "" || name == "." {
		return
	}
	field += ": " + name
	if path.Clean(name) != name || path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") {
		t.differ(field, "a path outside", "a path of the filesystem")
	}
	if len(name) > unix.PathMax {
		t.differ(field, "a long path", fmt.Sprintf("%d bytes", unix.PathMax))
		return
	}
	if below(name, links) {
		t.differ(field, "a file below a symbolic link", "a file below directories")
	}
	for record := range h.PAXRecords {
		attr, ok := strings.CutPrefix(record, "SCHILY.xattr.")
		if ok && !strings.HasPrefix(attr, "user.") && !strings.HasPrefix(attr, "system.posix_acl_") {
			t.differ(field, "the extended attribute "+attr, "attributes of users")
		}
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeDir, tar.TypeFifo, tar.TypeGNUSparse:
	case tar.TypeSymlink:
		if links[name] = true; len(links) > maxLinks {
			t.files = -1 // memory is limited
		}
	case tar.TypeLink:
		target := strings.TrimPrefix(h.Linkname, "./")
		if path.Clean("/"+target) != "/"+target || links[target] || below(target, links) {
			t.differ(field, "a link to "+h.Linkname, "a link to a file of the filesystem")
		}
	case tar.TypeChar, tar.TypeBlock:
		t.checkDevice(field, deviceNumber{h.Typeflag == tar.TypeBlock, h.Devmajor, h.Devminor})
	default:
		t.differ(field, fmt.Sprintf("type %q", h.Typeflag), "a file")
	}
	if h.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 && h.Typeflag != tar.TypeDir {
		t.differ(field, "a set-id file", "a file without set-id bits")
	}
}

// below reports whether a path leads through one of the links.
func below(name string, links map[string]bool) bool {
	for dir := path.Dir(name); dir != "." && dir != "/"; dir = path.Dir(dir) {
		if links[dir] {
			return true
		}
	}
	return false
}

// checkDevice checks that the spec has the device. (Devices of a whiteout are of no use.)
func (t *tmpfsCheck) checkDevice(field string, d deviceNumber) {
	if slices.Contains(defaultDevices, d) {
		return
	}
	inSpec := slices.ContainsFunc(t.e.Spec.Linux.Devices, func(s specs.LinuxDevice) bool {
		return d == deviceNumber{s.Type == "b", s.Major, s.Minor}
	})
	if !inSpec {
		t.differ(field, fmt.Sprintf("the device %d:%d", d.major, d.minor), "a device of the spec")
	}
}
