package launcher

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// openLogFile opens the log file at path for appending and creates it (0640) if needed. Its
// directory must exist. Below dir, a parent directory of path, openLogFile accepts only regular
// files and no symbolic links, because a container that mounts the log directory can create any
// file there. An empty dir means the direct parent. The monitor opens it in the same way
// (shim/monitor/logfile.c).
func openLogFile(dir, path string) (int, error) {
	dir, path = cleanLogPath(dir, path)
	name, below := strings.CutPrefix(path, strings.TrimSuffix(dir, "/")+"/")
	if !below {
		return -1, &os.PathError{Op: "open log", Path: path, Err: errors.New("not below " + dir)}
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

// cleanLogPath returns the paths that openLogFile uses. The monitor compares them byte by byte.
func cleanLogPath(dir, path string) (cleanDir, cleanPath string) {
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
	// EAGAIN means that a rename raced with the path walk. The number of attempts is limited,
	// because a container could rename continuously.
	for attempt := 0; ; attempt++ {
		fd, err := unix.Openat2(root, path, how)
		if err != unix.EINTR && err != unix.EAGAIN || attempt == 100 {
			return fd, err
		}
	}
}
