package statecheck

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/image"
	"berth/sandbox/state"
)

// Views: CRI's lists have the recorded pods, containers and images, with the recorded states and
// images. The other calls agree with the lists.

// views are the daemon's answers. If err is set, the other fields are empty.
type views struct {
	err        error
	pods       map[string]*runtimeapi.PodSandbox
	containers map[string]*runtimeapi.Container
	images     map[string]*runtimeapi.Image
	statuses   map[string]*runtimeapi.ContainerStatus
	podStates  map[string]runtimeapi.PodSandboxState
	resolved   map[string]string // image reference of a container → image ID
	pulls      int               // in progress
	busy       int               // number of waiting clients
}

func (v *views) isReady(id string) bool {
	return v.pods[id].GetState() == runtimeapi.PodSandboxState_SANDBOX_READY && v.pods[id] != nil
}

func (v *views) runs(id string) bool {
	return v.containers[id].GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING
}

// viewTimeout bounds the wait for an answer. The daemon answers from memory.
const viewTimeout = 10 * time.Second

// readViews asks the daemon. A daemon that does not answer is a difference, not an error.
func (f *facts) readViews(ctx context.Context) error {
	if f.daemon == 0 {
		return nil
	}
	asking, cancel := context.WithTimeout(ctx, viewTimeout)
	defer cancel()
	v, err := askViews(asking, f.node.Socket, f.node.Root)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	f.views = v
	if err != nil {
		f.views = &views{err: err, pulls: 1} // its current work is unknown
	}
	return nil
}

// ofRoot returns a check whether the daemon uses this root, because a machine may run several
// daemons.
func ofRoot(root string) func(context.Context, *client.Client) error {
	return func(ctx context.Context, c *client.Client) error {
		told, err := c.Settings(ctx)
		if err != nil {
			return err
		}
		var its struct{ Root string }
		if err := json.Unmarshal(told, &its); err != nil {
			return fmt.Errorf("verbose Status contains no root: %w", err)
		}
		if filepath.Clean(its.Root) != filepath.Clean(root) {
			return fmt.Errorf("the daemon there has the root %s, not %s; set --listen to the socket of the other",
				its.Root, root)
		}
		return nil
	}
}

func askViews(ctx context.Context, socket, root string) (_ *views, err error) {
	c, err := client.Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer c.Close() // no call is in progress
	v := &views{
		pods:       map[string]*runtimeapi.PodSandbox{},
		containers: map[string]*runtimeapi.Container{},
		images:     map[string]*runtimeapi.Image{},
		statuses:   map[string]*runtimeapi.ContainerStatus{},
		podStates:  map[string]runtimeapi.PodSandboxState{},
		resolved:   map[string]string{},
	}
	for _, ask := range []func(context.Context, *client.Client) error{ofRoot(root), v.askLists, v.askStatuses, v.askWork} {
		if err := ask(ctx, c); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (v *views) askLists(ctx context.Context, c *client.Client) error {
	pods, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	for _, p := range pods.GetItems() {
		v.pods[p.Id] = p
	}
	containers, err := c.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return err
	}
	for _, c := range containers.GetContainers() {
		v.containers[c.Id] = c
	}
	images, err := c.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	if err != nil {
		return err
	}
	for _, i := range images.GetImages() {
		v.images[i.Id] = i
	}
	return nil
}

// askStatuses asks for the status of each object. It skips objects removed since the list.
func (v *views) askStatuses(ctx context.Context, c *client.Client) error {
	for id := range v.pods {
		reply, err := c.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
		if err == nil {
			v.podStates[id] = reply.GetStatus().GetState()
		} else if ctx.Err() != nil {
			return err
		}
	}
	for id := range v.containers {
		reply, err := c.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		if err == nil {
			v.statuses[id] = reply.GetStatus()
		} else if ctx.Err() != nil {
			return err
		}
	}
	for id, i := range v.images {
		for _, name := range slices.Concat(i.RepoTags, i.RepoDigests, []string{id}) {
			reply, err := c.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: name}})
			if err != nil {
				return err
			}
			v.resolved[name] = reply.GetImage().GetId()
		}
	}
	return nil
}

// askWork asks for the operations in progress.
func (v *views) askWork(ctx context.Context, c *client.Client) error {
	status, err := c.RuntimeServiceClient.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return err
	}
	for key, count := range map[string]*int{"pulls": &v.pulls, "waits": &v.busy} {
		var list []json.RawMessage
		if err := json.Unmarshal([]byte(status.GetInfo()[key]), &list); err != nil {
			return fmt.Errorf("verbose Status contains no %s: %w", key, err)
		}
		*count = len(list)
	}
	return nil
}

func compareViews(f *facts, d *finder) {
	v := f.views
	if v == nil {
		return
	}
	if v.err != nil {
		d.differ("the daemon", "an answer at "+f.node.Socket, "%v", v.err)
		return
	}
	for id, p := range f.pods {
		f.comparePodView(d, p, v.pods[id])
	}
	for id, c := range f.containers {
		f.compareContainerView(d, c, v.containers[id])
	}
	for id, i := range f.images {
		f.compareImageView(d, i, v.images[id])
	}
	unrecorded(d, "pod ", v.pods, f.pods)
	unrecorded(d, "container ", v.containers, f.containers)
	unrecorded(d, "image ", v.images, f.images)
}

