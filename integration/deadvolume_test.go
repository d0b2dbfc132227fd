package integration

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/harness"
)

// If a volume's server is dead, CreateContainer returns at the caller's deadline, and the daemon's
// list of waits shows the call. Repeated attempts block only one stat of the volume. Meanwhile the
// pod can be removed without leftovers, and other pods work.
func TestCreateWithDeadVolumeEndsAtDeadline(t *testing.T) {
	volume := faults.NewVolume(t)
	d := harness.StartDaemon(t)
	defer volume.Answer()
	dead := harness.Mount(&runtimeapi.Mount{HostPath: volume.Path(), ContainerPath: "/v", SelinuxRelabel: true})
	pod, other := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	looks := func() (looks, waiting int) {
		for _, w := range waitsOf(t, harness.Get(d.Cri.Status(t.Context(), true))(t).Info) {
			switch {
			case w.What == "answer" && w.Object == "volume "+volume.Path():
				looks++
			case w.What == "answer of volumes":
				waiting++
			}
		}
		return looks, waiting
	}
	image := d.Pull(t, harness.BaseImage)
	for i, in := range []*harness.Pod{pod, pod, other} {
		ctx, giveUp := context.WithCancel(t.Context())
		config := in.ContainerConfig(dead)
		config.Image = &runtimeapi.ImageSpec{Image: image}
		ended := make(chan error, 1)
		go func() { _, err := d.Cri.CreateContainer(ctx, in.Id, config, in.Config); ended <- err }()
		harness.Eventually(t, "CreateContainer waits for its volume", func() error {
			if hang, waiting := looks(); hang != 1 || waiting != i+1 {
				return fmt.Errorf("%d lookups hang, want 1; %d containers wait, want %d", hang, waiting, i+1)
			}
			return nil
		})
		giveUp()
		harness.WantCode(t, <-ended, codes.Canceled)
	}
	volume.AwaitLookups(t, 1)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), pod.Id))
	harness.Equal(t, "output of a container of another pod", other.Sh(t, "echo fine"), "fine\n")
	d.StateMatches(t)
	harness.Must(t, d.Cri.RemovePodSandbox(t.Context(), other.Id))
	if hang, waiting := looks(); hang != 1 || waiting != 0 {
		t.Errorf("after the removal of the pods %d lookups hang, want 1; %d containers wait, want 0", hang, waiting)
	}
}
