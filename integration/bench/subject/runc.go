package subject

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Hand is a Checkpointer that calls runc, which calls CRIU. Its containers have the specs of a
// CRI's: the same mounts and limits, in the same pod's namespaces. Only their cgroups, their root
// filesystems (overlay over a directory) and their /ticks are their own.
type Hand struct {
	Version string // of runc and CRIU

	runc, criu string // programs
	image      string // directory with the image's files
	dir        string // on a disk, for writable layers
	state      string // on tmpfs
	cgroup     string
	procs      string // cgroup.procs of the programs' cgroup

	model *CRI
	made  []*handMade
	next  int
}

// handMade is a container of Hand.
type handMade struct {
	id, bundle, root, upper string
	// pipe is the container's input and output. It is open at both ends. CRIU refuses files outside
	// of the container's mounts, except pipes.
	pipe [2]*os.File
}

// Runc returns a Checkpointer that calls the programs runc and criu. image is a directory with the
// files of the containers' image.
func (at *Site) Runc(ctx context.Context, runc, criu, image string, model *CRI) (*Hand, error) {
	h := &Hand{runc: runc, criu: criu, image: image, model: model,
		dir: filepath.Join(at.Dir, "runc"), state: filepath.Join(at.State, "runc"), cgroup: filepath.Join("/", at.Machine, "runc")}
	for _, program := range []string{runc, criu} {
		out, err := exec.CommandContext(ctx, program, "--version").Output()
		if err != nil {
			return nil, fmt.Errorf("%s --version: %w", program, err)
		}
		first, _, _ := strings.Cut(string(out), "\n")
		h.Version = strings.TrimPrefix(h.Version+", "+first, ", ")
	}
	var err error
	if h.procs, err = makeCgroup(h.cgroup + "/programs"); err != nil {
		return nil, err
	}
	return h, errors.Join(os.MkdirAll(h.dir, 0o711), os.MkdirAll(h.state, 0o711))
}

// Run implements Checkpointer. The model's containers must run.
func (h *Hand) Run(ctx context.Context, ticks ...string) error {
	for i, dir := range ticks {
		m, err := h.prepare(ctx, i, dir)
		if err != nil {
			return err
		}
		if err := h.call(ctx, m.pipe[1], "run", "--detach", "--bundle", m.bundle, m.id); err != nil {
			return err
		}
	}
	return nil
}

// prepare makes the bundle and the root filesystem of a container like the model's container i.
func (h *Hand) prepare(ctx context.Context, i int, ticks string) (*handMade, error) {
	h.next++
	id := fmt.Sprintf("by-hand-%d", h.next)
	m := &handMade{id: id, bundle: filepath.Join(h.state, id), root: filepath.Join(h.dir, id, "root"), upper: filepath.Join(h.dir, id, "upper")}
	h.made = append(h.made, m)
	var err error
	if m.pipe[0], m.pipe[1], err = os.Pipe(); err != nil {
		return nil, err
	}
	work := filepath.Join(h.dir, id, "work")
	for _, dir := range []string{m.bundle, m.root, m.upper, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", h.image, m.upper, work)
	if err := unix.Mount("overlay", m.root, "overlay", 0, options); err != nil {
		return nil, os.NewSyscallError("mount", err)
	}
	spec, err := h.model.spec(ctx, i)
	if err != nil {
		return nil, err
	}
	spec.Root.Path = m.root
	spec.Annotations = nil
	spec.Linux.CgroupsPath = filepath.Join(h.cgroup, id)
	for i := range spec.Mounts {
		if spec.Mounts[i].Destination == ticksDir {
			spec.Mounts[i].Source = ticks
		}
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	return m, os.WriteFile(filepath.Join(m.bundle, "config.json"), data, 0o600)
}

// spec returns the runtime-spec of a container.
func (c *CRI) spec(ctx context.Context, i int) (*specs.Spec, error) {
	r, err := c.s.cri.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.pod.Containers[i], Verbose: true})
	if err != nil {
		return nil, fmt.Errorf("ContainerStatus: %w", err)
	}
	var info struct {
		Spec *specs.Spec `json:"runtimeSpec"`
	}
	if err := json.Unmarshal([]byte(r.Info["info"]), &info); err != nil {
		return nil, fmt.Errorf("ContainerStatus: %w", err)
	}
	if info.Spec == nil {
		return nil, errors.New("ContainerStatus has no runtimeSpec")
	}
	return info.Spec, nil
}

