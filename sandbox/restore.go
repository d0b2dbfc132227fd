package sandbox

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/process/archive"
	"berth/internal/cleanup"
	"berth/internal/errdefs"
	"berth/internal/rootfs"
	"berth/internal/task"
	"berth/internal/trace"
	"berth/oci"
	"berth/sandbox/state"
)

// restorer creates pods and containers that continue a checkpoint.
type restorer struct {
	m        *Manager
	restores Restores
}

// RestorePod creates a pod and its containers, which continue a checkpoint. StartContainer restores
// the processes of a container. The checkpoint is not needed afterwards, because berth keeps a copy
// until the container has started. If RestorePod fails, it removes everything that it has made.
//
// A call with the identity and content of an existing restored pod joins its creation, or returns
// its IDs.
//
// Errors: InvalidArgument for a malformed config or checkpoint. AlreadyExists if the identity
// exists with other content. NotFound for an unknown handler or image. FailedPrecondition if the
// checkpoint does not belong to the requested containers, or cannot be restored here. It is also
// returned if CRIU would restore it and the configuration does not permit that.
func (k *restorer) RestorePod(
	ctx context.Context, r state.RestoreRequest,
) (podID string, _ []state.Restored, err error) {
	if err := k.checkRestore(r); err != nil {
		return "", nil, err
	}
	sum, err := fingerprintOf(r.Config, &runtimeapi.RunPodSandboxRequest{RuntimeHandler: r.Handler})
	if err != nil {
		return "", nil, err
	}
	identity := state.PodIdentity(r.Config.Metadata)
	defer k.m.tasks.BeginUpTo(task.Timeout, "concurrent creation", identity)()
	podID, err = k.m.podIDs.Create(ctx, identity, sum, maker{
		Spawn:  k.m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return k.restorePod(ctx, r, identity) },
		Remove: k.m.replacePod,
	})
	if err != nil {
		return "", nil, fmt.Errorf("restore %s: %w", identity, err)
	}
	restored, err := k.restoredIn(podID, r)
	if err != nil {
		return "", nil, fmt.Errorf("restore %s: %w", identity, err)
	}
	return podID, restored, nil
}

// checkRestore rejects requests before anything is created.
func (k *restorer) checkRestore(r state.RestoreRequest) error {
	if !filepath.IsAbs(r.Path) {
		return errdefs.InvalidArgument("checkpoint_path %q is not absolute", r.Path)
	}
	if err := k.m.checkPodConfig(r.Config, r.Handler); err != nil {
		return err
	}
	h, err := k.m.handlers.Find(r.Handler)
	if err != nil {
		return err
	}
	mappings, err := oci.UserNamespace(r.Config)
	if err != nil {
		return err
	}
	if err := k.restorePermitted(h.IsBuiltIn(), mappings != nil); err != nil {
		return err
	}
	var names []string
	for _, config := range r.Containers {
		if err := state.CheckContainer(config, r.Config, nil); err != nil {
			return err
		}
		if err := state.CheckRestorable(config); err != nil {
			return err
		}
		name := config.GetMetadata().GetName()
		if name == "" || slices.Contains(names, name) {
			return errdefs.InvalidArgument("container_configs: the name %q is empty or not unique", name)
		}
		names = append(names, name)
	}
	if len(names) == 0 {
		return errdefs.InvalidArgument("container_configs is empty")
	}
	return nil
}

// restorePermitted refuses restores by CRIU that the configuration or the node does not permit.
// mapped says that the pod has a user namespace.
func (k *restorer) restorePermitted(byCRIU, mapped bool) error {
	if !byCRIU {
		return nil
	}
	if err := k.m.cfg.Restores.Permit(mapped); err != nil {
		return err
	}
	// A CRIU without libselinux, such as Debian's, cannot label restored processes. They would run
	// in berth's domain.
	if k.m.node.Host.SELinux {
		return errdefs.FailedPrecondition("this node has SELinux: CRIU may not give restored processes their labels")
	}
	return nil
}

