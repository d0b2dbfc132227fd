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

// Enabled tells whether this binary has failpoints.
const Enabled = true

const variable = "BERTH_FAILPOINTS"

// program is the name that this program was started by.
var program = filepath.Base(os.Args[0])

// dir is empty in a process that nobody controls.
var dir = os.Getenv(variable)

// Env is what a child process needs in its environment to have failpoints, too.
func Env() []string {
	if dir == "" {
		return nil
	}
	return []string{variable + "=" + dir}
}

// Reach says that the program is at the point of that name. It may not return. Trouble with the
// directory is a panic: a test that does not do what it says is worse than none.
func Reach(name string) {
	if dir == "" {
		return
	}
	signal, err := unix.Signal(0), note(name)
	if err == nil {
		signal, err = due(name)
	}
	if err == nil && signal != 0 {
		runtime.LockOSThread() // the signal is this thread's, which so goes no step further
		err = unix.Tgkill(unix.Getpid(), unix.Gettid(), signal)
		runtime.UnlockOSThread()
	}
	if err != nil {
		panic("failpoint " + name + ": " + err.Error())
	}
}

// note appends the name, our process ID and program to the trace, if there is one.
func note(name string) error {
	fd, err := unix.Open(dir+"/trace", unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(name+" "+strconv.Itoa(unix.Getpid())+" "+program+"\n"))
	return errors.Join(err, unix.Close(fd))
}

// due returns the signal that the program is to get here, 0 for none.
func due(name string) (signal unix.Signal, err error) {
	fd, err := unix.Open(dir+"/armed", unix.O_RDWR|unix.O_CLOEXEC, 0)
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

// countDown takes one off the number in the file, which is locked, if it is about this point. At
// the end of it the file is removed, and its signal returned.
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
	if err != nil || left < 1 { // 0: somebody was faster, and had opened it before it was removed
		return 0, err
	}
	left--
	// Padded, so that it is never longer or shorter than what it replaces.
	text := name + " " + strings.Repeat("0", max(0, len(fields[1])-len(strconv.Itoa(left)))) + strconv.Itoa(left) + " " + fields[2] + " " + fields[3] + "\n"
	if _, err := unix.Pwrite(fd, []byte(text), 0); err != nil || left > 0 {
		return 0, err
	}
	if err := unix.Unlink(dir + "/armed"); err != nil {
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

// isMeant tells whether this is the process, or a process of that program.
func isMeant(process string) bool {
	return process == strconv.Itoa(unix.Getpid()) || process == program
}
