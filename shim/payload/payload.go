// Package payload embeds the two small programs of berth, pause and the monitor, and installs them
// in an executable place.
//
// contrib/build compiles the programs. If berth was compiled in another way, they are missing, and
// Install fails.
package payload

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

//go:embed all:bin
var bin embed.FS

// Paths are the paths of the files that Install has written.
type Paths struct {
	Pause   string // pause's root filesystem, a directory; the program in it is /pause
	Monitor string // the monitor's executable
}

// PauseProgram is pause's path in its root filesystem.
const PauseProgram = "/pause"

// pauseMountPoints are the mount points in pause's root filesystem, which is mounted read-only.
var pauseMountPoints = []string{"dev", "proc", "sys"}

// Install writes the programs below dir, which it creates (0700) if needed. dir must not be on a
// noexec mount. It verifies existing programs and keeps them. Names contain a hash of the content,
// so that running pods survive an upgrade. It removes other versions. Several processes may call it
// at once.
func Install(dir string) (Paths, error) {
	return install(bin, dir)
}

func install(programs fs.FS, dir string) (Paths, error) {
	pause, err := read(programs, "pause")
	if err != nil {
		return Paths{}, err
	}
	monitor, err := read(programs, "monitor")
	if err != nil {
		return Paths{}, err
	}
	paths := Paths{
		Pause:   filepath.Join(dir, "pause-"+sum(pause)),
		Monitor: filepath.Join(dir, "monitor-"+sum(monitor), "berth-monitor"),
	}
	locked, err := lock(dir)
	if err != nil {
		return Paths{}, fmt.Errorf("lock %s: %w", dir, err)
	}
	defer locked.Close()
	if err := installTree(paths.Pause, "pause", pause, pauseMountPoints...); err != nil {
		return Paths{}, fmt.Errorf("install pause: %w", err)
	}
	if err := installTree(filepath.Dir(paths.Monitor), "berth-monitor", monitor); err != nil {
		return Paths{}, fmt.Errorf("install monitor: %w", err)
	}
	if err := removeOthers(dir, filepath.Base(paths.Pause), filepath.Base(filepath.Dir(paths.Monitor))); err != nil {
		return Paths{}, fmt.Errorf("remove other versions and what an interrupted installation left: %w", err)
	}
	return paths, nil
}

func read(programs fs.FS, name string) ([]byte, error) {
	data, err := fs.ReadFile(programs, "bin/"+name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s is not embedded in this binary: build berth with contrib/build", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read embedded %s: %w", name, err)
	}
	return data, nil
}

// sum is the part of the content's SHA-256 that goes into names.
func sum(data []byte) string {
	h := sha256.Sum256(data)
	return hex.EncodeToString(h[:8])
}

// unfinished is the prefix of the names of incomplete directories.
const unfinished = ".new-"

// removeOthers removes the programs of other versions and the remains of interrupted installers.
// The caller has locked dir, so that no installer is active. Running programs continue, because the
// kernel keeps their files.
func removeOthers(dir string, keep ...string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if !slices.Contains(keep, e.Name()) {
			failpoint.Reach("payload.remove-other")
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
			failpoint.Reach("payload.other-removed")
		}
	}
	return err
}

// installTree creates the directory path, with one program and empty directories, atomically. It
// replaces a directory with other content. The caller has locked the parent directory.
func installTree(path, program string, data []byte, dirs ...string) error {
	if intact(path, program, data, dirs) {
		return nil
	}
	failpoint.Reach("payload.install")
	tmp, err := os.MkdirTemp(filepath.Dir(path), unfinished)
	if err != nil {
		return err
	}
	err = fill(tmp, program, data, dirs)
	failpoint.Reach("payload.filled")
	if err == nil {
		err = os.RemoveAll(path)
	}
	failpoint.Reach("payload.old-removed")
	if err == nil {
		err = os.Rename(tmp, path)
	}
	failpoint.Reach("payload.installed")
	return errors.Join(err, os.RemoveAll(tmp))
}

// lock creates dir if needed. It keeps other installers out until the file is closed.
func lock(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(os.NewSyscallError("flock", err), f.Close())
	}
	return f, nil
}

func fill(dir, program string, data []byte, dirs []string) error {
	for _, d := range dirs {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	path := filepath.Join(dir, program)
	if err := write(path, data); err != nil {
		return err
	}
	if err := flush(path); err != nil { // the content must match the name also after a power loss
		return err
	}
	// The mode is 0755 also under a strict umask, because a pod's user need not be root.
	return errors.Join(os.Chmod(path, 0o755), os.Chmod(dir, 0o755))
}

// write creates a program. No process is forked meanwhile: until it executes its own program, it
// would have a copy of the descriptor, and the kernel refuses to execute a file that is open for
// writing (ETXTBSY, go.dev/issue/22315).
func write(path string, data []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, data, 0o755)
}

func flush(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// intact reports whether the tree at path is exactly the tree that fill creates.
func intact(path, program string, data []byte, dirs []string) bool {
	entries, err := os.ReadDir(path)
	if err != nil || len(entries) != len(dirs)+1 {
		return false
	}
	for _, d := range dirs {
		if info, err := os.Lstat(filepath.Join(path, d)); err != nil || !info.IsDir() {
			return false
		}
	}
	file := filepath.Join(path, program)
	info, err := os.Lstat(file)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 {
		return false
	}
	got, err := os.ReadFile(file)
	return err == nil && bytes.Equal(got, data)
}