// restorePod creates a pod and its containers from a checkpoint. It runs in a separate goroutine
// and is undone if the caller leaves.
func (k *restorer) restorePod(caller context.Context, r state.RestoreRequest, identity string) (_ string, err error) {
	defer k.m.tasks.BeginUpTo(task.Timeout, "restore", identity)()
	ctx, release := trace.Carry(k.m.tasks.Operations.Context(), caller)
	defer release()
	ctx, cancel := context.WithTimeout(ctx, task.Timeout)
	defer cancel()
	defer context.AfterFunc(caller, cancel)()
	undo := cleanup.New()
	defer undo.Run(&err)
	id := state.NewID()
	undo.Add("remove copy of the checkpoint", func() error { return k.m.trash.Discard(k.m.node.Writable(id)) })
	a, err := k.restores.Import(ctx, r.Path, id)
	if err != nil {
		return "", err
	}
	if err := k.checkHandler(ctx, r.Handler, a.Manifest.Runtime); err != nil {
		return "", err
	}
	names, err := directories(a, r.Containers)
	if err != nil {
		return "", err
	}
	var p *pod
	plan := podPlan{id: id, config: r.Config, handler: r.Handler, restoring: true, ips: savedIPs(a)}
	if a.Manifest.Runtime != "" {
		plan.restore = &state.Restore{Name: names[0], From: r.Path}
	}
	if err := k.m.settleEarlier(ctx, r.Config.Metadata); err != nil {
		return "", err
	}
	err = k.m.tasks.Guard("plan", identity, func() (err error) { p, err = k.m.planPod(ctx, plan); return err })
	if err != nil {
		return "", err
	}
	undo.Release() // the pod owns the copy
	err = k.m.tasks.Guard("restore", identity, func() error { return k.fillPod(ctx, p, r, a, names) })
	if err != nil {
		k.m.abandonPod(p)
		return "", err
	}
	return id, nil
}

// savedIPs returns the addresses that the pod had.
func savedIPs(a *archive.Archive) []netip.Addr {
	if a.Manifest.Pod == nil {
		return nil
	}
	return a.Manifest.Pod.IPs
}

// checkHandler refuses handlers that cannot restore a checkpoint. saved is the version of the
// runtime that has saved a sandbox. It is empty for a checkpoint of CRIU.
func (k *restorer) checkHandler(ctx context.Context, name, saved string) error {
	h, err := k.m.handlers.Find(name)
	if err != nil {
		return err
	}
	if saved == "" {
		if h.IsBuiltIn() {
			return nil
		}
		return errdefs.FailedPrecondition(
			"runtime handler %q cannot restore checkpoints of the built-in handler", name)
	}
	defer k.m.tasks.Begin("probe of the runtime program", "handler "+name)()
	program, err := h.Runtime(ctx, "", k.m.node.SystemdCgroup, false)
	switch {
	case err != nil:
		return err
	case program == nil || !program.Saves():
		return errdefs.FailedPrecondition("runtime handler %q cannot restore a checkpoint of %q", name, saved)
	case program.Version != saved:
		return errdefs.FailedPrecondition("the checkpoint was made by %q, runtime handler %q has %q; the versions must be equal",
			saved, name, program.Version)
	}
	return nil
}

// directories returns the directories of the containers in the checkpoint, in the order of configs.
// It refuses configs of other containers.
func directories(a *archive.Archive, configs []*runtimeapi.ContainerConfig) ([]string, error) {
	var names, have []string
	for _, config := range configs {
		for i := range a.Manifest.Containers {
			if c := &a.Manifest.Containers[i]; c.Name == config.GetMetadata().GetName() {
				names = append(names, a.Manifest.Dir(c))
			}
		}
	}
	for _, c := range a.Manifest.Containers {
		have = append(have, c.Name)
	}
	if len(names) != len(configs) || len(have) != len(configs) {
		return nil, errdefs.InvalidArgument(
			"container_configs must name exactly the containers of the checkpoint, which are %q", have)
	}
	return names, nil
}

// fillPod brings the pod up and creates its containers.
func (k *restorer) fillPod(
	ctx context.Context, p *pod, r state.RestoreRequest, a *archive.Archive, names []string,
) error {
	if p.Mappings != nil && a.Manifest.Runtime != "" {
		return errdefs.FailedPrecondition("a restore of gVisor does not support user namespaces")
	}
	if err := k.m.control.lockPod(ctx, p, "restore", func(p lockedPod) error { return k.m.bringUp(ctx, p) }); err != nil {
		return err
	}
	if err := k.fillShm(ctx, p, a); err != nil {
		return err
	}
	var creations []func() error
	for i, config := range r.Containers {
		plan := containerPlan{config: config, restore: &state.Restore{Name: names[i], From: r.Path}, archive: a}
		creations = append(creations, func() error { return k.createRestored(ctx, p, plan) })
	}
	if err := k.m.tasks.Parallel("create containers of", p.String(), creations...); err != nil {
		return err
	}
	return k.m.control.lockPod(ctx, p, "complete", func(p lockedPod) error {
		if p.Phase() != state.PodReady {
			return notReady(p.pod)
		}
		p.Restoring = false
		return k.m.writePod(ctx, p)
	})
}

