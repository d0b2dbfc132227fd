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
	"berth/sandbox/plugins"
	"berth/sandbox/state"
)

// containerManager has no pods, and just enough for containers that have no process. Their records
// are in records.
func containerManager(t *testing.T) (m *Manager, records string) {
	t.Helper()
	root := t.TempDir()
	dir, err := state.OpenRecords(root, func(string, string) func() { return func() {} })
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	m = &Manager{log: log, objects: newObjects(),
		records: dir, tasks: task.NewRunner(log, nil)}
	m.plugins = plugins.Caller{Plugins: plugins.None{}, Runtime: pluginRuntime{m}, Tasks: m.tasks, Log: log}
	m.Lists, m.events = state.NewLists(m.pods, m.containers)
	return m, filepath.Join(root, "containers")
}

// addContainer publishes a container.
func addContainer(m *Manager, id, podID string, phase state.Phase) *container {
	c := newContainer(&state.ContainerSpec{ID: id, PodID: podID, CreatedAt: time.Unix(1, 0),
		Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: id}}}, state.NewContainerStatus(phase), nil)
	c.info.Store(c.unshared().snapshot())
	m.containers.Put(id, c)
	return c
}

// An update is merged into the resources in force, recorded, and then published.
func TestContainerUpdate(t *testing.T) {
	m, records := containerManager(t)
	c := addContainer(m, "c", "p", state.ContainerCreated)
	before := c.info.Load()
	update := func(r *runtimeapi.LinuxContainerResources) error {
		return m.UpdateContainerResources(t.Context(), "c", r)
	}
	if err := update(shares(512)); err != nil {
		t.Fatal(err)
	}
	if err := update(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	if got := c.info.Load().Resources; got.GetCpuShares() != 512 || got.GetMemoryLimitInBytes() != 64<<20 {
		t.Errorf("published: %v", got)
	}
	if before.Resources.GetCpuShares() != 0 {
		t.Error("a snapshot was changed")
	}

	kept, info := c.unshared().Resources, c.info.Load()
	if err := os.Rename(records, records+".away"); err != nil { // nothing can be written there
		t.Fatal(err)
	}
	if err := update(shares(1024)); err == nil {
		t.Error("an update that can't be recorded succeeds")
	}
	if c.info.Load() != info || kept.GetCpuShares() != 512 || c.unshared().Resources != kept {
		t.Errorf("it is in force: %v", c.info.Load().Resources)
	}
}

func TestWhatCanBeUpdated(t *testing.T) {
	m, _ := containerManager(t)
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

// A plugin that registers learns of all objects except exits that others already know.
func TestObjectsForPlugins(t *testing.T) {
	m, _ := containerManager(t)
	addContainer(m, "created", "p", state.ContainerCreated)
	addContainer(m, "exited", "p", state.ContainerExited)
	unnotified := addContainer(m, "exited, unnotified", "p", state.ContainerExited)
	told := make(chan struct{})
	unnotified.stopNotified.Store(&told)
	addContainer(m, "half made", "p", state.ContainerCreated).info.Store(nil)
	half := newPod(&state.PodSpec{ID: "half made"}, state.NewPodStatus(state.PodStarting), nil)
	ready := newPod(&state.PodSpec{ID: "ready", CgroupsPath: "/kubepods/ready"}, state.NewPodStatus(state.PodReady), nil)
	ready.info.Store(ready.unshared().snapshot())
	m.pods.Put(half.ID, half)
	m.pods.Put(ready.ID, ready)

	pods, containers := pluginRuntime{m}.Objects()
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
	if err := (pluginRuntime{m}).Update(t.Context(), nri.Update{ContainerID: "half made"}); errdefs.Code(err) != codes.NotFound {
		t.Errorf("a container that nobody knows of: %v", err)
	}
	m.tellOfContainer(t.Context(), nri.ContainerStopped, unnotified.unshared())
	select {
	case <-told:
	default:
		t.Error("who waits for plugins to be told waits on")
	}
	if err := m.waitNotified(t.Context(), unnotified); err != nil {
		t.Error(err)
	}
}

// kubelet takes the newest attempt for the current one. So each attempt is created after the
// earlier ones, even if the clock was set back.
func TestCreationAfterEarlierAttempts(t *testing.T) {
	m, _ := containerManager(t)
	future := time.Now().Add(time.Hour)
	addContainer(m, "c", "p", state.ContainerExited).CreatedAt = future
	if got := m.containerCreation("p"); !got.After(future) {
		t.Errorf("a container is created at %v, before the last one", got)
	}
	if got := m.containerCreation("q"); got.After(future) {
		t.Errorf("another pod's containers count: %v", got)
	}
	metadata := func(name string) *runtimeapi.PodSandboxMetadata {
		return &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "n", Uid: "u"}
	}
	m.pods.Put("p", &pod{PodSpec: &state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{Metadata: metadata("web")}, CreatedAt: future}})
	if got := m.podCreation(metadata("web")); !got.After(future) {
		t.Errorf("a pod is created at %v, before its last attempt", got)
	}
	if got := m.podCreation(metadata("db")); got.After(future) {
		t.Errorf("another pod counts: %v", got)
	}
}
