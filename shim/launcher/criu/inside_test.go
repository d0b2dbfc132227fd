package criu_test

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	criu_core "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	remap_file_path "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	sk_unix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
	"berth/shim/launcher/criu"
)

// Magics of images (criu/include/magic.h).
const (
	inventoryImage, files, ids, remaps = 0x58313116, 0x56303138, 0x54432030, 0x59133954
)

// kernelIDs are the IDs of what a process shares with others. Those of namespaces are the last six.
func kernelIDs(memory, pid, others uint32) *criu_core.TaskKobjIdsEntry {
	return &criu_core.TaskKobjIdsEntry{VmId: &memory, FilesId: &memory, FsId: &memory, SighandId: &memory, PidNsId: &pid,
		NetNsId: &others, IpcNsId: &others, UtsNsId: &others, MntNsId: &others, UserNsId: &others, CgroupNsId: &others}
}

// savedOutside writes the images of a process with namespaces of its own.
func savedOutside(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	image(t, dir, "ids-1.img", ids, kernelIDs(2, 9, 10))
	image(t, dir, "files.img", files,
		&fdinfo.FileEntry{Id: proto.Uint32(1), Reg: &regfile.RegFileEntry{Name: proto.String("/f"), MntId: proto.Int32(17)}},
		&fdinfo.FileEntry{Id: proto.Uint32(2), Usk: &sk_unix.UnixSkEntry{Ino: proto.Uint32(5), MntId: proto.Int32(17)}},
		&fdinfo.FileEntry{Id: proto.Uint32(3)})
	entry, err := proto.MarshalOptions{AllowPartial: true}.Marshal(&inventory.InventoryEntry{
		ImgVersion: proto.Uint32(2), RootIds: kernelIDs(1, 1, 3), TcpClose: proto.Bool(true)})
	testutil.Must(t, err)
	data := binary.LittleEndian.AppendUint32(nil, inventoryImage)
	data = binary.LittleEndian.AppendUint32(data, uint32(len(entry)))
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "inventory.img"), append(data, entry...), 0o600))
	return dir
}

// CRIU finds its own namespaces in the images, except the PID namespace, and files without mounts.
// The other fields are those that were criu.
func TestInside(t *testing.T) {
	t.Parallel()
	changed, err := criu.Inside(open(t, savedOutside(t)))
	testutil.Must(t, err)
	var inv inventory.InventoryEntry
	testutil.Must(t, proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(changed["inventory.img"][8:], &inv))
	if want := kernelIDs(1, 1, 10); !proto.Equal(inv.RootIds, want) || inv.GetImgVersion() != 2 || !inv.GetTcpClose() {
		t.Errorf("inventory %v, want IDs %v", &inv, want)
	}
	data, i := changed["files.img"][8:], uint32(0)
	for ; len(data) > 0; i++ {
		size := binary.LittleEndian.Uint32(data)
		var f fdinfo.FileEntry
		testutil.Must(t, proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(data[4:4+size], &f))
		data = data[4+size:]
		if f.GetId() != i+1 || f.Reg.GetMntId() != -1 || f.Usk.GetMntId() != -1 || f.Reg != nil && f.Reg.GetName() != "/f" {
			t.Errorf("file %v", &f)
		}
	}
	if i != 3 {
		t.Errorf("%d files", i)
	}
}

// What CRIU cannot restore inside is refused by its name.
func TestInsideRefuses(t *testing.T) {
	t.Parallel()
	remap := func(kind remap_file_path.RemapType) func(*testing.T, string) {
		return func(t *testing.T, dir string) {
			t.Helper()
			image(t, dir, "remap-fpath.img", remaps, &remap_file_path.RemapFilePathEntry{
				OrigId: proto.Uint32(1), RemapId: proto.Uint32(1), RemapType: kind.Enum()})
		}
	}
	for name, test := range map[string]struct {
		change func(*testing.T, string)
		want   string
	}{
		"deleted file":      {remap(remap_file_path.RemapType_GHOST), "a deleted file is open"},
		"file of a process": {remap(remap_file_path.RemapType_PROCFS), ""},
		"shared PID namespace": {func(t *testing.T, dir string) {
			t.Helper()
			testutil.Must(t, os.Remove(filepath.Join(dir, "ids-1.img")))
		}, "it has no PID namespace of its own"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := savedOutside(t)
			test.change(t, dir)
			_, err := criu.Inside(open(t, dir))
			if test.want == "" {
				testutil.Must(t, err)
				return
			}
			if refused := (*criu.Refused)(nil); !errors.As(err, &refused) || refused.Reason != test.want {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}
