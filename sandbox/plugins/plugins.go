// Package plugins is what pods and containers have to do with NRI plugins: these are asked, told, and what they want of
// containers is seen to.
//
// # Contract
//
// Plugins are called with the turn of the object that the call is about, so that they see what happens to it
// in its order, and under a Hold, which is a lock: who has one takes no turn and looks at no file that a user named.
// How long each plugin may take is bounded by the request timeout. What they want of other containers is done after the
// Hold, where nobody has a turn that it needs; what they do not know of an object yet they are told when they register.
package plugins

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
	"berth/internal/task"
)

// Plugins see pods and containers and change them; *nri.Plugins is the real one, and has the
// documentation. Nothing but Start, Close and Hold is called while Hold says that there are none.
type Plugins interface {
	Start(context.Context, nri.Runtime) error
	Close()
	Hold() (release func(), active bool)
	Pod(ctx context.Context, event nri.PodEvent, pod *nri.Pod) error
	Container(ctx context.Context, event nri.ContainerEvent, pod *nri.Pod, c *nri.Container) ([]nri.Update, error)
	CreateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container) (*nri.Adjustment, nri.Update, []nri.Update, error)
	UpdateContainer(ctx context.Context, pod *nri.Pod, c *nri.Container, wanted *runtimeapi.LinuxContainerResources) (nri.Update, []nri.Update, error)
}

// None is where NRI is off.
type None struct{ Plugins }

func (None) Start(context.Context, nri.Runtime) error { return nil }
func (None) Close()                                   {}
func (None) Hold() (release func(), active bool)      { return func() {}, false }

// Runtime is what can be done to containers for plugins.
type Runtime interface {
	// Objects returns all pods, and the containers whose end plugins have not been told of. It is called under a hold.
	Objects() ([]*nri.Pod, []*nri.Container)
	// Update changes a container's limits, with its turn, for which it waits until ctx ends. Plugins are not asked again.
	Update(ctx context.Context, u nri.Update) error
	// CheckContainer tells whether there is such a container: NotFound.
	CheckContainer(id string) error
	// StopContainer stops a container, with its turn.
	StopContainer(ctx context.Context, id string, timeout time.Duration) error
}

// Pod and Container describe objects to plugins, if there are any. They look at no file.
type (
	Pod       func() *nri.Pod
	Container func() (*nri.Pod, *nri.Container, error)
)

// Kit is what is needed to deal with plugins.
type Kit struct {
	Plugins Plugins
	Runtime Runtime
	Tasks   *task.Runner
	Log     *slog.Logger
}

// PresentPod asks the plugins about a pod that is about to be published. No plugin is told of the
// state of things until release is called, which is never nil. presented: they were asked.
func (k Kit) PresentPod(ctx context.Context, pod Pod) (release func(), presented bool, err error) {
	release, active := k.Plugins.Hold()
	if !active {
		return release, false, nil
	}
	p := pod()
	if err := k.Plugins.Pod(ctx, nri.RunPod, p); err != nil {
		return release, true, fmt.Errorf("run pod %s: %w", p.ID, err)
	}
	return release, true, nil
}

// TellOfPod tells plugins what happened to a pod. What they answer changes nothing about it.
func (k Kit) TellOfPod(ctx context.Context, event nri.PodEvent, pod Pod) {
	release, active := k.Plugins.Hold()
	defer release()
	if !active {
		return
	}
	p := pod()
	if err := k.Plugins.Pod(ctx, event, p); err != nil {
		k.Log.Warn("an NRI plugin failed", "pod", p.ID, "event", event, "error", err)
	}
}

// AskAboutPod lets plugins refuse what pod wants.
func (k Kit) AskAboutPod(ctx context.Context, pod Pod) error {
	release, active := k.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	p := pod()
	if err := k.Plugins.Pod(ctx, nri.UpdatePod, p); err != nil {
		return fmt.Errorf("update pod sandbox %s: %w", p.ID, err)
	}
	return nil
}

// Changes is what plugins want changed when a container is created.
type Changes struct {
	Adjustment *nri.Adjustment
	Own        nri.Update   // of its resources
	Others     []nri.Update // once release was called: who has the turn of one may be waiting for a registration, and that for release
}

// PresentContainer lets the plugins change a container that is about to be published. No plugin is told of the state of
// things until release is called, which is never nil. Without plugins there are no changes: nil.
func (k Kit) PresentContainer(ctx context.Context, c Container) (release func(), presented bool, changes *Changes, err error) {
	release, active := k.Plugins.Hold()
	if !active {
		return release, false, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return release, true, nil, err
	}
	changes = &Changes{}
	changes.Adjustment, changes.Own, changes.Others, err = k.Plugins.CreateContainer(ctx, pod, container)
	if err != nil {
		return release, true, nil, err
	}
	return release, true, changes, nil
}

// AskToStart asks the plugins about a container that is about to be started.
func (k Kit) AskToStart(ctx context.Context, c Container) error {
	release, active := k.Plugins.Hold()
	defer release()
	if !active {
		return nil
	}
	pod, container, err := c()
	if err != nil {
		return err
	}
	_, err = k.Plugins.Container(ctx, nri.StartContainer, pod, container)
	return err
}

// AskToUpdate asks the plugins about an update of the container with that ID, and returns the update to be made and
// what is to be done to others.
func (k Kit) AskToUpdate(ctx context.Context, id string, wanted *runtimeapi.LinuxContainerResources, c Container) (nri.Update, []nri.Update, error) {
	release, active := k.Plugins.Hold()
	defer release()
	if !active {
		return nri.Update{ContainerID: id, Resources: wanted}, nil, nil
	}
	pod, container, err := c()
	if err != nil {
		return nri.Update{}, nil, err
	}
	return k.Plugins.UpdateContainer(ctx, pod, container, wanted)
}

// TellOfContainer tells plugins what happened to the container with that ID. What they answer changes nothing
// about it; others that they want updated are updated afterwards. told is called at the end, under the hold, with and without
// plugins.
func (k Kit) TellOfContainer(ctx context.Context, event nri.ContainerEvent, id string, c Container, told func()) {
	release, active := k.Plugins.Hold()
	defer release()
	defer told()
	if !active {
		return
	}
	pod, container, err := c()
	var updates []nri.Update
	if err == nil {
		updates, err = k.Plugins.Container(ctx, event, pod, container)
	}
	if err != nil {
		k.Log.Warn("an NRI plugin failed", "container", id, "event", event, "error", err)
	}
	k.UpdateLater(updates)
}
