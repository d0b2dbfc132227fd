// Package record reads and writes the two files of a shim directory that outlive
// everybody: Dir/shim (who runs) and Dir/exit (how it ended). The monitor
// writes the latter (shim/monitor/record.c). See package shim for the contract.
package record

import (
	"errors"
	"hash/crc32"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// The files' names in the shim directory.
const (
	ShimFile = "shim"
	ExitFile = "exit"

	// RuntimeFile is the ociruntime.Runtime, as JSON, of a container that a program made.
	// The monitor has no use for it.
	RuntimeFile = "oci"
)

// Shim is the content of Dir/shim. Start times are clock ticks since boot.
type Shim struct {
	PID       int    // of the launcher, later monitor; 0: a pause, which has none
	Start     uint64 //
	InitPID   int    // 0: the container's init does not exist yet
	InitStart uint64 //
	StartedAt int64  // unix nanoseconds
}

// Encode returns the file's content.
func (s Shim) Encode() []byte {
	b := strconv.AppendInt(nil, int64(s.PID), 10)
	b = strconv.AppendUint(append(b, ' '), s.Start, 10)
	b = strconv.AppendInt(append(b, ' '), int64(s.InitPID), 10)
	b = strconv.AppendUint(append(b, ' '), s.InitStart, 10)
	b = strconv.AppendInt(append(b, ' '), s.StartedAt, 10)
	return append(b, '\n')
}

// DecodeShim is the opposite of Encode.
func DecodeShim(data []byte) (Shim, error) {
	f, err := fields(data, 5)
	if err != nil {
		return Shim{}, err
	}
	var n numbers
	s := Shim{PID: n.pid(f[0]), Start: n.uint(f[1]), InitPID: n.pid(f[2]), InitStart: n.uint(f[3]), StartedAt: n.int(f[4], 64)}
	return s, n.err
}

// Exit is the content of Dir/exit.
type Exit struct {
	Code      int32 // exit code, or 128+signal
	Signal    int32 // 0 if it exited by itself
	OOMKilled bool
	At        int64 // unix nanoseconds
}

// Encode returns the file's content, with a checksum.
func (e Exit) Encode() []byte {
	b := strconv.AppendInt(nil, int64(e.Code), 10)
	b = strconv.AppendInt(append(b, ' '), int64(e.Signal), 10)
	b = strconv.AppendBool(append(b, ' '), e.OOMKilled)
	b = strconv.AppendInt(append(b, ' '), e.At, 10)
	b = append(b, ' ')
	return append(strconv.AppendUint(b, uint64(crc32.ChecksumIEEE(b)), 16), '\n')
}

// DecodeExit is the opposite of Encode. Only what Encode returned is accepted.
func DecodeExit(data []byte) (Exit, error) {
	f, err := fields(data, 5)
	if err != nil {
		return Exit{}, err
	}
	var n numbers
	e := Exit{Code: int32(n.int(f[0], 32)), Signal: int32(n.int(f[1], 32)), OOMKilled: f[2] == "true", At: n.int(f[3], 64)}
	if n.err != nil {
		return Exit{}, n.err
	}
	if string(e.Encode()) != string(data) {
		return Exit{}, errors.New("checksum does not match")
	}
	return e, nil
}

// reserved is more than any record has.
const reserved = 256

// Reserve takes the room on the filesystem that a later Write of the same name needs, so that it
// succeeds on a full one, unless that copies what is overwritten (btrfs).
func Reserve(dir, name string) error {
	return writeFile(temporary(dir, name), make([]byte, reserved))
}

// Unreserve gives up what Reserve took and no Write used.
func Unreserve(dir, name string) error {
	if err := unix.Unlink(temporary(dir, name)); err != nil && err != unix.ENOENT {
		return wrap("remove "+temporary(dir, name), err)
	}
	return nil
}

// Write puts data into dir/name by rename: a reader sees the old content or the
// new, never a part. It is not synced: the state directory dies with the boot.
func Write(dir, name string, data []byte) error {
	tmp, path := temporary(dir, name), dir+"/"+name
	if err := writeFile(tmp, data); err != nil {
		return err
	}
	failpoint.Reach("record.rename")
	if err := unix.Rename(tmp, path); err != nil {
		return wrap("rename "+tmp, err)
	}
	return nil
}

func temporary(dir, name string) string { return dir + "/." + name }

// writeFile overwrites a file before it cuts off the rest: room that it has is not given up.
func writeFile(path string, data []byte) error {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return wrap("create "+path, err)
	}
	n, err := unix.Write(fd, data)
	if err == nil && n < len(data) {
		err = unix.ENOSPC
	}
	if err == nil {
		err = unix.Ftruncate(fd, int64(len(data)))
	}
	if err := errors.Join(err, unix.Close(fd)); err != nil {
		return wrap("write "+path, err)
	}
	return nil
}

func fields(data []byte, n int) ([]string, error) {
	line, ok := strings.CutSuffix(string(data), "\n")
	f := strings.Split(line, " ")
	if !ok || len(f) != n {
		return nil, errors.New("not a complete line of " + strconv.Itoa(n) + " fields")
	}
	return f, nil
}

// numbers parses several numbers and remembers the first error.
type numbers struct{ err error }

func (n *numbers) keep(err error) {
	if n.err == nil {
		n.err = err
	}
}

func (n *numbers) int(s string, bits int) int64 {
	v, err := strconv.ParseInt(s, 10, bits)
	n.keep(err)
	return v
}

func (n *numbers) uint(s string) uint64 {
	v, err := strconv.ParseUint(s, 10, 64)
	n.keep(err)
	return v
}

func (n *numbers) pid(s string) int {
	v := n.int(s, 32)
	if v < 0 {
		n.keep(errors.New("negative pid " + s))
	}
	return int(v)
}

// wrap is fmt.Errorf("%s: %w") without package fmt.
func wrap(what string, err error) error { return &wrapped{what, err} }

type wrapped struct {
	what string
	err  error
}

func (w *wrapped) Error() string { return w.what + ": " + w.err.Error() }
func (w *wrapped) Unwrap() error { return w.err }
