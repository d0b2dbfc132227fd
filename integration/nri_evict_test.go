package integration

import (
	"context"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
)

// evictor adds evictions to what a plugin says: the protocol has them, the library's stub does not.
type evictor struct{ evict []*api.ContainerEviction }

func (e *evictor) options() stub.Option {
	return stub.WithTTRPCOptions([]ttrpc.ClientOpts{ttrpc.WithUnaryClientInterceptor(e.addToRequest)}, []ttrpc.ServerOpt{ttrpc.WithUnaryServerInterceptor(e.addToAnswer)})
}

func (e *evictor) addToAnswer(ctx context.Context, decode ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, handle ttrpc.Method) (any, error) {
	answer, err := handle(ctx, decode)
	switch answer := answer.(type) {
	case *api.CreateContainerResponse:
		answer.Evict = e.evict
	case *api.UpdateContainerResponse:
		answer.Evict = e.evict
	}
	return answer, err
}

func (e *evictor) addToRequest(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, call ttrpc.Invoker) error {
	if request.Method == "UpdateContainers" {
		more, err := proto.Marshal(&api.UpdateContainersRequest{Evict: e.evict}) // behind another, a message is merged with it
		if err != nil {
			return err
		}
		request.Payload = append(request.Payload, more...)
	}
	return call(ctx, request, response)
}

// A container that a plugin evicts is stopped as kubelet would: with its signal, and all plugins are told. One that there
// is not keeps nobody from anything.
func TestNRIEvictions(t *testing.T) {
	d := harness.StartDaemon(t)
	e := &evictor{}
	p := connectPlugin(t, d, "10", "evictor", &nriPlugin{}, e.options())
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
			e.evict = nil
			c := pod.Run(t, harness.Script("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"))
			c.WaitOutput(t, "ready")
			p.forget()
			e.evict = []*api.ContainerEviction{{ContainerId: "none"}, {ContainerId: c.Id, Reason: "no room"}}
			ask()
			harness.Equal(t, "exit code", c.WaitExited(t).ExitCode, int32(5))
			stopped := "StopContainer " + c.Config.Metadata.Name
			harness.Eventually(t, stopped, func() error { return p.toldOf(stopped) })
		})
	}
}
