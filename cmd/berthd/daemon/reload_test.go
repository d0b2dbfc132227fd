package daemon

import (
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/config"
	"berth/internal/errdefs"
	"berth/internal/host"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// A configuration that cannot be read changes nothing.
func TestRefusedReloadKeepsConfiguration(t *testing.T) {
	t.Parallel()
	running := config.Default()
	level := new(slog.LevelVar)
	load := func() (*config.Config, []string, error) {
		c, err := config.Parse("f", []byte("[log]\nlevel = 'loud'\n"))
		return c, nil, err
	}
	var out testutil.Buffer
	r := newReloader(running, load, level, slog.New(slog.NewTextHandler(&out, nil)))
	r.reload(t.Context())
	if r.settings() != any(running) || level.Level() != slog.LevelInfo {
		t.Errorf("settings changed: %+v", r.settings())
	}
	if err := r.apply(t.Context()); err == nil {
		t.Error("a faulty configuration is applied")
	}
}

// A changed cgroup driver is refused while pods of this boot have cgroups of the other one.
func TestCgroupDriverOfPodsIsKept(t *testing.T) {
	t.Parallel()
	bootID, err := host.BootID()
	testutil.Must(t, err)
	for name, tt := range map[string]struct {
		path    string
		refused bool // with systemd; with cgroupfs it is the contrary
	}{
		"cgroupfs": {"/kubepods/pod1/" + state.NewID(), true},
		"systemd":  {"kubepods-pod1.slice:berth:" + state.NewID(), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			cfg := &config.Config{Root: dir + "/root", State: dir + "/state"}
			check := func(systemd, refused bool) {
				t.Helper()
				err := checkDriver(cfg, systemd)
				if refused != (errdefs.Code(err) == codes.FailedPrecondition) || !refused && err != nil {
					t.Errorf("systemd %v: %v", systemd, err)
				}
			}
			check(false, false) // no pod
			check(true, false)
			records, err := state.OpenRecords(cfg.Root, nil)
			testutil.Must(t, err)
			write := func(boot string) {
				t.Helper()
				spec := &state.PodSpec{ID: strings.Repeat("ab", 32), BootID: boot, CgroupsPath: tt.path,
					Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "web"}}}
				status := state.NewPodStatus(state.PodReady)
				testutil.Must(t, records.WritePod(spec, &status))
			}
			write(bootID)
			check(true, tt.refused)
			check(false, !tt.refused)
			write("an earlier boot")
			check(true, false)
			check(false, false)
		})
	}
}

// Requests during a reload are one further reload, and never block.
func TestReloadRequestsCollapse(t *testing.T) {
	t.Parallel()
	r := newReloader(config.Default(), nil, new(slog.LevelVar), testutil.Logger(t))
	for range 5 {
		r.request()
	}
	if n := len(r.requests); n != 1 {
		t.Errorf("%d requests are queued", n)
	}
}