// fillShm fills the pod's /dev/shm, which all its containers share. A pod that uses the node's IPC
// namespace has none.
func (k *restorer) fillShm(ctx context.Context, p *pod, a *archive.Archive) error {
	options := p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	if options.GetIpc() == runtimeapi.NamespaceMode_NODE {
		return nil
	}
	return k.restores.FillShm(ctx, p.ID, ".")
}

// createRestored creates a container that continues a checkpoint.
func (k *restorer) createRestored(ctx context.Context, p *pod, plan containerPlan) error {
	sum, err := fingerprintOf(plan.config)
	if err != nil {
		return err
	}
	identity := state.ContainerIdentity(p.ID, plan.config.Metadata)
	_, err = k.m.containerIDs.Create(ctx, identity, sum, maker{
		Spawn:  k.m.tasks.Operations.Spawn,
		Make:   func() (string, error) { return k.m.createContainer(ctx, p, plan, identity) },
		Remove: k.m.replaceContainer,
	})
	if err != nil {
		return createFailed(identity, err)
	}
	return nil
}

// fillContainer compares a container with its checkpoint and fills its writable layer.
func (k *restorer) fillContainer(
	ctx context.Context, c lockedContainer, a *archive.Archive, root rootfs.Spec, runtimeSpec *specs.Spec,
) error {
	if err := k.restores.Compare(ctx, a, c.snapshot(), runtimeSpec); err != nil {
		return err
	}
	if err := k.fillLayer(ctx, c, root); err != nil {
		return err
	}
	c.Filled = true
	return nil
}

func (k *restorer) fillLayer(ctx context.Context, c lockedContainer, root rootfs.Spec) error {
	if err := k.restores.FillLayer(ctx, c.snapshot(), root); err != nil || len(c.Anonymous) == 0 {
		return err
	}
	return k.m.selinux.LabelOwn(k.m.node.Volumes(c.ID), c.Labels)
}

// refillContainer fills the writable layer again, because an interrupted start may have changed it.
func (k *restorer) refillContainer(ctx context.Context, p *pod, c lockedContainer) error {
	if err := k.m.trash.Discard(k.m.node.Writable(c.ID)); err != nil {
		return err
	}
	root, err := k.m.launcher.Root(ctx, p.Info(), c.snapshot())
	if err != nil {
		return err
	}
	return k.fillLayer(ctx, c, root)
}

// dropCheckpoint removes the checkpoint of a container when it is no longer needed. If it fails,
// the files stay until the pod is removed.
func (k *restorer) dropCheckpoint(c *container) {
	if c.Restore == nil {
		return
	}
	if err := k.m.trash.Discard(k.m.node.CheckpointOf(c.PodID, c.Restore)); err != nil {
		k.m.log.Warn("remove the checkpoint of a restored container", "container", c.ID, "error", err)
	}
}

// restoredIn returns the containers of a restored pod. It refuses a pod that another request has
// created.
func (k *restorer) restoredIn(podID string, r state.RestoreRequest) ([]state.Restored, error) {
	p, err := k.m.Pod(podID)
	if err != nil {
		return nil, err
	}
	other := errdefs.AlreadyExists(
		"pod sandbox %s exists and was not made by this request; remove it, or use another attempt", podID)
	if !p.Ready() {
		return nil, other
	}
	var restored []state.Restored
	for _, config := range r.Containers {
		sum, err := fingerprintOf(config)
		if err != nil {
			return nil, err
		}
		for _, c := range k.m.objects.containersOf(podID) {
			had, err := fingerprintOf(c.Config)
			if err != nil {
				return nil, err
			}
			if had == sum && c.Restore != nil && c.Restore.From == r.Path {
				restored = append(restored, state.Restored{Name: config.GetMetadata().GetName(), ID: c.ID})
			}
		}
	}
	if len(restored) != len(r.Containers) {
		return nil, other
	}
	return restored, nil
}
