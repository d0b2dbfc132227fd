package client

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// Labels of a container that name its pod, set by kubelet and by berth run.
const (
	labelPodName      = "io.kubernetes.pod.name"
	labelPodNamespace = "io.kubernetes.pod.namespace"
)

// PodName returns the name of a container's pod. It is empty if the container's labels lack it.
func PodName(c *runtimeapi.Container) string { return c.GetLabels()[labelPodName] }

// PodNamespace returns the namespace of a container's pod. It is empty if the container's labels
// lack it.
func PodNamespace(c *runtimeapi.Container) string { return c.GetLabels()[labelPodNamespace] }

// PodTitle returns a pod's name for people: namespace/name.
func PodTitle(p *runtimeapi.PodSandbox) string {
	return p.GetMetadata().GetNamespace() + "/" + p.GetMetadata().GetName()
}

// ContainerName returns a container's name for people: pod/name, or the name if the pod is unknown.
func ContainerName(c *runtimeapi.Container) string {
	if pod := PodName(c); pod != "" {
		return pod + "/" + c.GetMetadata().GetName()
	}
	return c.GetMetadata().GetName()
}

// Pods returns all pod sandboxes, newest first.
func (c *Client) Pods(ctx context.Context) ([]*runtimeapi.PodSandbox, error) {
	reply, err := c.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	pods := reply.GetItems()
	sort.SliceStable(pods, func(i, k int) bool { return pods[i].GetCreatedAt() > pods[k].GetCreatedAt() })
	return pods, nil
}

// Containers returns all containers, newest first.
func (c *Client) Containers(ctx context.Context) ([]*runtimeapi.Container, error) {
	reply, err := c.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	list := reply.GetContainers()
	sort.SliceStable(list, func(i, k int) bool { return list[i].GetCreatedAt() > list[k].GetCreatedAt() })
	return list, nil
}

// FindPod returns the pod that ref identifies: its ID, its name, namespace/name, or a prefix of its
// ID with at least shortestPrefix digits. Earlier forms take precedence, so that a name is not
// mistaken for the prefix of another ID.
func (c *Client) FindPod(ctx context.Context, ref string) (*runtimeapi.PodSandbox, error) {
	found, err := c.matchPods(ctx, ref)
	if err != nil {
		return nil, err
	}
	return only("pod", ref, found)
}

// Find returns the container or pod that ref identifies, in the forms of FindPod. The names of a
// container. A name is the container's own name, pod/name or namespace/pod/name. A name identifies
// the newest of several attempts. A reference that matches a container and a pod in the same form
// is ambiguous.
func (c *Client) Find(ctx context.Context, ref string) (*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
	return c.find(ctx, ref, false)
}

// FindForContainer is Find for commands that act on a container. In a pod with a container of the
// same name, the name stands for this container.
func (c *Client) FindForContainer(ctx context.Context, ref string) (
	*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
	return c.find(ctx, ref, true)
}

func (c *Client) find(ctx context.Context, ref string, inner bool) (
	*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
	if ref == "" {
		return nil, nil, errdefs.InvalidArgument("empty reference")
	}
	containers, err := c.matchContainers(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	pods, err := c.matchPods(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case containers.how == nowise && pods.how == nowise:
		return nil, nil, errdefs.NotFound("no container or pod %q", ref)
	case containers.how == pods.how && !(inner && within(containers.items, pods.items)):
		return nil, nil, ambiguous("container or pod", ref,
			append(prefixed("container ", containers.describe()), prefixed("pod ", pods.describe())...))
	case containers.how >= pods.how:
		container, err := only("container", ref, containers)
		return container, nil, err
	}
	pod, err := only("pod", ref, pods)
	return nil, pod, err
}

// within returns whether the only container is in the only pod.
func within(containers []*runtimeapi.Container, pods []*runtimeapi.PodSandbox) bool {
	return len(containers) == 1 && len(pods) == 1 && containers[0].GetPodSandboxId() == pods[0].GetId()
}

func prefixed(prefix string, texts []string) []string {
	for i := range texts {
		texts[i] = prefix + texts[i]
	}
	return texts
}

func (c *Client) matchPods(ctx context.Context, ref string) (matches[*runtimeapi.PodSandbox], error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return matches[*runtimeapi.PodSandbox]{}, err
	}
	return match(ref, pods, podNames), nil
}

