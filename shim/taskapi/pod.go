package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/cgroup"
	"berth/internal/failpoint"
	"berth/internal/pidfd"
)

// pod is the state directory of a pod, whose containers share one shim.
type pod struct {
	program
	dir string
}

// record describes the shim of a pod. It exists before the shim.
type record struct {
	Sandbox string `json:"sandbox"` // ID of the task whose create started the shim
	Bundle  string `json:"bundle"`
	Cgroup  string `json:"cgroup,omitempty"` // the shim's own, as cgroupsPath; empty: it has none

	// Of a shim that serves its sandbox.
	Address   string `json:"address,omitempty"`
	Version   int32  `json:"version,omitempty"`
	PID       int    `json:"pid,omitempty"`
	StartTime uint64 `json:"startTime,omitempty"`
	// Entered is the cgroup that a shim has made for itself and its virtual machine.
	Entered string `json:"entered,omitempty"`
}

func (p *pod) recordPath() string          { return filepath.Join(p.dir, "shim.json") }
func (p *pod) lockPath() string            { return filepath.Join(p.dir, "lock") }
func (p *pod) taskDir(id string) string    { return filepath.Join(p.dir, id) }
func (p *pod) readRecord() (record, error) { return readJSON[record](p.recordPath()) }

// writeJSON replaces a file.
func writeJSON(path string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	failpoint.Reach("task.write-record")
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	failpoint.Reach("task.rename-record")
	err = os.Rename(path+".new", path)
	failpoint.Reach("task.record-written")
	return err
}

func readJSON[T any](path string) (content T, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return content, err
	}
	if err := json.Unmarshal(data, &content); err != nil {
		return content, fmt.Errorf("read %s: %w", path, err)
	}
	return content, nil
}

// lock excludes the other commands that start, use or end the pod's shim, until unlock.
func (p *pod) lock() (unlock func() error, err error) {
	f, err := os.OpenFile(p.lockPath(), os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("flock", err), f.Close())
	}
	return f.Close, nil
}

// connect connects to the pod's shim. The error wraps errUnanswered, or fs.ErrNotExist if the pod
// has no shim.
func (p *pod) connect(ctx context.Context) (*client, record, error) {
	r, err := p.readRecord()
	if err != nil {
		return nil, r, err
	}
	if r.Address == "" {
		return nil, r, fmt.Errorf("%w: it was not started completely", errUnanswered)
	}
	c, err := connect(ctx, r.Address, r.Version)
	return c, r, err
}

// startShim starts the shim of a sandbox. The caller records its process after the sandbox's task
// exists.
func (c *command) startShim(ctx context.Context, id, bundle, cgroupsPath string) (*client, record, error) {
	r := record{Sandbox: id, Bundle: bundle, Cgroup: cgroupsPath}
	if err := writeJSON(c.recordPath(), r); err != nil {
		return nil, r, err
	}
	if r.Cgroup != "" {
		if err := enterCgroup(r.Cgroup); err != nil {
			return nil, r, err
		}
	}
	events := ""
	if c.watches {
		events = r.eventSocket()
		if err := c.startWatch(&r); err != nil {
			return nil, r, fmt.Errorf("receive the shim's events: %w", err)
		}
	}
	var err error
	if r.Address, r.Version, err = c.start(ctx, id, bundle, events); err != nil {
		return nil, r, err
	}
	if err := writeJSON(c.recordPath(), r); err != nil {
		return nil, r, err
	}
	shim, err := connect(ctx, r.Address, r.Version)
	return shim, r, err
}

// shimCgroup returns the path of the shim's own cgroup beside its sandbox's. Only systemd can make
// a cgroup below a slice, so with that driver the shim stays in its launcher's.
func shimCgroup(cgroupsPath string, systemd bool) string {
	if systemd || cgroupsPath == "" {
		return ""
	}
	return path.Join(path.Dir(cgroupsPath), "shim-"+path.Base(cgroupsPath))
}