// unrecorded reports listed objects without a record.
func unrecorded[V, R any](d *finder, kind string, listed map[string]V, recorded map[string]R) {
	for id := range listed {
		if _, ok := recorded[id]; !ok {
			d.differ(kind+id, "a record, since it is listed", "none")
		}
	}
}

func (f *facts) comparePodView(d *finder, p *state.FoundPod, listed *runtimeapi.PodSandbox) {
	name := podName(p.ID)
	switch {
	case listed == nil:
		if p.Stage == state.Running || p.Stage == state.Ended {
			d.differ(name, "it in ListPodSandbox", "no such pod")
		}
		return
	case p.Stage == state.BeingMade:
		d.differ(name, "hidden until it is created", "it in ListPodSandbox")
	case f.views.isReady(p.ID) != (f.podRuns(p) && f.alive(p.PausePID, p.PauseStart) != nil) &&
		p.Stage != state.BeingRemoved:
		d.differ(name, fmt.Sprintf("a state that matches its record (%s) and its pause", p.Stage), "%s", listed.State)
	}
	if state, ok := f.views.podStates[p.ID]; ok && state != listed.State {
		d.differ(name, "the same state in ListPodSandbox and PodSandboxStatus", "%s and %s", listed.State, state)
	}
	if got, want := listed.GetMetadata(), p.Config.GetMetadata(); got.GetUid() != want.GetUid() ||
		got.GetName() != want.GetName() ||
		got.GetNamespace() != want.GetNamespace() ||
		got.GetAttempt() != want.GetAttempt() {
		d.differ(name, fmt.Sprintf("the identity %s in ListPodSandbox", want), "%s", got)
	}
}

// states are the states that a client may see, by the stage in a container's record.
var states = map[state.Stage][]runtimeapi.ContainerState{
	state.Created: {runtimeapi.ContainerState_CONTAINER_CREATED},
	state.Running: {
		runtimeapi.ContainerState_CONTAINER_CREATED, // being launched
		runtimeapi.ContainerState_CONTAINER_RUNNING,
	},
	state.Ended: {runtimeapi.ContainerState_CONTAINER_EXITED},
}

func (f *facts) compareContainerView(d *finder, c *state.FoundContainer, listed *runtimeapi.Container) {
	name := containerName(c.ID)
	may, whole := states[c.Stage]
	switch {
	case listed == nil:
		if whole {
			d.differ(name, "it in ListContainers", "no such container")
		}
		return
	case c.Stage == state.BeingMade:
		d.differ(name, "hidden until it is created", "it in ListContainers")
	case whole && !slices.Contains(may, listed.State):
		d.differ(name, fmt.Sprintf("a state that matches its record (%s)", c.Stage), "%s", listed.State)
	}
	if listed.PodSandboxId != c.PodID {
		d.differ(name, "the pod "+c.PodID+" in ListContainers", "%s", listed.PodSandboxId)
	}
	if listed.ImageRef != c.ImageRef || listed.ImageId != c.ImageID {
		d.differ(name, fmt.Sprintf("the image %s (%s) in ListContainers", c.ImageID, c.ImageRef),
			"%s (%s)", listed.ImageId, listed.ImageRef)
	}
	status := f.views.statuses[c.ID]
	if status == nil {
		return
	}
	if status.State != listed.State {
		d.differ(name, "the same state in ListContainers and ContainerStatus", "%s and %s", listed.State, status.State)
	}
	if status.ImageRef != c.ImageRef || status.ImageId != c.ImageID {
		d.differ(name, fmt.Sprintf("the image %s (%s) in ContainerStatus", c.ImageID, c.ImageRef), "%s (%s)",
			status.ImageId,
			status.ImageRef)
	}
}

func (f *facts) compareImageView(d *finder, i *image.Recorded, listed *runtimeapi.Image) {
	name := "image " + i.ID
	if listed == nil {
		d.differ(name, "it in ListImages", "no such image")
		return
	}
	want, got := slices.Sorted(slices.Values(f.tagsOf(i))), slices.Sorted(slices.Values(listed.RepoTags))
	if !slices.Equal(want, got) {
		d.differ(name, fmt.Sprintf("the tags [%s] in ListImages", strings.Join(want, ", ")),
			"[%s]", strings.Join(got, ", "))
	}
	for _, ref := range slices.Concat(listed.RepoTags, listed.RepoDigests, []string{i.ID}) {
		if got, asked := f.views.resolved[ref]; asked && got != i.ID {
			d.differ(name, "ImageStatus to find it by "+ref, "%q", got)
		}
	}
}

// tagsOf returns the tags of an image, without tags that an image with a later record has.
// A tag moves when its new owner's record is written.
func (f *facts) tagsOf(i *image.Recorded) []string {
	var tags []string
	for _, tag := range i.Tags {
		moved := false
		for _, other := range f.images {
			moved = moved || other.Sequence > i.Sequence && slices.Contains(other.Tags, tag)
		}
		if !moved {
			tags = append(tags, tag)
		}
	}
	return tags
}
