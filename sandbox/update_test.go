package sandbox

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/nri"
	"berth/internal/task"
	"berth/internal/testutil"
	"berth/sandbox/state"
)

// managerWithRecords returns a manager with real records below root and no parts of the host.
func managerWithRecords(t *testing.T) (m *Manager, root string) {
	t.Helper()
	root = t.TempDir()
	records, err := state.OpenRecords(root, func(string, string) func() { return func() {} })
	testutil.Must(t, err)
	log := slog.New(slog.DiscardHandler)
	return newManager(Config{Log: log}, &parts{records: records}, task.NewRunner(log, nil)), root
}

// addContainer publishes a container.
func addContainer(m *Manager, id, podID string, phase state.Phase) *container {
	c := newContainer(&state.ContainerSpec{ID: id, PodID: podID, CreatedAt: time.Unix(1, 0),
		Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: id}}}, state.NewContainerStatus(phase))
	c.info.Store(c.unshared().snapshot())
	m.objects.containers.Put(id, c)
	return c
}

// An update is merged into the resources in force, recorded, and then published.
func TestUpdateIsMergedAndPublished(t *testing.T) {
	m, root := managerWithRecords(t)
	records := filepath.Join(root, "containers")
	c := addContainer(m, "c", "p", state.ContainerCreated)
	before := c.info.Load()
	update := func(r *runtimeapi.LinuxContainerResources) error {
		return m.UpdateContainerResources(t.Context(), "c", r)
	}
	testutil.Must(t, update(shares(512)))
	testutil.Must(t, update(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}))
	if got := c.info.Load().Resources; got.GetCpuShares() != 512 || got.GetMemoryLimitInBytes() != 64<<20 {
		t.Errorf("published: %v", got)
	}
	if before.Resources.GetCpuShares() != 0 {
		t.Error("a snapshot was changed")
	}

	kept, info := c.unshared().Resources, c.info.Load()
	testutil.Must(t, os.Rename(records, records+".away")) // writes fail from here on
	if err := update(shares(1024)); err == nil {
		t.Error("an update that cannot be recorded succeeded")
	}
	if c.info.Load() != info || kept.GetCpuShares() != 512 || c.unshared().Resources != kept {
		t.Errorf("the failed update was published: %v", c.info.Load().Resources)
	}
}

func TestUpdateErrorsByPhase(t *testing.T) {
	m, _ := managerWithRecords(t)
	for phase, want := range map[state.Phase]codes.Code{
		state.ContainerCreated: codes.OK, state.ContainerRunning: codes.OK,
		state.ContainerStarting: codes.FailedPrecondition, state.ContainerExited: codes.FailedPrecondition, state.Removing: codes.FailedPrecondition, state.Removed: codes.NotFound,
	} {
		c := addContainer(m, "c", "p", phase)
		if err := checkUpdatable(c.unshared()); errdefs.Code(err) != want {
			t.Errorf("%s: %v, want %v", phase, err, want)
		}
	}
	addContainer(m, "c", "p", state.ContainerCreated)
	bad := &runtimeapi.LinuxContainerResources{CpusetCpus: "no numbers"}
	for id, want := range map[string]codes.Code{"c": codes.InvalidArgument, "unknown": codes.NotFound} {
		if err := m.UpdateContainerResources(t.Context(), id, bad); errdefs.Code(err) != want {
			t.Errorf("%s: %v, want %v", id, err, want)
		}
	}
}

// A plugin that registers gets all published objects, except exits that were already notified.
func TestObjectsForPlugins(t *testing.T) {
	m, _ := managerWithRecords(t)
	addContainer(m, "created", "p", state.ContainerCreated)
	addContainer(m, "exited", "p", state.ContainerExited)
	unnotified := addContainer(m, "exited, unnotified", "p", state.ContainerExited)
	notified := make(chan struct{})
	unnotified.stopNotified.Store(&notified)
	addContainer(m, "unpublished", "p", state.ContainerCreated).info.Store(nil)
	unpublished := newPod(&state.PodSpec{ID: "unpublished"}, state.NewPodStatus(state.PodStarting), nil)
	ready := newPod(&state.PodSpec{ID: "ready", CgroupsPath: "/kubepods/ready"}, state.NewPodStatus(state.PodReady), nil)
	ready.info.Store(ready.unshared().snapshot())
	m.objects.pods.Put(unpublished.ID, unpublished)
	m.objects.pods.Put(ready.ID, ready)

	pods, containers := pluginRuntime{m.control}.Objects()
	if len(pods) != 1 || pods[0].ID != "ready" || pods[0].CgroupsPath != "/kubepods/ready" {
		t.Errorf("pods: %v", pods)
	}
	var ids []string
	for _, c := range containers {
		ids = append(ids, c.ID)
	}
	if slices.Sort(ids); fmt.Sprint(ids) != "[created exited, unnotified]" {
		t.Errorf("containers: %q", ids)
	}
	if err := (pluginRuntime{m.control}).Update(t.Context(), nri.Update{ContainerID: "unpublished"}); errdefs.Code(err) != codes.NotFound {
		t.Errorf("update of an unpublished container: %v", err)
	}
	m.plugins.NotifyContainer(t.Context(), nri.ContainerStopped, unnotified.unshared())
	select {
	case <-notified:
	default:
		t.Error("a waiter for the notification was not released")
	}
	testutil.Must(t, m.control.waitNotified(t.Context(), unnotified))
}

// kubelet treats the newest attempt as the current one. A new attempt therefore gets a later
// creation time than the earlier ones, even if the clock was set back.
func TestCreationAfterEarlierAttempts(t *testing.T) {
	m, _ := managerWithRecords(t)
	future := time.Now().Add(time.Hour)
	addContainer(m, "c", "p", state.ContainerExited).CreatedAt = future
	if got := m.objects.containerCreation("p"); !got.After(future) {
		t.Errorf("container creation time %v is before the last container's", got)
	}
	if got := m.objects.containerCreation("q"); got.After(future) {
		t.Errorf("creation time depends on another pod's containers: %v", got)
	}
	metadata := func(name string) *runtimeapi.PodSandboxMetadata {
		return &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "n", Uid: "u"}
	}
	m.objects.pods.Put("p", &pod{PodSpec: &state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{Metadata: metadata("web")}, CreatedAt: future}})
	if got := m.objects.podCreation(metadata("web")); !got.After(future) {
		t.Errorf("pod creation time %v is before the last attempt's", got)
	}
	if got := m.objects.podCreation(metadata("db")); got.After(future) {
		t.Errorf("creation time depends on another pod: %v", got)
	}
}
