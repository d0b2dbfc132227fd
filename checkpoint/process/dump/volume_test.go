package dump

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/userns"
)

// A volume has an entry for its own directory, and the owners of its user namespace on the host.
func TestVolume(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	do(t, os.WriteFile(file, nil, 0o640))
	do(t, os.Chown(file, 5, 70000))
	do(t, unix.Chmod(dir, 0o1770))
	do(t, os.Chown(dir, 7, 8))
	do(t, unix.Setxattr(file, "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	do(t, unix.Setxattr(file, "user.x", []byte("y"), 0))
	do(t, unix.Mknod(filepath.Join(dir, "whiteout"), unix.S_IFCHR, 0))
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 1 << 20, Size: 1 << 16}}
	for _, tt := range []struct {
		name                       string
		mappings                   *userns.Mappings
		uid, gid, rootUID, rootGID int
		capability                 string
	}{
		{"the node's", nil, 5, 70000, 7, 8, "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
		{"user namespace", &userns.Mappings{UIDs: ids, GIDs: ids}, 1<<20 + 5, 65534, 1<<20 + 7, 1<<20 + 8,
			"\x01\x00\x00\x03\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10\x00"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var out bytes.Buffer
			do(t, Volume(context.Background(), open(t, dir), tt.mappings, &out))
			headers, _ := read(t, out.Bytes())
			root, h := headers["./"], headers["file"]
			if root == nil || h == nil || len(headers) != 2 {
				t.Fatalf("entries %v", headers)
			}
			if root.Uid != tt.rootUID || root.Gid != tt.rootGID || root.Mode != 0o1770 || h.Uid != tt.uid || h.Gid != tt.gid {
				t.Errorf("root %d:%d %o, file %d:%d", root.Uid, root.Gid, root.Mode, h.Uid, h.Gid)
			}
			if got := h.PAXRecords[xattrRecord+"security.capability"]; got != tt.capability || h.PAXRecords[xattrRecord+"user.x"] != "y" {
				t.Errorf("attributes %q", h.PAXRecords)
			}
		})
	}
}

func TestMapACL(t *testing.T) {
	t.Parallel()
	uids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 0x10000, Size: 100}}
	gids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 0x20000, Size: 100}}
	m := &userns.Mappings{UIDs: uids, GIDs: gids}
	// The owner (tag 1) has no ID, then user 5, group 6, and half an entry.
	value := "\x02\x00\x00\x00" + "\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\x05\x00\x00\x00" +
		"\x08\x00\x04\x00\x06\x00\x00\x00" + "\x02\x00\x04\x00"
	want := "\x02\x00\x00\x00" + "\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x06\x00\x05\x00\x01\x00" +
		"\x08\x00\x04\x00\x06\x00\x02\x00" + "\x02\x00\x04\x00"
	if got := mapAttribute("system.posix_acl_access", []byte(value), m); string(got) != want {
		t.Errorf("got %q", got)
	}
	if got := mapAttribute("user.acl", []byte(value), m); string(got) != value {
		t.Errorf("user attribute: got %q", got)
	}
}
