package userns

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

func TestMain(m *testing.M) { os.Exit(testutil.MainInMountNamespace(m)) }

func TestMappings(t *testing.T) {
	t.Parallel()
	m := Mappings{
		UIDs: []specs.LinuxIDMapping{{ContainerID: 0, HostID: 65536, Size: 10}, {ContainerID: 100, HostID: 200000, Size: 1}},
		GIDs: []specs.LinuxIDMapping{{ContainerID: 0, HostID: 131072, Size: 4294901760}},
	}
	for uid, want := range map[uint32]int{0: 65536, 9: 65545, 10: overflowID, 99: overflowID, 100: 200000, 101: overflowID} {
		if got := m.HostUID(uid); got != want || m.HasUID(uid) != (want != overflowID) {
			t.Errorf("user %d is %d, want %d", uid, got, want)
		}
	}
	if got := m.HostGID(5); got != 131077 || !m.HasGID(5) || m.HasGID(4294967295) {
		t.Errorf("group 5 is %d", got)
	}
}

// holdProgram returns a program that needs no arguments, in a directory that only root can search.
func holdProgram(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	testutil.Must(t, os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700))
	return path
}

func sample(host uint32) Mappings {
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: host, Size: 65536}}
	return Mappings{UIDs: ids, GIDs: ids}
}

func TestWith(t *testing.T) {
	pin := filepath.Join(t.TempDir(), "user")
	var pid Namespaces
	err := With(holdProgram(t), sample(65536), true, func(ns Namespaces) error {
		pid = ns
		uidMap, err := os.ReadFile(strings.TrimSuffix(ns.User(), "ns/user") + "uid_map")
		if err != nil || strings.Join(strings.Fields(string(uidMap)), " ") != "0 65536 65536" {
			t.Errorf("uid_map %q, %v", uidMap, err)
		}
		if !ownedBy(t, ns.Net(), ns.User()) {
			t.Error("the network namespace does not belong to the user namespace")
		}
		return errors.Join(Pin(ns.User(), pin), Pin(ns.User(), pin)) // as after an earlier attempt
	})
	testutil.Must(t, err)
	if _, err := os.Stat(pid.User()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the process still exists: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(pin, &st); err != nil || st.Type != unix.NSFS_MAGIC {
		t.Errorf("no namespace is pinned: %v, filesystem %x", err, st.Type)
	}
	for range 2 {
		if err := Unpin(pin); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Lstat(pin); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pin still exists: %v", err)
	}
}

func TestWithFails(t *testing.T) {
	mine := errors.New("mine")
	if err := With(holdProgram(t), sample(65536), false, func(Namespaces) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
	never := func(Namespaces) error { t.Error("called"); return nil }
	if err := With("/does/not/exist", sample(65536), false, never); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no program: %v", err)
	}
	if err := With(holdProgram(t), sample(4294967290), false, never); err == nil {
		t.Error("a mapping that the kernel refuses is no error")
	}
}

// ownedBy asks the kernel whether user owns a namespace.
func ownedBy(t *testing.T, path, user string) bool {
	t.Helper()
	f, err := os.Open(path)
	testutil.Must(t, err)
	defer f.Close()
	fd, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_USERNS)
	testutil.Must(t, err)
	defer unix.Close(fd)
	var owner, want unix.Stat_t
	testutil.Must(t, errors.Join(unix.Fstat(fd, &owner), unix.Stat(user, &want)))
	return owner.Ino == want.Ino
}
