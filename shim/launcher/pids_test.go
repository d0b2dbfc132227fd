package launcher

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
)

// treeImage returns a directory with CRIU's image of one process.
func treeImage(t *testing.T, pid uint32) string {
	t.Helper()
	one := uint32(1)
	entry, err := proto.Marshal(&pstree.PstreeEntry{Pid: &pid, Ppid: new(uint32), Pgid: &one, Sid: &one, Threads: []uint32{pid}})
	testutil.Must(t, err)
	var data []byte
	for _, word := range []uint32{0x54564319, 0x50273030, uint32(len(entry))} {
		data = binary.LittleEndian.AppendUint32(data, word)
	}
	dir := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(dir, "pstree.img"), append(data, entry...), 0o600))
	return dir
}

// Another container's images can be removed while this one is restored. Its own must be there.
func TestHighestPIDWithoutOthers(t *testing.T) {
	own, gone := treeImage(t, 300), filepath.Join(t.TempDir(), "gone")
	got, err := highestPID(own, []string{gone, treeImage(t, 7), treeImage(t, 301)})
	testutil.Must(t, err)
	if got != 301 {
		t.Errorf("%d, want 301", got)
	}
	if _, err := highestPID(gone, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its own are missing: %v", err)
	}
	broken := t.TempDir()
	testutil.Must(t, os.WriteFile(filepath.Join(broken, "pstree.img"), []byte("none"), 0o600))
	if _, err := highestPID(own, []string{broken}); err == nil {
		t.Error("broken images are no error")
	}
}
