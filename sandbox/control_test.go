package sandbox

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/sandbox/state"
)

// Plugins reach containers through control only. A failed request of a plugin changes nothing.
func TestPluginRequests(t *testing.T) {
	limit := func(id string, shares int64) func(pluginRuntime, *testing.T) error {
		return func(r pluginRuntime, t *testing.T) error {
			return r.Update(t.Context(), nri.Update{ContainerID: id, Resources: &runtimeapi.LinuxContainerResources{CpuShares: shares}})
		}
	}
	stop := func(id string) func(pluginRuntime, *testing.T) error {
		return func(r pluginRuntime, t *testing.T) error { return r.StopContainer(t.Context(), id, time.Second) }
	}
	for name, test := range map[string]struct {
		failing string
		request func(pluginRuntime, *testing.T) error
		code    codes.Code
		shares  int64 // published
	}{
		"update":              {"", limit("created", 512), codes.OK, 512},
		"update of unknown":   {"", limit("unknown", 512), codes.NotFound, 0},
		"unrecorded update":   {"record container created", limit("created", 512), codes.Unavailable, 0},
		"check of unknown":    {"", func(r pluginRuntime, _ *testing.T) error { return r.CheckContainer("unknown") }, codes.NotFound, 0},
		"stop of unknown":     {"", stop("unknown"), codes.OK, 0},
		"stop of not started": {"stop", stop("created"), codes.OK, 0},
	} {
		t.Run(name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				c := addContainer(m, "created", "p", state.ContainerCreated)
				f.failing(test.failing, 1)
				if err := test.request(pluginRuntime{m.control}, t); errdefs.Code(err) != test.code {
					t.Errorf("%v, want code %v", err, test.code)
				}
				if got := c.info.Load().Resources.GetCpuShares(); got != test.shares {
					t.Errorf("published: %d shares, want %d", got, test.shares)
				}
			})
		})
	}
}
