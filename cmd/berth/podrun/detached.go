package podrun

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/client"
	"berth/cmd/berth/podyaml"
)

// DefaultGrace is the grace period of pods whose manifest is not known.
const DefaultGrace = 30 * time.Second

// Stop stops a pod's containers and then the pod, as Run would at its end: for a
// detached pod of ours with the hooks and the grace period of its manifest, which
// is found by uid below dir. grace replaces that period unless it is negative.
// When ctx ends, what still runs is killed.
func Stop(ctx context.Context, c *client.Client, pod *runtimeapi.PodSandbox, dir string, grace time.Duration) error {
	manifest, err := loadManifest(dir, pod.GetMetadata().GetUid())
	if err != nil {
		return err
	}
	list, err := runningIn(ctx, c, pod.GetId(), manifest)
	if err != nil {
		return err
	}
	if err := newStopper(ctx, c, graceOf(manifest, grace)).stop(list); err != nil {
		return err
	}
	return c.StopPod(context.WithoutCancel(ctx), pod.GetId())
}

func graceOf(manifest *corev1.Pod, wanted time.Duration) time.Duration {
	switch {
	case wanted >= 0:
		return wanted
	case manifest != nil:
		return grace(manifest)
	}
	return DefaultGrace
}

// runningIn lists the running containers of a pod, oldest first, each with its
// part of the manifest if there is one.
func runningIn(ctx context.Context, c *client.Client, podID string, manifest *corev1.Pod) ([]running, error) {
	containers, err := c.ContainersOf(ctx, podID)
	if err != nil {
		return nil, fmt.Errorf("containers of pod %s: %w", client.ShortID(podID), err)
	}
	known := map[string]podyaml.Container{}
	if manifest != nil {
		for _, m := range (&podyaml.Plan{Pod: manifest}).Containers() {
			known[m.Name] = m
		}
	}
	var list []running
	for i := len(containers) - 1; i >= 0; i-- { // they come newest first
		if containers[i].GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			list = append(list, running{containers[i].GetId(), known[containers[i].GetMetadata().GetName()]})
		}
	}
	return list, nil
}
