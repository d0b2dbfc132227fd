//go:build failpoints

package failpoint

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Enabled reports whether this binary has failpoints.
const Enabled = true

const variable = "BERTH_FAILPOINTS"

// program is the name of this program.
var program = filepath.Base(os.Args[0])

// dir is empty if no test controls the process.
var dir = os.Getenv(variable)

// control is a descriptor of dir. It is opened at the start, because a launcher later makes all
// mounts of its own namespace read-only.
var control = openControl()

func openControl() int {
	if dir == "" {
		return -1
	}
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		panic("failpoints in " + dir + ": " + err.Error())
	}
	return fd
}

// Env returns the environment that enables failpoints in a child process.
func Env() []string {
	if dir == "" {
		return nil
	}
	return []string{variable + "=" + dir}
}

// Reach reports that the program has reached the point of that name. If a test has armed the point,
// the program stops or dies in Reach. Reach panics if it cannot use the directory, because a test
// must not pass without its failpoints.
func Reach(name string) {
	if dir == "" {
		return
	}
	signal, err := unix.Signal(0), note(name)
	if err == nil {
		signal, err = due(name)
	}
	if err == nil && signal != 0 {
		runtime.LockOSThread() // the signal stops this thread before its next step
		err = unix.Tgkill(unix.Getpid(), unix.Gettid(), signal)
		runtime.UnlockOSThread()
	}
	if err != nil {
		panic("failpoint " + name + ": " + err.Error())
	}
}

// note appends the name, the process ID and the program to the trace, if it exists.
func note(name string) error {
	fd, err := unix.Openat(control, "trace", unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(name+" "+strconv.Itoa(unix.Getpid())+" "+program+"\n"))
	return errors.Join(err, unix.Close(fd))
}

// due returns the signal that the program must receive here, or 0.
func due(name string) (signal unix.Signal, err error) {
	fd, err := unix.Openat(control, "armed", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		return 0, err
	}
	return countDown(fd, name)
}

// countDown decrements the count in the locked file if the file names this point. When the count
// reaches zero it removes the file and returns its signal.
func countDown(fd int, name string) (unix.Signal, error) {
	var buf [256]byte
	n, err := unix.Pread(fd, buf[:], 0)
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(buf[:n]))
	if len(fields) != 4 {
		return 0, errors.New("the file armed is not NAME N ACTION PROCESS")
	}
	if fields[0] != name || !isMeant(fields[3]) {
		return 0, nil
	}
	left, err := strconv.Atoi(fields[1])
	if err != nil || left < 1 { // 0: another process decremented the count first and removed the file
		return 0, err
	}
	left--
	// The text is padded to the length of the content that it replaces.
	text := name + " " + strings.Repeat("0", max(0, len(fields[1])-len(strconv.Itoa(left)))) + strconv.Itoa(
		left) + " " + fields[2] + " " + fields[3] + "\n"
	if _, err := unix.Pwrite(fd, []byte(text), 0); err != nil || left > 0 {
		return 0, err
	}
	if err := unix.Unlinkat(control, "armed", 0); err != nil {
		return 0, err
	}
	switch fields[2] {
	case "kill":
		return unix.SIGKILL, nil
	case "stop":
		return unix.SIGSTOP, nil
	}
	return 0, errors.New("unknown action " + fields[2])
}

// isMeant reports whether process is this process's ID or program name.
func isMeant(process string) bool {
	return process == strconv.Itoa(unix.Getpid()) || process == program
}
