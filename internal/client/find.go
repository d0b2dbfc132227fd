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

// FindPod returns the pod that ref means: its ID, a unique prefix of it, its
// name, or namespace/name. An error is NotFound or, for more than one match,
// InvalidArgument and names them.
func (c *Client) FindPod(ctx context.Context, ref string) (*runtimeapi.PodSandbox, error) {
	pods, err := c.Pods(ctx)
	if err != nil {
		return nil, err
	}
	return pick("pod", ref, pods, podNames)
}

// FindContainer returns the container that ref means: its ID, a unique prefix of
// it, its name, or pod/name. Of several attempts of one container a name means
// the newest. Errors are as FindPod's.
func (c *Client) FindContainer(ctx context.Context, ref string) (*runtimeapi.Container, error) {
	list, err := c.Containers(ctx)
	if err != nil {
		return nil, err
	}
	return pick("container", ref, list, containerNames)
}

// Find returns the container or, if there is none, the pod that ref means.
// Exactly one of the results is not nil unless err is.
func (c *Client) Find(ctx context.Context, ref string) (*runtimeapi.Container, *runtimeapi.PodSandbox, error) {
	container, err := c.FindContainer(ctx, ref)
	if err == nil || !errdefs.IsNotFound(err) {
		return container, nil, err
	}
	pod, err := c.FindPod(ctx, ref)
	if errdefs.IsNotFound(err) {
		err = errdefs.NotFound("no container or pod %q", ref)
	}
	return nil, pod, err
}

// identity is what pick matches against: the short name first, then the full one.
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

// pick finds the one item that ref means; items are sorted newest first.
func pick[T any](kind, ref string, items []T, identify func(T) identity) (T, error) {
	var none T
	if ref == "" {
		return none, errdefs.InvalidArgument("empty %s reference", kind)
	}
	byID, byName := match(ref, items, identify)
	found := byID
	if len(found) == 0 {
		found = byName
	}
	switch len(found) {
	case 0:
		return none, errdefs.NotFound("no %s %q", kind, ref)
	case 1:
		return found[0], nil
	}
	var candidates []string
	for _, item := range found {
		who := identify(item)
		candidates = append(candidates, fmt.Sprintf("%s (%s)", ShortID(who.id), who.names[1]))
	}
	return none, errdefs.InvalidArgument("%s %q is ambiguous: %s", kind, ref, strings.Join(candidates, ", "))
}

// match returns the items whose ID begins with ref (only the one that equals it,
// if any does), and the newest of each group that bears the name.
func match[T any](ref string, items []T, identify func(T) identity) (byID, byName []T) {
	seen := map[string]bool{}
	for _, item := range items {
		who := identify(item)
		if who.id == ref {
			return []T{item}, nil
		}
		if strings.HasPrefix(who.id, ref) {
			byID = append(byID, item)
		}
		if (who.names[0] == ref || who.names[1] == ref) && !seen[who.group] {
			seen[who.group] = true
			byName = append(byName, item)
		}
	}
	return byID, byName
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
