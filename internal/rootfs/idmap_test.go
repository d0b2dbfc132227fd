package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
	"berth/internal/userns"
)

const mappedRoot = 3 << 16

// inUserNamespace calls use with an IDMap that is valid until use returns.
func inUserNamespace(t *testing.T, use func(*IDMap)) {
	t.Helper()
	ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: mappedRoot, Size: 1 << 16}}
	m := userns.Mappings{UIDs: ids, GIDs: ids}
	program := filepath.Join(t.TempDir(), "program")
	testutil.Must(t, os.WriteFile(program, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700))
	err := userns.With(program, m, false, func(ns userns.Namespaces) error {
		use(&IDMap{UserNS: ns.User(), Mappings: m})
		return nil
	})
	testutil.Must(t, err)
}

func ownerOf(t *testing.T, path string) (uid, gid uint32) {
	t.Helper()
	info, err := os.Lstat(path)
	testutil.Must(t, err)
	st := info.Sys().(*syscall.Stat_t)
	return st.Uid, st.Gid
}

func wantOwner(t *testing.T, path string, uid, gid uint32) {
	t.Helper()
	if u, g := ownerOf(t, path); u != uid || g != gid {
		t.Errorf("%s belongs to %d:%d, want %d:%d", path, u, g, uid, gid)
	}
}

// privatePlace returns a directory that is a private mount.
func privatePlace(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	testutil.Must(t, errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_PRIVATE, "")))
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil { // EBUSY if a mount remains on it
			t.Error(err)
		}
	})
	return dir
}

// mappedFuncs are the ways to mount an overlay with mapped layers.
var mappedFuncs = []mountFunc{
	{"MountAt", Spec.MountAt},
	{"before Linux 6.7", mountAtOld},
}

func TestIDMappedOverlay(t *testing.T) {
	for _, f := range mappedFuncs {
		for _, name := range awkward {
			t.Run(f.name+"/"+name[:min(len(name), 8)], func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), name)
				s := Spec{Layers: []Layer{
					write(t, dir+"/1", map[string]string{"a": "1", "b": "1"}),
					write(t, dir+"/2", map[string]string{"b": "2", "dir/user": "2"}),
				}, Upper: dir + "/upper", Work: dir + "/work"}
				testutil.Must(t, errors.Join(os.Chown(dir+"/2", 5, 6), os.Chown(dir+"/2/dir/user", 7, 8)))
				place := privatePlace(t)
				inUserNamespace(t, func(m *IDMap) {
					s.IDMap = m
					testutil.Must(t, errors.Join(s.MakeUpper(), f.mount(s, place)))
				}) // the mount keeps the mapping
				expect(t, place+"/a", "1")
				expect(t, place+"/b", "2")
				wantOwner(t, place, mappedRoot+5, mappedRoot+6)
				wantOwner(t, place+"/a", mappedRoot, mappedRoot)
				wantOwner(t, place+"/dir/user", mappedRoot+7, mappedRoot+8)
				if err := os.Chmod(place+"/dir/user", 0o600); err != nil { // copies it up
					t.Fatal(err)
				}
				wantOwner(t, place+"/dir/user", mappedRoot+7, mappedRoot+8)
				wantOwner(t, s.Upper+"/dir/user", mappedRoot+7, mappedRoot+8)
				wantOwner(t, dir+"/2/dir/user", 7, 8)
				if err := unix.Unmount(place, 0); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestManyIDMappedLayers(t *testing.T) {
	dir := t.TempDir()
	s := Spec{Upper: dir + "/upper", Work: dir + "/work"}
	for i := range MaxLayers {
		s.Layers = append(s.Layers, write(t, fmt.Sprintf("%s/%d", dir, i), map[string]string{fmt.Sprint(i): "x"}))
	}
	place := privatePlace(t)
	inUserNamespace(t, func(m *IDMap) {
		s.IDMap = m
		testutil.Must(t, s.MakeUpper())
		for _, f := range mappedFuncs {
			testutil.Must(t, f.mount(s, place))
			wantOwner(t, place+"/0", mappedRoot, mappedRoot)
			wantOwner(t, place+"/499", mappedRoot, mappedRoot)
			testutil.Must(t, unix.Unmount(place, 0))
		}
	})
}

func TestIDMappedDirectory(t *testing.T) {
	s := Spec{Layers: []Layer{write(t, t.TempDir()+"/only", map[string]string{"f": "x"})}}
	place := privatePlace(t)
	inUserNamespace(t, func(m *IDMap) {
		s.IDMap = m
		testutil.Must(t, s.MountAt(place))
	})
	wantOwner(t, place+"/f", mappedRoot, mappedRoot)
	if err := os.WriteFile(place+"/g", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a root without writable layer is writable: %v", err)
	}
	if err := unix.Unmount(place, 0); err != nil {
		t.Error(err)
	}
}

// A mount that fails half-way leaves no mount on the directory.
func TestFailedIDMappedMountIsUndone(t *testing.T) {
	dir := t.TempDir()
	good := write(t, dir+"/1", map[string]string{"a": "1"})
	place := privatePlace(t)
	inUserNamespace(t, func(m *IDMap) {
		for name, s := range map[string]Spec{
			"layer is missing":               {Layers: []Layer{good, {Kind: Directory, Path: dir + "/no"}}, IDMap: m},
			"layer is not mappable":          {Layers: []Layer{{Kind: Directory, Path: "/proc/self"}, good}, IDMap: m},
			"work is on another file system": {Layers: []Layer{good}, Upper: dir + "/1", Work: "/proc/self", IDMap: m},
			"no namespace":                   {Layers: []Layer{good}, IDMap: &IDMap{UserNS: dir + "/no"}},
		} {
			if err := s.MountAt(place); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	})
}

func TestCheckIDMap(t *testing.T) {
	inUserNamespace(t, func(m *IDMap) {
		if err := CheckIDMap(t.TempDir(), m.UserNS); err != nil {
			t.Error(err)
		}
		if err := CheckIDMap("/proc/sys", m.UserNS); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("CheckIDMap of /proc: %v", err)
		}
		if err := CheckIDMap("/does/not/exist", m.UserNS); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

func TestProbeIDMap(t *testing.T) {
	dir := t.TempDir()
	var tmpfs error // before Linux 6.3
	inUserNamespace(t, func(m *IDMap) {
		tmpfs = probeTmpfs(m.UserNS)
		for _, f := range mappedFuncs { // on a thread with its own mount namespace
			err := probeIDMap(dir, m.UserNS, m.Mappings, f.mount)
			if got := fmt.Sprint(err); got != fmt.Sprint(tmpfs) {
				t.Errorf("%s: %s", f.name, got)
			}
		}
	})
	if err := ProbeIDMap(dir, "/proc/self/ns/user", userns.Mappings{}); err == nil {
		t.Error("no error for the host's namespace, which maps nothing")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if tmpfs != nil {
		t.Skipf("NOT TESTED: %v", tmpfs)
	}
}
