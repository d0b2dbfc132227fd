package proto

import (
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// The names of files in a shim directory. See package shim for their contract.
const (
	ShimFile   = "shim" // PIDs
	ExitFile   = "exit" // Exit; usually the monitor writes it (shim/monitor/record.c)
	SocketFile = "sock" // the monitor's unix socket, which takes frames

	// RuntimeFile is the ociruntime.Runtime, as JSON, of a container that an OCI runtime made. The
	// monitor does not use it.
	RuntimeFile = "oci"

	// SignalledFile is empty. The daemon has sent the stop signal.
	SignalledFile = "signalled"
)

// PIDs identifies the processes of a container. It is the content of Dir/shim. Start times are
// field 22 of /proc/PID/stat, in clock ticks since boot; see pidfd.OpenVerified.
type PIDs struct {
	MonitorPID       int       `json:"shimPID"` // launcher, and later the monitor; 0: a pause, which has no monitor
	MonitorStartTime uint64    `json:"shimStartTime"`
	InitPID          int       `json:"initPID"` // 0: the container's init does not exist yet
	InitStartTime    uint64    `json:"initStartTime"`
	StartedAt        time.Time `json:"startedAt"`

	// ContainerPID is the container's init, if InitPID is the process that reports its exit. 0: the
	// node does not see it, or InitPID is it. Nobody signals it.
	ContainerPID int `json:"containerPID,omitempty"`
}

// Container returns the container's init, or the process that stands for it.
func (p PIDs) Container() int { return cmp.Or(p.ContainerPID, p.InitPID) }

// Encode returns the content of Dir/shim.
func (p PIDs) Encode() []byte {
	var started int64
	if !p.StartedAt.IsZero() {
		started = p.StartedAt.UnixNano()
	}
	b := fmt.Appendf(nil, "%d %d %d %d %d", p.MonitorPID, p.MonitorStartTime, p.InitPID, p.InitStartTime, started)
	if p.ContainerPID != 0 { // older daemons read five fields
		b = fmt.Appendf(b, " %d", p.ContainerPID)
	}
	return append(b, '\n')
}

// DecodePIDs decodes the content of Dir/shim.
func DecodePIDs(data []byte) (PIDs, error) {
	f, err := fields(data, 5)
	if err != nil {
		if f, err = fields(data, 6); err != nil {
			return PIDs{}, err
		}
	}
	var n numbers
	p := PIDs{MonitorPID: n.pid(f[0]), MonitorStartTime: n.uint(f[1]), InitPID: n.pid(f[2]), InitStartTime: n.uint(f[3])}
	if started := n.int(f[4], 64); started != 0 {
		p.StartedAt = time.Unix(0, started)
	}
	if len(f) == 6 {
		p.ContainerPID = n.pid(f[5])
	}
	return p, n.err
}

// Exit is the content of Dir/exit.
type Exit struct {
	Code      int32     // exit code, or 128+signal
	Signal    int       // 0 if it exited without a signal
	OOMKilled bool      // the kernel's OOM killer killed a process of the container's cgroup
	At        time.Time // when init was reaped
}

// Encode returns the content of Dir/exit, with a checksum.
func (e Exit) Encode() []byte {
	b := fmt.Appendf(nil, "%d %d %t %d ", e.Code, e.Signal, e.OOMKilled, e.At.UnixNano())
	return fmt.Appendf(b, "%x\n", crc32.ChecksumIEEE(b))
}

// DecodeExit decodes the content of Dir/exit. It accepts only the output of Encode.
func DecodeExit(data []byte) (Exit, error) {
	f, err := fields(data, 5)
	if err != nil {
		return Exit{}, err
	}
	var n numbers
	e := Exit{
		Code:      int32(n.int(f[0], 32)),
		Signal:    int(n.int(f[1], 32)),
		OOMKilled: f[2] == "true",
		At:        time.Unix(0, n.int(f[3], 64)),
	}
	if n.err != nil {
		return Exit{}, n.err
	}
	if string(e.Encode()) != string(data) {
		return Exit{}, errors.New("checksum does not match")
	}
	return e, nil
}

// reserved is more than the length of any record, in bytes.
const reserved = 256

// ReserveFile takes the disk space that a later WriteFile of the same name needs. That write then
// succeeds on a full filesystem, except on one that copies overwritten blocks (btrfs).
func ReserveFile(dir, name string) error {
	return writeFile(temporary(dir, name), make([]byte, reserved))
}

// UnreserveFile frees the space of ReserveFile, unless a WriteFile has used it.
func UnreserveFile(dir, name string) error {
	if err := os.Remove(temporary(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// WriteFile replaces dir/name by rename, so a reader sees the old content or the new, and never a
// part. It does not sync, because the state directory does not outlive the boot.
func WriteFile(dir, name string, data []byte) error {
	tmp := temporary(dir, name)
	if err := writeFile(tmp, data); err != nil {
		return err
	}
	failpoint.Reach("record.rename")
	return os.Rename(tmp, filepath.Join(dir, name))
}

func temporary(dir, name string) string { return filepath.Join(dir, "."+name) }

// writeFile overwrites a file before it truncates it, to keep the reserved space.
func writeFile(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Truncate(int64(len(data)))
	}
	return errors.Join(err, f.Close())
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
