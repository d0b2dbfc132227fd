package crash

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cni/berthnet/rules"
	"berth/integration/harness"
	"berth/integration/machine"
)

// operation is a request that changes something, with its preparations.
type operation struct {
	name    string
	more    bool // a variant that only the complete enumeration runs
	prepare func(*testing.T, *world)
	request func(*testing.T, *world) error
	again   []retry                               // kubelet's other ways to repeat the request
	daemon  func(*testing.T) harness.DaemonOption // options of the daemon; nil: none
	// dead, if not nil, checks the machine while there is no daemon. restarted checks it before the
	// request is repeated.
	dead, restarted func(*testing.T, *world)
	first           *point // if not nil, the daemon is killed here first, and the next one at each point of its start and recovery

	// spoil, if not nil, damages the state of a daemon that was killed while idle. The next daemon
	// is killed at each point of its start. The request follows.
	spoil func(*testing.T, *world)
	named string // part of the differences that berth check --state reports permanently after spoil
}

// ofStart reports whether the daemon is killed at the points of its start.
func (o operation) ofStart() bool { return o.first != nil || o.spoil != nil }

// retry is kubelet's next request after the daemon's restart.
type retry struct {
	name    string
	request func(*testing.T, *world) error
}

func (o operation) retries() []retry {
	same := []retry{{"same", later(o.request)}}
	if !everything {
		return same
	}
	return append(same, o.again...)
}

// later repeats a request while its host port is in use, as kubelet does. A pod whose creation was
// interrupted holds the port until the new daemon has undone the creation in the background. The
// first other result is returned.
func later(request func(*testing.T, *world) error) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) (err error) {
		t.Helper()
		harness.Eventually(t, "the host port is free", func() error {
			if err = request(t, w); status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), rules.ErrInUse.Error()) {
				return err
			}
			return nil
		})
		return err
	}
}

var (
	anotherPod       = []retry{{"next-attempt", runNextPod}}
	anotherContainer = []retry{{"next-attempt", createNext}}
	startAnother     = []retry{{"next-attempt", startNext}}
)

var operations = []operation{
	{name: "RunPodSandbox", prepare: withPod(hostPort), request: runPod, again: anotherPod},
	{name: "RunPodSandbox_hostNetwork", prepare: withPod(harness.HostNetwork), request: runPod, again: anotherPod, more: true},
	{name: "RunPodSandbox_userNamespace", prepare: withPod(podInUserNamespace), request: runPod, again: anotherPod, more: true},

	{name: "CreateContainer", prepare: with(podRuns(hostPort), withContainer()), request: createContainer, again: anotherContainer},
	{name: "CreateContainer_userNamespace_imageVolume", prepare: with(podRuns(podInUserNamespace), withContainer(containerInUserNamespace, imageVolume)),
		request: createContainer, again: anotherContainer, more: true},

	{name: "StartContainer", prepare: with(podRuns(hostPort), withContainer(), created), request: startContainer, again: startAnother},
	{name: "StartContainer_userNamespace_imageVolume", prepare: with(podRuns(podInUserNamespace), withContainer(containerInUserNamespace, imageVolume), created),
		request: startContainer, again: startAnother, more: true},

	{name: "StopContainer", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: stopContainer(30)},
	{name: "StopContainer_kill", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: stopContainer(0), more: true},

	{name: "StopPodSandbox", prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: stopPod},
	{name: "StopPodSandbox_userNamespace_imageVolume", prepare: with(podRuns(podInUserNamespace), withContainer(exitsOnTerm, containerInUserNamespace, imageVolume), started),
		request: stopPod, more: true},

	{name: "RemoveContainer", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removeContainer},
	{name: "RemoveContainer_exited", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started, stopped), request: removeContainer, more: true},
	{name: "RemoveContainer_writableCgroups", prepare: with(podRuns(harness.SharedPID), withContainer(writableCgroups, exitsInInnerCgroup), started), request: removeContainer, more: !machine.Cgroup2()},
	{name: "RemoveContainer_created", prepare: with(podRuns(podInUserNamespace), withContainer(containerInUserNamespace, imageVolume), created), request: removeContainer, more: true},

	{name: "RemovePodSandbox", prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: removePod},
	{name: "RemovePodSandbox_stopped", prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started, podStopped), request: removePod, more: true},
	{name: "RemovePodSandbox_userNamespace", prepare: podRuns(podInUserNamespace), request: removePod, more: true},

	{name: "PullImage", prepare: nothing, request: pull(first)},
	{name: "PullImage_breaks_off", prepare: nothing, request: failPull},
	{name: "PullImage_rest", prepare: do(failPull), request: pullRest},
	{name: "PullImage_shared_layers", prepare: has(first), request: pull(second), more: true},
	{name: "PullImage_moved_tag", prepare: with(has(first), moveTag), request: pullTag, more: true},

	{name: "RemoveImage", prepare: has(first), request: removeImage(first)},
	{name: "RemoveImage_shared_layers", prepare: with(has(first), has(second)), request: removeImage(first), more: true},
	{name: "Recovery_of_RunPodSandbox", first: &point{"cni.result-saved", 1}, prepare: withPod(hostPort), request: runPod, more: true},
	{name: "Recovery_of_RunPodSandbox_userNamespace", first: &point{"launch.sent", 1}, prepare: withPod(podInUserNamespace), request: runPod, more: true},
	{name: "Recovery_of_CreateContainer", first: &point{"rootfs.owner-set", 1}, prepare: with(podRuns(hostPort), withContainer()), request: createContainer, more: true},
	{name: "Recovery_of_StartContainer", first: &point{"launch.sent", 1}, prepare: with(podRuns(hostPort), withContainer(), created), request: startContainer, more: true},
	{name: "Recovery_of_StopPodSandbox", first: &point{"container.killed", 1}, prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: stopPod, more: true},
	{name: "Recovery_of_RemoveContainer", first: &point{"trash.taken", 1}, prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removeContainer, more: true},
	{name: "Recovery_of_RemovePodSandbox", first: &point{"trash.taken", 1}, prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: removePod, more: true},
	{name: "Recovery_of_PullImage", first: &point{"layer.synced", 2}, prepare: nothing, request: pull(first), more: true},
	{name: "Recovery_of_PullImage_breaks_off", first: &point{"partial.opened", 1}, prepare: nothing, request: failPull, more: true},
	{name: "Recovery_of_RemoveImage", first: &point{"record.removed", 1}, prepare: has(first), request: removeImage(first), more: true},

	{name: "Exec_session", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: execSession, more: true},
	{name: "Attach_session", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm, harness.WithStdin(false)), started), request: attachSession, more: true},

	{name: "RemoveImage_in_use", prepare: with(has(first), podRuns(harness.HostNetwork), withContainer(imageVolume), created), request: removeImage(first), more: true},
}