// enterCgroup makes a cgroup and moves this process there.
func enterCgroup(cgroupsPath string) error {
	group, err := cgroup.Open(cgroupsPath, false)
	if err != nil {
		return err
	}
	paths := group.Paths()
	for _, dir := range paths {
		if dir == paths["cpuset"] && len(paths) > 1 { // on cgroup v1, where a new one has no processors
			continue
		}
		failpoint.Reach("task.make-cgroup")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the shim's cgroup: %w", err)
		}
		failpoint.Reach("task.enter-cgroup")
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return fmt.Errorf("enter the shim's cgroup: %w", err)
		}
		failpoint.Reach("task.cgroup-entered")
	}
	return nil
}

// identify records the shim's process.
func (p *pod) identify(ctx context.Context, c *client, r record) (err error) {
	if r.PID, err = c.shimPID(ctx, r.Sandbox); err != nil {
		return err
	}
	if r.StartTime, err = pidfd.StartTime(r.PID); err != nil {
		return fmt.Errorf("the shim's process %d: %w", r.PID, err)
	}
	if r.Entered, err = enteredCgroup(r); err != nil {
		return err
	}
	return writeJSON(p.recordPath(), r)
}

// enteredCgroup returns the cgroup of a shim's process, if the shim has made it for its sandbox.
// Kata's name contains the sandbox's ID.
func enteredCgroup(r record) (string, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", r.PID))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(data)) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		_, dir, _ := strings.Cut(rest, ":")
		if strings.Contains(path.Base(dir), r.Sandbox) && dir != r.Cgroup {
			return dir, nil
		}
	}
	return "", nil
}

// endShim kills the pod's shim, if it still exists, and removes its cgroup, socket and record.
func (p *pod) endShim(ctx context.Context, r record) error {
	if err := p.killShim(ctx, r); err != nil {
		return err
	}
	socket := strings.TrimPrefix(r.Address, "unix://")
	err := errors.Join(removeSocket(socket), removeSocket(r.eventSocket()), p.answered())
	if err != nil {
		return err
	}
	failpoint.Reach("task.remove-record")
	err = os.Remove(p.recordPath())
	failpoint.Reach("task.record-removed")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// hungAfter is how long a shim may leave kills and deletes unanswered. Some shims do nothing else
// while they create a container.
const hungAfter = 10 * time.Second

func (p *pod) silentPath() string { return filepath.Join(p.dir, "silent") }

// isHung tells whether a shim that did not answer now is lost, or has been silent for hungAfter.
// The first call marks the beginning, and answered ends it.
func (p *pod) isHung(r record) bool {
	if p.isLost(r) {
		return true
	}
	info, err := os.Stat(p.silentPath())
	if err == nil {
		return time.Since(info.ModTime()) >= hungAfter
	}
	// Without the mark a hung shim would never be killed.
	return os.WriteFile(p.silentPath(), nil, 0o600) != nil
}

// isLost tells whether the shim's process has ended, or never served.
func (p *pod) isLost(r record) bool {
	if r.PID == 0 {
		return true
	}
	process, err := pidfd.OpenVerified(r.PID, r.StartTime)
	if err != nil {
		return errors.Is(err, os.ErrProcessDone)
	}
	defer process.Close()
	ended, err := pidfd.Ended(process)
	return err == nil && ended
}

func (p *pod) answered() error {
	if err := os.Remove(p.silentPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// killShim kills the shim with its cgroups, and waits for its end.
func (p *pod) killShim(ctx context.Context, r record) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if r.PID != 0 {
		if err := endProcess(ctx, r.PID, r.StartTime); err != nil {
			return fmt.Errorf("kill the shim: %w", err)
		}
	}
	for _, dir := range []string{r.Cgroup, r.Entered} {
		if dir == "" {
			continue
		}
		group, err := cgroup.Open(dir, false)
		if err != nil {
			return err
		}
		if err := errors.Join(group.Kill(ctx), group.Destroy(ctx)); err != nil {
			return fmt.Errorf("kill the shim: %w", err)
		}
	}
	return nil
}

func endProcess(ctx context.Context, pid int, startTime uint64) error {
	process, err := pidfd.OpenVerified(pid, startTime)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer process.Close()
	if err := pidfd.Signal(process, unix.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return pidfd.Wait(ctx, process)
}
