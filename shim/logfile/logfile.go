// Package logfile opens container log files, for the launcher and the monitor.
package logfile

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens the log file at path for appending, and creates it (0640) if it is
// not there; its directory must exist. The last component must not be a symbolic
// link and the file must be a regular one: a container that has the log directory
// mounted could have put anything there.
func Open(path string) (int, error) {
	const flags = unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	fd, err := unix.Open(path, flags, 0o640)
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
