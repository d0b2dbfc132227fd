package criu_test

import (
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"berth/internal/testutil"
	"berth/shim/launcher/criu"
)

// WithoutLinks adds the option to all mounts but the root filesystem and proc filesystems. Mounts
// that the launcher supplies get different options.
func TestWithoutLinks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	mount := func(id uint32, kind mnt.Fstype, at string, flags uint32) *mnt.MntEntry {
		number := uint32(kind)
		return &mnt.MntEntry{MntId: &id, Fstype: &number, Mountpoint: &at, Flags: &flags}
	}
	supplied := func(id uint32, at string) *mnt.MntEntry {
		m := mount(id, mnt.Fstype_UNSUPPORTED, at, 0)
		m.ExtKey = proto.String("key")
		return m
	}
	image(t, dir, "mountpoints-3.img", mounts, mount(1, mnt.Fstype_OVERLAYFS, "/", 0), mount(2, mnt.Fstype_PROC, "/proc", unix.MS_NOSUID),
		mount(3, mnt.Fstype_UNSUPPORTED, "/vol", unix.MS_RDONLY), mount(4, mnt.Fstype_PROC, "/vol/proc", 0),
		supplied(5, "/a"), supplied(6, "/b"))
	changed, err := criu.WithoutLinks(open(t, dir))
	testutil.Must(t, err)
	data := changed["mountpoints-3.img"]
	var have []uint32
	for data = data[8:]; len(data) > 0; {
		size, _ := protowire.ConsumeFixed32(data)
		var m mnt.MntEntry
		testutil.Must(t, proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(data[4:4+size], &m))
		have = append(have, m.GetFlags())
		data = data[4+size:]
	}
	if want := []uint32{0, unix.MS_NOSUID, unix.MS_RDONLY | unix.MS_NOSYMFOLLOW, 0,
		unix.MS_NOSYMFOLLOW, unix.MS_NOSYMFOLLOW | unix.MS_SYNCHRONOUS}; !slices.Equal(have, want) {
		t.Errorf("flags %#x, want %#x", have, want)
	}
}
