package integration

import (
	"testing"

	"github.com/containerd/nri/pkg/api"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
)

// A container that a plugin evicts gets its stop signal, and all plugins get the event. The
// eviction of an unknown container has no effect.
func TestNRIEvictions(t *testing.T) {
	d := harness.StartDaemon(t)
	e := &fixture.Evictor{}
	p := connectPlugin(t, d, "10", "evictor", &nriPlugin{}, e.Option())
	pod := d.RunPod(t, harness.HostNetwork)
	updated := pod.Run(t)
	for name, ask := range map[string]func(){
		"with a creation": func() { pod.Run(t) },
		"with an update": func() {
			harness.Must(t, d.Cri.UpdateContainerResources(t.Context(), updated.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}}))
		},
		"by itself": func() { harness.Get(p.stub.UpdateContainers(nil))(t) },
	} {
		t.Run(name, func(t *testing.T) {
			e.Evict = nil
			c := pod.Run(t, harness.Script("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"))
			c.WaitOutput(t, "ready")
			p.forget()
			e.Evict = []*api.ContainerEviction{{ContainerId: "none"}, {ContainerId: c.Id, Reason: "no room"}}
			ask()
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, int32(5))
			stopped := "StopContainer " + c.Config.Metadata.Name
			harness.Eventually(t, stopped, func() error { return p.received(stopped) })
		})
	}
}
