package sandbox

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/nri"
	"berth/internal/testutil"
)

// changingPlugins change each new container as adjustment and own say.
type changingPlugins struct {
	fakePlugins
	adjustment *nri.Adjustment
	own        nri.Update
}

func (f *changingPlugins) CreateContainer(
	context.Context, *nri.Pod, *nri.Container,
) (*nri.Adjustment, nri.Update, []nri.Update, error) {
	return f.adjustment, f.own, nil, nil
}

// A container's spec is built when it is planned, and again only after plugins have changed the
// container. The start uses it, unless something has changed since.
func TestSpecIsBuiltOnce(t *testing.T) {
	limits := &runtimeapi.LinuxContainerResources{CpuShares: 512}
	for name, test := range map[string]struct {
		plugins *changingPlugins // nil: none
		target  bool             // it joins the PID namespace of another container
		before  func(t *testing.T, m *Manager, id string)
		builds  []string
		planned bool
	}{
		"usual":                   {nil, false, nil, []string{"validate"}, true},
		"plugins change nothing":  {&changingPlugins{}, false, nil, []string{"validate"}, true},
		"plugins adjust":          {&changingPlugins{adjustment: &nri.Adjustment{}}, false, nil, []string{"validate", "spec"}, true},
		"plugins set limits":      {&changingPlugins{own: nri.Update{Resources: limits}}, false, nil, []string{"validate", "spec"}, true},
		"target's PID namespace":  {nil, true, nil, []string{"validate"}, false},
		"updated before start":    {nil, false, update(limits), []string{"validate"}, false},
		"of an earlier daemon":    {nil, false, forgetPlanned, []string{"validate"}, false},
		"start is refused before": {nil, false, refuseStart, []string{"validate"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
				if test.plugins != nil {
					test.plugins.journal = new(journal)
					m.plugins.caller.Plugins = test.plugins
				}
				pod := runPod(t, m)
				config := containerConfig()
				if test.target {
					other := startContainer(t, m, pod)
					config.Metadata.Name = "debugger"
					config.Linux = &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
						NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: other}}}
				}
				f.forget()
				id, err := m.CreateContainer(t.Context(), pod, config, nil)
				testutil.Must(t, err)
				if test.before != nil {
					test.before(t, m, id)
				}
				testutil.Must(t, m.StartContainer(t.Context(), id))
				builds := slices.DeleteFunc(slices.Clone(f.calls), func(call string) bool { return call != "validate" && call != "spec" })
				if !slices.Equal(builds, test.builds) || (f.planned != nil) != test.planned {
					t.Errorf("built by %q, planned at the start: %t", builds, f.planned != nil)
				}
			})
		})
	}
}

// A volume that hangs after plugins have changed the container does not keep the hold. Otherwise a
// plugin could not register, and all pods would wait for the registration.
func TestHangingVolumeEndsHold(t *testing.T) {
	withFakes(t, func(t *testing.T, m *Manager, f *fakeHost) {
		plugins := &changingPlugins{fakePlugins: fakePlugins{journal: new(journal)}, adjustment: &nri.Adjustment{}}
		m.plugins.caller.Plugins = plugins
		pod := runPod(t, m)
		plugins.entries, f.hangs = nil, true
		began := time.Now()
		_, err := m.CreateContainer(t.Context(), pod, containerConfig(), nil)
		testutil.WantError(t, err, codes.DeadlineExceeded, "mount of /data")
		if took := time.Since(began); took != describeTimeout {
			t.Errorf("the hold took %v", took)
		}
		if len(plugins.entries) < 2 || plugins.entries[0] != "hold" || plugins.entries[1] != "release" {
			t.Errorf("calls: %q", plugins.entries)
		}
	})
}

func update(limits *runtimeapi.LinuxContainerResources) func(*testing.T, *Manager, string) {
	return func(t *testing.T, m *Manager, id string) {
		testutil.Must(t, m.UpdateContainerResources(t.Context(), id, limits))
	}
}

// forgetPlanned leaves the record only, as a restart of the daemon does.
func forgetPlanned(_ *testing.T, m *Manager, id string) {
	c, _ := m.objects.containers.Get(id)
	c.planned = nil
}

// refuseStart fails before the launch.
func refuseStart(t *testing.T, m *Manager, id string) {
	host := m.launcher.(*fakeHost)
	host.failing("record container starting", 1)
	wantFailure(t, m.StartContainer(t.Context(), id))
}