func (c *Client) matchContainers(ctx context.Context, ref string) (matches[*runtimeapi.Container], error) {
	list, err := c.Containers(ctx)
	if err != nil {
		return matches[*runtimeapi.Container]{}, err
	}
	return match(ref, list, containerNames), nil
}

// identity has the ID and the names that match compares, the short name first. The second name
// identifies the object in error texts.
type identity struct {
	id    string
	names []string
	group string // objects of one group replace each other; the newest counts
}

func podNames(p *runtimeapi.PodSandbox) identity {
	meta := p.GetMetadata()
	full := meta.GetNamespace() + "/" + meta.GetName()
	return identity{p.GetId(), []string{meta.GetName(), full}, full + "/" + meta.GetUid()}
}

func containerNames(c *runtimeapi.Container) identity {
	name := c.GetMetadata().GetName()
	inPod := PodName(c) + "/" + name
	return identity{c.GetId(), []string{name, inPod, PodNamespace(c) + "/" + inPod}, c.GetPodSandboxId() + "/" + name}
}

// strength ranks the forms of a reference.
type strength int

const (
	nowise strength = iota
	byPrefix
	byName
	byID
)

// shortestPrefix is the minimum length of an ID prefix, so that a name such as "db" does not match
// IDs.
const shortestPrefix = 4

// matches are the objects that a reference matches best.
type matches[T any] struct {
	how      strength
	items    []T
	identify func(T) identity
}

// match finds the objects that ref identifies in items, which are sorted newest first.
func match[T any](ref string, items []T, identify func(T) identity) matches[T] {
	found := matches[T]{identify: identify}
	seen := map[string]bool{}
	for _, item := range items {
		who := identify(item)
		how := who.match(ref)
		switch {
		case how == nowise || how < found.how:
			continue
		case how == byName && seen[who.group]: // an earlier attempt
			continue
		case how > found.how:
			found.how, found.items = how, nil
		}
		seen[who.group] = seen[who.group] || how == byName
		found.items = append(found.items, item)
	}
	return found
}

func (who identity) match(ref string) strength {
	switch {
	case ref == "":
		return nowise
	case who.id == ref:
		return byID
	case slices.Contains(who.names, ref):
		return byName
	case len(ref) >= shortestPrefix && strings.HasPrefix(who.id, ref):
		return byPrefix
	}
	return nowise
}

// describe returns the names of the matches for an error text.
func (m matches[T]) describe() (names []string) {
	for _, item := range m.items {
		who := m.identify(item)
		names = append(names, fmt.Sprintf("%s (%s)", ShortID(who.id), who.names[1]))
	}
	return names
}

// only returns the single match.
func only[T any](kind, ref string, found matches[T]) (T, error) {
	var none T
	switch {
	case ref == "":
		return none, errdefs.InvalidArgument("empty %s reference", kind)
	case len(found.items) == 0:
		return none, errdefs.NotFound("no %s %q", kind, ref)
	case len(found.items) > 1:
		return none, ambiguous(kind, ref, found.describe())
	}
	return found.items[0], nil
}

func ambiguous(kind, ref string, candidates []string) error {
	return errdefs.InvalidArgument("%s %q is ambiguous: %s", kind, ref, strings.Join(candidates, ", "))
}

// ShortID returns the part of an ID that commands show.
func ShortID(id string) string {
	const short = 12
	id = strings.TrimPrefix(id, "sha256:")
	if len(id) > short {
		return id[:short]
	}
	return id
}
