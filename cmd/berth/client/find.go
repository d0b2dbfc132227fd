package client

import (
	"context"
	"fmt"
	"sort"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// labelPodName is the label in which kubelet and berth keep the pod's name of a container.
const labelPodName = "io.kubernetes.pod.name"

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

// FindPod returns the pod that ref means: its ID, its name, namespace/name, or the first digits of its ID, at
// least shortestPrefix of them. The earlier in this list the stronger: a name is not taken for the beginning of another's
// ID. An error is NotFound or, for more than one match, InvalidArgument and names them.
func (c *Client) FindPod(ctx context.Context, ref string) (*runtimeapi.PodSandbox, error) {
	found, err := c.matchPods(ctx, ref)
	if err != nil {
		return nil, err
	}
	return only("pod", ref, found)
}

// FindContainer returns the container that ref means, as FindPod does; names are its own, or pod/name. Of several
// attempts of one container a name means the newest.
func (c *Client) FindContainer(ctx context.Context, ref string) (*runtimeapi.Container, error) {
	found, err := c.matchContainers(ctx, ref)
	if err != nil {
		return nil, err
	}
	return only("container", ref, found)
}

// Find returns the container or, if none is meant as strongly, the pod that ref means.
// Exactly one of the results is not nil unless err is.
func (c *Client) Find(ctx context.Context, ref string) (*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
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
	case containers.how == byPrefix && pods.how == byPrefix:
		return nil, nil, ambiguous("container or pod", ref, append(containers.describe(), pods.describe()...))
	case containers.how >= pods.how:
		container, err := only("container", ref, containers)
		return container, nil, err
	}
	pod, err := only("pod", ref, pods)
	return nil, pod, err
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

// identity is what match compares with: the short name first, then the full one.
type identity struct {
	id    string
	names [2]string
	group string // things of one group replace each other, the newest counts
}

func podNames(p *runtimeapi.PodSandbox) identity {
	meta := p.GetMetadata()
	full := meta.GetNamespace() + "/" + meta.GetName()
	return identity{p.GetId(), [2]string{meta.GetName(), full}, full + "/" + meta.GetUid()}
}

func containerNames(c *runtimeapi.Container) identity {
	name := c.GetMetadata().GetName()
	return identity{c.GetId(), [2]string{name, c.GetLabels()[labelPodName] + "/" + name}, c.GetPodSandboxId() + "/" + name}
}

// strength is how a reference means something.
type strength int

const (
	nowise strength = iota
	byPrefix
	byName
	byID
)

// shortestPrefix is how many digits of an ID stand for it. Names like "db" and "ad" are not to hit what is called otherwise.
const shortestPrefix = 4

// matches are the things that a reference means most strongly.
type matches[T any] struct {
	how      strength
	items    []T
	identify func(T) identity
}

// match finds what ref means among items, which are sorted newest first.
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
	case who.names[0] == ref || who.names[1] == ref:
		return byName
	case len(ref) >= shortestPrefix && strings.HasPrefix(who.id, ref):
		return byPrefix
	}
	return nowise
}

// describe names the matches for people.
func (m matches[T]) describe() (names []string) {
	for _, item := range m.items {
		who := m.identify(item)
		names = append(names, fmt.Sprintf("%s (%s)", ShortID(who.id), who.names[1]))
	}
	return names
}

// only returns the one match.
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

// ShortID is the part of an ID that is shown to people.
func ShortID(id string) string {
	const short = 13
	id = strings.TrimPrefix(id, "sha256:")
	if len(id) > short {
		return id[:short]
	}
	return id
}
