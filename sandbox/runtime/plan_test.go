package runtime

import (
	"log/slog"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/task"
	"berth/internal/userns"
	"berth/oci/confine"
	"berth/sandbox/handler"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// testLauncher returns a launcher on a host without security modules.
func testLauncher() Launcher {
	log := slog.New(slog.DiscardHandler)
	tasks := task.NewRunner(log, nil)
	dirs := state.Dirs{Root: "/root", State: "/state"}
	return Launcher{Node: state.Node{Dirs: dirs}, Roots: Roots{Dirs: dirs},
		AppArmor: fakeProfiles{}, PauseDir: "/root/bin/pause", Tasks: tasks}
}

// A pause is plain if it is the embedded one and needs only features that its program supports.
func TestPlanPause(t *testing.T) {
	t.Parallel()
	k := testLauncher()
	mappings := []specs.LinuxIDMapping{{HostID: 65536, Size: 65536}}
	users := []*runtimeapi.IDMapping{{HostId: 65536, Length: 65536}}
	for name, test := range map[string]struct {
		change func(*state.PodSpec, *runtimeapi.LinuxSandboxSecurityContext)
		want   proto.PauseKind
	}{
		"usual":       {func(*state.PodSpec, *runtimeapi.LinuxSandboxSecurityContext) {}, proto.PlainPause},
		"pause image": {func(p *state.PodSpec, _ *runtimeapi.LinuxSandboxSecurityContext) { p.PauseImage = &state.Image{} }, proto.ContainerPause},
		"OCI runtime": {func(p *state.PodSpec, _ *runtimeapi.LinuxSandboxSecurityContext) { p.Runtime = &handler.Runtime{} }, proto.ContainerPause},
		"user namespace": {func(p *state.PodSpec, sc *runtimeapi.LinuxSandboxSecurityContext) {
			p.Mappings = &userns.Mappings{UIDs: mappings, GIDs: mappings}
			sc.NamespaceOptions = &runtimeapi.NamespaceOption{UsernsOptions: &runtimeapi.UserNamespace{Uids: users, Gids: users}}
		}, proto.ContainerPause},
		"SELinux labels": {func(p *state.PodSpec, _ *runtimeapi.LinuxSandboxSecurityContext) {
			p.Labels = confine.Labels{Process: "system_u:system_r:container_t:s0", Mount: "system_u:object_r:container_file_t:s0"}
		}, proto.ContainerPause},
		"too many groups": {func(_ *state.PodSpec, sc *runtimeapi.LinuxSandboxSecurityContext) {
			for group := range int64(proto.MaxPauseGroups + 1) {
				sc.SupplementalGroups = append(sc.SupplementalGroups, 1000+group)
			}
		}, proto.ContainerPause},
		"node's PID namespace": {func(_ *state.PodSpec, sc *runtimeapi.LinuxSandboxSecurityContext) {
			sc.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_NODE}
		}, proto.PlainPause},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sc := &runtimeapi.LinuxSandboxSecurityContext{}
			p := &state.PodSpec{ID: "p", NetNS: "/netns/p", Tmpfs: true,
				Config: &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: sc}}}
			test.change(p, sc)
			got, spec, err := k.PlanPause(t.Context(), &state.Pod{PodSpec: p})
			if got != test.want || err != nil || (spec == nil) != (p.PauseImage != nil) {
				t.Errorf("%q, %v; want %q", got, err, test.want)
			}
		})
	}
}

// PlanPause refuses a pod whose pause cannot be described.
func TestPlanPauseRefuses(t *testing.T) {
	t.Parallel()
	p := &state.PodSpec{ID: "p", NetNS: "/netns/p", Config: &runtimeapi.PodSandboxConfig{Hostname: "a b"}}
	if _, _, err := testLauncher().PlanPause(t.Context(), &state.Pod{PodSpec: p}); errdefs.Code(err) != codes.InvalidArgument {
		t.Errorf("got %v, want InvalidArgument", err)
	}
}