// command returns a command that runs in the programs' cgroup.
func (h *Hand) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", `echo $$ >"$0" && exec "$@"`, h.procs}, args...)...)
}

// call runs runc in the programs' cgroup. stream is the container's input and output, if it gets
// any.
func (h *Hand) call(ctx context.Context, stream *os.File, args ...string) error {
	log := filepath.Join(h.state, "log")
	if err := os.WriteFile(log, nil, 0o600); err != nil {
		return err
	}
	cmd := h.command(ctx, append([]string{h.runc, "--root", filepath.Join(h.state, "root"), "--log", log}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(h.criu)+":"+os.Getenv("PATH"))
	if stream != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = stream, stream, stream
	}
	if err := cmd.Run(); err != nil {
		said, _ := os.ReadFile(log) // without it the error has the exit status only
		return fmt.Errorf("runc %s: %w: %s", args[0], err, said)
	}
	return nil
}

// Save implements Checkpointer. The images are in the page cache afterwards.
func (h *Hand) Save(ctx context.Context, dir string) error {
	var group errgroup.Group
	for _, m := range h.made {
		group.Go(func() error { return h.save(ctx, m, filepath.Join(dir, m.id)) })
	}
	return group.Wait()
}

// save dumps a container with the options that berth gives CRIU, as far as runc has them.
func (h *Hand) save(ctx context.Context, m *handMade, dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return h.call(ctx, nil, "checkpoint", "--leave-running", "--file-locks", "--ext-unix-sk", "--manage-cgroups-mode", "soft",
		"--image-path", filepath.Join(dir, "checkpoint"), "--work-path", dir, m.id)
}

// Archive implements Checkpointer with tar, as CRI-O and containerd do.
func (h *Hand) Archive(ctx context.Context, file string) (err error) {
	dir := file + ".d"
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := h.save(ctx, h.made[0], filepath.Join(dir, "c")); err != nil {
		return err
	}
	if out, err := h.command(ctx, "tar", "-C", dir, "-cf", file, ".").CombinedOutput(); err != nil {
		return fmt.Errorf("tar: %w: %s", err, out)
	}
	return SyncFile(file)
}

// SyncFile writes a file or a directory to the disk.
func SyncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Freeze freezes all containers at the same time and thaws them.
func (h *Hand) Freeze(ctx context.Context) error {
	for _, what := range []string{"pause", "resume"} {
		var group errgroup.Group
		for _, m := range h.made {
			group.Go(func() error { return h.call(ctx, nil, what, m.id) })
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// Restore implements Checkpointer.
func (h *Hand) Restore(ctx context.Context, dir, ticks string) (began time.Time, err error) {
	saved := h.made[0]
	m, err := h.prepare(ctx, 0, ticks)
	if err != nil {
		return began, err
	}
	began = time.Now()
	return began, h.call(ctx, m.pipe[1], "restore", "--detach", "--bundle", m.bundle, "--file-locks", "--ext-unix-sk", "--manage-cgroups-mode", "soft",
		"--image-path", filepath.Join(dir, saved.id, "checkpoint"), "--work-path", m.bundle, m.id)
}

// CPU implements Checkpointer.
func (h *Hand) CPU() (time.Duration, error) { return (&Subject{cgroups: []string{h.cgroup}}).CPU() }

// Remove implements Checkpointer.
func (h *Hand) Remove(ctx context.Context) error {
	var errs []error
	for _, m := range h.made {
		errs = append(errs, h.call(ctx, nil, "delete", "--force", m.id),
			os.NewSyscallError("umount", unix.Unmount(m.root, 0)),
			os.RemoveAll(filepath.Dir(m.root)), os.RemoveAll(m.bundle), m.pipe[0].Close(), m.pipe[1].Close())
	}
	h.made = nil
	return errors.Join(errs...)
}
