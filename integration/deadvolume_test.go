package integration

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/moody"
)

// A container with a volume whose server is dead can't be created: that ends with the caller's time, shows among the waits, and one look
// at the volume hangs, however often it is tried. Its pod can be removed meanwhile, nothing of it is left, and other pods are well.
func TestContainersOfADeadVolume(t *testing.T) {
	volume := moody.NewVolume(t)
	d := harness.StartDaemon(t)
	defer volume.Answer()
	dead := harness.Mount(&runtimeapi.Mount{HostPath: volume.Path(), ContainerPath: "/v", SelinuxRelabel: true})
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	for _, in := range []*harness.Pod{pod, pod, other} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		config := in.ContainerConfig(dead)
		config.Image = &runtimeapi.ImageSpec{Image: d.Pull(t, harness.BaseImage)}
		_, err := d.Cri.CreateContainer(ctx, in.Id, config, in.Config)
		cancel()
		harness.WantCode(t, err, codes.DeadlineExceeded)
	}
	volume.AwaitAsked(t, 1)
	looks := func() (looks, waiting int) {
		for _, w := range waitsOf(t, harness.Get(d.Cri.Status(t.Context(), true))(t).Info) {
			switch {
			case w.What == "it to answer" && w.Object == "volume "+volume.Path():
				looks++
			case w.What == "its volumes to answer":
				waiting++
			}
		}
		return looks, waiting
	}
	if hang, waiting := looks(); hang != 1 || waiting != 3 {
		t.Errorf("%d looks hang, want 1; %d containers wait, want 3", hang, waiting)
	}
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	harness.Equal(t, "what a container of another pod prints", other.Sh(t, "echo fine"), "fine\n")
	d.StateMatches(t)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), other.Id))
	if hang, waiting := looks(); hang != 1 || waiting != 0 {
		t.Errorf("when the pods were removed %d looks hang, want 1, for the volume is dead still; %d containers wait, want 0", hang, waiting)
	}
}