// world holds the objects of a case.
type world struct {
	d         *harness.Daemon
	pod       *runtimeapi.PodSandboxConfig
	handler   string // handler of the pod; empty: the default handler
	container *runtimeapi.ContainerConfig
	podID, id string

	checkpoint string // directory of a checkpoint
}

func nothing(*testing.T, *world) {}

// crun is the handler of pods whose containers are created by crun.
const crun = "crun"

func byCrun(_ *testing.T, w *world) { w.handler = crun }

// shim is the handler of pods whose containers containerd's shim for runc runs.
const shim = "shim"

func byShim(_ *testing.T, w *world) { w.handler = shim }

func with(steps ...func(*testing.T, *world)) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		for _, step := range steps {
			step(t, w)
		}
	}
}

// --- pods ---------------------------------------------------------------------

// withPod sets the configuration of the pod, which is the same in each case.
func withPod(options ...harness.PodOption) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		w.pod = w.d.PodConfig(t, append([]harness.PodOption{w.named("pod", "uid")}, options...)...)
	}
}

// named gives a pod the same names in each case.
func (w *world) named(name, uid string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Metadata.Name, c.Metadata.Uid, c.Hostname = name, uid, name
		c.LogDirectory, c.Linux.CgroupParent = filepath.Join(w.d.LogDir, uid), w.d.CgroupParent(uid)
	}
}

func podRuns(options ...harness.PodOption) func(*testing.T, *world) {
	return with(withPod(options...), do(runPod))
}

func do(request func(*testing.T, *world) error) func(*testing.T, *world) {
	return func(t *testing.T, w *world) { harness.Must(t, request(t, w)) }
}

var (
	hostPort   = harness.HostPort(18080, 80, runtimeapi.Protocol_TCP)
	created    = do(createContainer)
	stopped    = do(stopContainer(30))
	podStopped = do(stopPod)
)

func runPod(t *testing.T, w *world) (err error) {
	w.podID, err = w.d.Cri.RunPodSandbox(t.Context(), w.pod, w.handler)
	return err
}

// runNextPod acts as kubelet does after it has listed the pods. It keeps a ready pod; otherwise it
// stops the pod and runs the next attempt.
func runNextPod(t *testing.T, w *world) error {
	var old []string
	for _, p := range harness.Get(w.d.Cri.ListPodSandbox(t.Context(), nil))(t) {
		if p.State == runtimeapi.PodSandboxState_SANDBOX_READY {
			w.podID = p.Id
			return nil
		}
		old = append(old, p.Id)
		if err := w.d.Cri.StopPodSandbox(t.Context(), p.Id); err != nil {
			return err
		}
	}
	w.pod.Metadata.Attempt++
	if err := later(runPod)(t, w); err != nil {
		return err
	}
	for _, id := range old {
		if err := w.d.Cri.RemovePodSandbox(t.Context(), id); err != nil {
			return err
		}
	}
	return nil
}

func stopPod(t *testing.T, w *world) error { return w.d.Cri.StopPodSandbox(t.Context(), w.podID) }

