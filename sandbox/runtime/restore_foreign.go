package runtime

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"berth/checkpoint/archive"
	"berth/checkpoint/confined"
	"berth/checkpoint/verify"
	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/netns"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// verifyContainer compares CRIU's images and the writable layer with the spec. The confined program
// berth-verify parses them.
func (k Restores) verifyContainer(ctx context.Context, dir string, c *state.Container, spec *specs.Spec) error {
	launcher, err := k.Launcher.Inspect(ctx, spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	permitted, err := expectations(spec, launcher)
	if err != nil {
		return err
	}
	return k.verify(dir, c.Config.GetMetadata().GetName(), func(files *os.File) (*verify.Report, error) {
		return confined.Container(ctx, k.Verifier, files, permitted)
	})
}

// verifyShm checks the content of a pod's /dev/shm.
func (k Restores) verifyShm(ctx context.Context, dir string) error {
	return k.verify(dir, archive.ShmFile, func(files *os.File) (*verify.Report, error) {
		return confined.Shm(ctx, k.Verifier, files)
	})
}

// verify runs berth-verify for a directory of a checkpoint. name is that of its content in errors.
func (k Restores) verify(dir, name string, run func(*os.File) (*verify.Report, error)) error {
	if k.Verifier == "" {
		return errdefs.FailedPrecondition("the program berth-verify, which is needed for checkpoints of other nodes, was not found")
	}
	files, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("open checkpoint: %w", err)
	}
	defer files.Close() // it was only read
	report, err := run(files)
	if err != nil {
		return fmt.Errorf("verify the checkpoint of %s: %w", name, err)
	}
	if len(report.Differences) > 0 {
		return exceeds(name, report.Differences)
	}
	return nil
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
	if expected.CgroupOptions, err = host.CgroupOptions(); err != nil {
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
