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

// DefaultGrace is the grace period of a pod without a known manifest.
const DefaultGrace = 30 * time.Second

// Stop stops a pod's containers and then the pod, as Run does at its end. For a detached pod of
// Run, whose manifest it finds by uid below dir, it runs the hooks and uses the manifest's grace
// period. A grace of at least 0 replaces that period.
func Stop(ctx context.Context, c *client.Client, pod *runtimeapi.PodSandbox, dir string, grace time.Duration) error {
	manifest, err := loadManifest(dir, pod.GetMetadata().GetUid())
	if err != nil {
		return err
	}
	list, err := runningIn(ctx, c, pod.GetId(), manifest)
	if err != nil {
		return err
	}
	host := "127.0.0.1"
	if state, err := c.PodState(ctx, pod.GetId()); err == nil && len(client.PodIPs(state)) > 0 {
		host = client.PodIPs(state)[0]
	}
	if err := newStopper(ctx, c, graceOf(manifest, grace), hooks{c, host}).stop(list); err != nil {
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

// runningIn returns the running containers of a pod, oldest first, each with its part of the
// manifest if known.
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
	for i := len(containers) - 1; i >= 0; i-- { // the list is newest first
		if containers[i].GetState() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			list = append(list, running{containers[i].GetId(), known[containers[i].GetMetadata().GetName()]})
		}
	}
	return list, nil
}
