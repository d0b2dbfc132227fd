package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/checkpoint/archive"
	"berth/checkpoint/confined"
	"berth/checkpoint/verify"
	"berth/internal/errdefs"
	"berth/internal/netns"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// verify compares CRIU's images with the spec, in the confined program berth-verify.
func (k Restores) verify(ctx context.Context, dir string, c *state.Container, spec *specs.Spec) error {
	if k.Verifier == "" {
		return errdefs.FailedPrecondition("the program berth-verify, which is needed for checkpoints of other nodes, was not found")
	}
	images, err := os.Open(filepath.Join(dir, archive.ImagesDir))
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer images.Close() // it was only read
	launcher, err := k.Launcher.Inspect(ctx, spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	permitted, err := expectations(spec, launcher)
	if err != nil {
		return err
	}
	layer := func(r io.Reader) ([]verify.Difference, error) { return verify.Layer(r, spec) }
	if err := compareFiles(filepath.Join(dir, archive.RootfsDiffFile), layer); err != nil {
		return err
	}
	var report *verify.Report
	for _, expected := range permitted {
		if report, err = confined.Verify(ctx, k.Verifier, images, expected); err != nil {
			return fmt.Errorf("verify the checkpoint of %s: %w", c.Config.GetMetadata().GetName(), err)
		}
		if len(report.Differences) == 0 {
			return nil
		}
	}
	return exceeds(c.Config.GetMetadata().GetName(), report.Differences)
}

// exceeds returns the error for differences of what a checkpoint has.
func exceeds(name string, differences []verify.Difference) error {
	text := make([]string, len(differences))
	for i, d := range differences {
		text[i] = d.String()
	}
	return errdefs.FailedPrecondition("the checkpoint of %s exceeds what the request permits: %s",
		name, errdefs.Clip(strings.Join(text, "; ")))
}

// compareFiles checks the files of a checkpoint of another node: a tar, which may be missing.
func compareFiles(path string, compare func(io.Reader) ([]verify.Difference, error)) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open files of a checkpoint: %w", err)
	}
	defer file.Close() // it was only read
	name := filepath.Base(path)
	differences, err := compare(file)
	if err != nil {
		return errdefs.InvalidArgument("%s of the checkpoint: %w", name, err)
	}
	if len(differences) > 0 {
		return exceeds(name, differences)
	}
	return nil
}

// expectations returns what a container of this spec may have at most: one for each filter that a
// launcher could load for its seccomp profile.
func expectations(spec *specs.Spec, launcher *proto.Inspected) (all []verify.Expected, err error) {
	if len(launcher.Seccomp) == 0 { // there is no profile, or it allows everything
		spec = withoutSeccomp(spec)
	}
	expected := verify.Expected{
		Spec: spec, Rlimits: launcher.Rlimits, ExternalFiles: []string{NullStream},
		AbsentPaths: verify.AbsentPaths(spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths),
		Memory:      memoryLimit(spec),
	}
	if expected.CgroupOptions, err = verify.CgroupOptions(); err != nil {
		return nil, fmt.Errorf("find options of the cgroup filesystem: %w", err)
	}
	if expected.Cgroups, err = verify.NodeCgroups(); err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	if expected.UnprivilegedPort, err = unprivilegedPort(spec); err != nil {
		return nil, fmt.Errorf("find ports without privileges: %w", err)
	}
	if len(launcher.Seccomp) == 0 {
		return []verify.Expected{expected}, nil
	}
	for _, filter := range launcher.Seccomp {
		expected.Seccomp = filter
		all = append(all, expected)
	}
	return all, nil
}

// unprivilegedPort returns the first port that a process without capabilities can bind in the
// container's network namespace.
func unprivilegedPort(spec *specs.Spec) (port uint32, err error) {
	read := func() error {
		data, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
		if err != nil {
			return err
		}
		n, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
		port = uint32(n)
		return err
	}
	for _, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			err = netns.In(ns.Path, read)
			return port, err
		}
	}
	err = read()
	return port, err
}

// withoutSeccomp returns a copy of the spec without seccomp profile.
func withoutSeccomp(spec *specs.Spec) *specs.Spec {
	changed, linux := *spec, *spec.Linux
	linux.Seccomp = nil
	changed.Linux = &linux
	return &changed
}

// memoryLimit returns the memory limit of a container in bytes, or 0.
func memoryLimit(spec *specs.Spec) int64 {
	if r := spec.Linux.Resources; r != nil && r.Memory != nil && r.Memory.Limit != nil && *r.Memory.Limit > 0 {
		return *r.Memory.Limit
	}
	return 0
}
