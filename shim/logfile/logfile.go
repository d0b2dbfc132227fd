// Package logfile opens container log files for the launcher. The monitor opens
// them in the same way (shim/monitor/logfile.c).
package logfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Open opens the log file at path for appending, and creates it (0640) if it is not
// there; its directory must exist. Below dir, a directory on the way to it, no
// symbolic link is followed, and the file must be a regular one: a container that
// has the log directory mounted could have put anything there. An empty dir means
// the file's own directory.
func Open(dir, path string) (int, error) {
	dir, path = Clean(dir, path)
	name, below := strings.CutPrefix(path, strings.TrimSuffix(dir, "/")+"/")
	if !below {
		return -1, &os.PathError{Op: "open log", Path: path, Err: errors.New("it is not below " + dir)}
	}
	root, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open log", Path: path, Err: err}
	}
	defer unix.Close(root)
	fd, err := openBeneath(root, name)
	if err != nil {
		return -1, &os.PathError{Op: "open log", Path: path, Err: err}
	}
	var st unix.Stat_t
	err = unix.Fstat(fd, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errors.New("not a regular file")
	}
	if err != nil {
		return -1, errors.Join(&os.PathError{Op: "open log", Path: path, Err: err}, unix.Close(fd))
	}
	return fd, nil
}

// Clean returns what Open takes dir and path for: the monitor compares them byte by byte.
func Clean(dir, path string) (cleanDir, cleanPath string) {
	if dir == "" {
		dir = filepath.Dir(path)
	}
	return filepath.Clean(dir), filepath.Clean(path)
}

func openBeneath(root int, path string) (int, error) {
	how := &unix.OpenHow{
		Flags:   unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC,
		Mode:    0o640,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	}
	// EAGAIN means that a rename raced with the walk. Somebody who renames all the
	// time must not keep a monitor from its container.
	for attempt := 0; ; attempt++ {
		fd, err := unix.Openat2(root, path, how)
		if err != unix.EINTR && err != unix.EAGAIN || attempt == 100 {
			return fd, err
		}
	}
}
