package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
	"berth/internal/task"
)

// Plugins is implemented by *nri.Plugins, which documents the methods. While Hold returns false,
// only Start, Close and Hold may be called.
type Plugins interface {
	Start(context.Context, nri.Runtime) error
	Close()
	Hold() (release func(), active bool)
	Pod(ctx context.Context, event nri.PodEvent, pod *nri.Pod) error
	Container(ctx context.Context, event nri.ContainerEvent, pod *nri.Pod, c *nri.Container) ([]nri.Update, error)
	CreateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container) (*nri.Adjustment, nri.Update, []nri.Update, error)
	UpdateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container,
		wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error)
}

// noPlugins implements Plugins when NRI is disabled.
type noPlugins struct{ Plugins }

func (noPlugins) Start(context.Context, nri.Runtime) error { return nil }
func (noPlugins) Close()                                   {}
func (noPlugins) Hold() (release func(), active bool)      { return func() {}, false }

// pluginTarget gives plugins access to pods and containers.
type pluginTarget interface {
	// Objects returns all pods, and all containers whose exit has not been reported to plugins. It
	// is called during a hold.
	Objects() ([]*nri.Pod, []*nri.Container)
	// Update changes a container's limits. It waits for the container's lock until ctx ends. It
	// does not call plugins again.
	Update(ctx context.Context, u nri.Update) error
	// CheckContainer returns NotFound unless the container exists.
	CheckContainer(id string) error
	// StopContainer stops a container. It takes the container's lock.
	StopContainer(ctx context.Context, id string, timeout time.Duration) error
}

// podDescriber and containerDescriber describe objects to plugins. They are called only if plugins
// exist, and open no file.
type (
	podDescriber       func() *nri.Pod
	containerDescriber func() (*nri.Pod, *nri.Container, error)
)

// pluginCaller calls NRI plugins at the steps of a pod's and container's lifecycle, and applies the
// updates that they request.
//
// The caller holds the lock of the pod or container of a call, so plugins see its events in order.
// Each call prevents registrations of new plugins (Plugins.Hold). During a hold no code may take
// the lock of a pod or container, or open a file that a user named. The request timeout limits each
// plugin's answer. Updates of other containers are applied after the hold, without the caller's
// locks. A plugin that registers gets the present state of all objects.
type pluginCaller struct {
	Plugins Plugins
	Target  pluginTarget
	Tasks   *task.Runner
	Log     *slog.Logger
}

// PresentPod calls plugins with a pod that is about to be published. New plugins cannot register
// until release is called. release is never nil. presented reports that plugins were called.
func (s pluginCaller) PresentPod(ctx context.Context, pod podDescriber) (release func(), presented bool, err error) {
	release, active := s.Plugins.Hold()
	if !active {
		return release, false, nil
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, nri.RunPod, p); err != nil {
		return release, true, fmt.Errorf("run pod %s: %w", p.ID, err)
	}
	return release, true, nil
}

// NotifyPod reports an event of a pod to plugins. Their answers do not affect the pod.
func (s pluginCaller) NotifyPod(ctx context.Context, event nri.PodEvent, pod podDescriber) {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, event, p); err != nil {
		s.Log.Warn("NRI plugin failed", "pod", p.ID, "event", event, "error", err)
	}
}

// RequestPodUpdate asks plugins for permission to update a pod.
func (s pluginCaller) RequestPodUpdate(ctx context.Context, pod podDescriber) error {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	p := pod()
	if err := s.Plugins.Pod(ctx, nri.UpdatePod, p); err != nil {
		return fmt.Errorf("update pod sandbox %s: %w", p.ID, err)
	}
	return nil
}

// pluginChanges are the changes that plugins request when a container is created.
type pluginChanges struct {
	Adjustment *nri.Adjustment
	Own        nri.Update   // of the new container's resources
	Others     []nri.Update // to apply after release: a lock holder may wait for a registration, which waits for release
}

// PresentContainer lets plugins change a container that is about to be published. New plugins
// cannot register until release is called. release is never nil. changes is nil without plugins.
func (s pluginCaller) PresentContainer(ctx context.Context, c containerDescriber) (
	release func(), presented bool, changes *pluginChanges, err error) {
	release, active := s.Plugins.Hold()
	if !active {
		return release, false, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return release, true, nil, err
	}
	changes = &pluginChanges{}
	changes.Adjustment, changes.Own, changes.Others, err = s.Plugins.CreateContainer(ctx, pod, container)
	if err != nil {
		return release, true, nil, err
	}
	return release, true, changes, nil
}

// RequestStart asks plugins for permission to start a container.
func (s pluginCaller) RequestStart(ctx context.Context, c containerDescriber) error {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	pod, container, err := c()
	if err != nil {
		return err
	}
	_, err = s.Plugins.Container(ctx, nri.StartContainer, pod, container)
	return err
}

// RequestUpdate calls plugins with the update of a container. It returns the update to apply and
// the updates of other containers.
func (s pluginCaller) RequestUpdate(ctx context.Context, id string, wanted *runtimeapi.LinuxContainerResources,
	c containerDescriber) (nri.Update, []nri.Update, error) {
	release, active := s.Plugins.Hold()
	defer release()
	if !active {
		return nri.Update{ContainerID: id, Resources: wanted}, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return nri.Update{}, nil, err
	}
	return s.Plugins.UpdateContainer(ctx, pod, container, wanted)
}

// NotifyContainer reports an event of a container to plugins. Their answers do not affect the
// container. Updates of other containers are applied in the background. It calls done before the
// hold ends, even without plugins.
func (s pluginCaller) NotifyContainer(
	ctx context.Context, event nri.ContainerEvent, id string, c containerDescriber, done func(),
) {
	release, active := s.Plugins.Hold()
	defer release()
	defer done()
	if !active {
		return
	}
	pod, container, err := c()
	var updates []nri.Update
	if err == nil {
		updates, err = s.Plugins.Container(ctx, event, pod, container)
	}
	if err != nil {
		s.Log.Warn("NRI plugin failed", "container", id, "event", event, "error", err)
	}
	s.UpdateLater(updates)
}