func removePod(t *testing.T, w *world) error { return w.d.Cri.RemovePodSandbox(t.Context(), w.podID) }

// podInUserNamespace is a pod with hostUsers: false.
func podInUserNamespace(c *runtimeapi.PodSandboxConfig) {
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userNamespace()
}

func userNamespace() *runtimeapi.UserNamespace {
	const first, length = 3 << 16, 1 << 16
	ids := []*runtimeapi.IDMapping{{HostId: first, ContainerId: 0, Length: length}}
	return &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: ids, Gids: ids}
}

// --- containers ---------------------------------------------------------------

// withContainer sets the configuration of the container, which is the same in each case.
func withContainer(options ...harness.ContainerOption) func(*testing.T, *world) {
	return func(t *testing.T, w *world) {
		w.d.EnsureImage(t, harness.BaseImage)
		pod := &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}
		w.container = pod.ContainerConfig(append([]harness.ContainerOption{harness.ContainerNamed("c")}, options...)...)
		for _, m := range w.container.Mounts {
			if m.Image != nil {
				w.d.EnsureImage(t, m.Image.Image)
			}
		}
		w.nameLog(t)
	}
}

// nameLog names the log as kubelet does, and makes its directory.
func (w *world) nameLog(t *testing.T) {
	t.Helper()
	w.container.LogPath = filepath.Join("c", string(rune('0'+w.container.Metadata.Attempt))+".log")
	harness.Must(t, os.MkdirAll(filepath.Join(w.pod.LogDirectory, "c"), 0o755))
}

// exitsOnTerm is a container that exits on SIGTERM. Its processes stay the same until then.
func exitsOnTerm(c *runtimeapi.ContainerConfig) {
	harness.Script("trap 'exit 7' TERM; sleep 100000 & echo ready; wait")(c)
}

func containerInUserNamespace(c *runtimeapi.ContainerConfig) {
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = userNamespace()
}

// writableCgroups lets the container make cgroups, on cgroup v2.
func writableCgroups(c *runtimeapi.ContainerConfig) {
	if machine.Cgroup2() {
		c.Linux.SecurityContext.CgroupMountMode = runtimeapi.CgroupMountMode_CGROUP_MOUNT_MODE_READ_WRITE
	}
}

// exitsInInnerCgroup is exitsOnTerm in a cgroup that the container makes, if it can.
func exitsInInnerCgroup(c *runtimeapi.ContainerConfig) {
	exitsOnTerm(c)
	c.Command[2] = "mkdir -p /sys/fs/cgroup/a/b && echo $$ >/sys/fs/cgroup/a/b/cgroup.procs; " + c.Command[2]
}

func imageVolume(c *runtimeapi.ContainerConfig) {
	c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/v", Readonly: true, Image: &runtimeapi.ImageSpec{Image: images().first}})
}

func terminal(c *runtimeapi.ContainerConfig) { c.Tty = true }

func createContainer(t *testing.T, w *world) (err error) {
	w.id, err = w.d.Cri.CreateContainer(t.Context(), w.podID, w.container, w.pod)
	return err
}

// createNext acts as kubelet does when it lists a container that was not started. It creates the
// next attempt and removes the old container with its log.
func createNext(t *testing.T, w *world) error {
	old := harness.Get(w.d.Cri.ListContainers(t.Context(), nil))(t)
	log := filepath.Join(w.pod.LogDirectory, w.container.LogPath)
	if len(old) > 0 {
		w.container.Metadata.Attempt++
		w.nameLog(t)
	}
	if err := createContainer(t, w); err != nil {
		return err
	}
	for _, c := range old {
		if err := w.d.Cri.RemoveContainer(t.Context(), c.Id); err != nil {
			return err
		}
		harness.Must(t, os.RemoveAll(log))
	}
	return nil
}

func startContainer(t *testing.T, w *world) error {
	return w.d.Cri.StartContainer(t.Context(), w.id)
}

// startNext acts as kubelet does after it has listed the containers. It keeps a running container;
// otherwise it replaces it with the next attempt.
func startNext(t *testing.T, w *world) error {
	for _, c := range harness.Get(w.d.Cri.ListContainers(t.Context(), nil))(t) {
		if c.State == runtimeapi.ContainerState_CONTAINER_RUNNING {
			return nil
		}
	}
	if err := createNext(t, w); err != nil {
		return err
	}
	return startContainer(t, w)
}

// started starts the container and waits until its program handles signals.
func started(t *testing.T, w *world) {
	harness.Must(t, createContainer(t, w))
	harness.Must(t, startContainer(t, w))
	c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
	c.WaitOutput(t, "ready")
}

func stopContainer(grace int64) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) error { return w.d.Cri.StopContainer(t.Context(), w.id, grace) }
}

func removeContainer(t *testing.T, w *world) error {
	return w.d.Cri.RemoveContainer(t.Context(), w.id)
}
