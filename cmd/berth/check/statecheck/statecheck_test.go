package statecheck

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/cmd/config"
	"berth/cmd/node"
	"berth/cni"
	"berth/image"
	"berth/image/layer"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/shim/proto"
)

// The fake node: a daemon, a pod with a running and an exited container, an image.
const (
	daemonPID, pausePID, monitorPID, initPID, idlePID = 10, 20, 30, 31, 11

	imageID  = "sha256:aa"
	imageRef = "a@sha256:cc"
	list     = `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "ipam": {"type": "host-local"}}]}`
	layerOne = digest.Digest("sha256:01")
)

var (
	podID     = strings.Repeat("1", idLength)
	runningID = strings.Repeat("2", idLength)
	exitedID  = strings.Repeat("3", idLength)
	strangeID = strings.Repeat("f", idLength)
)

// healthy returns the facts of that node and creates its directories.
func healthy(t *testing.T) *facts {
	t.Helper()
	dir := t.TempDir()
	n := &Node{Root: dir + "/root", State: dir + "/state", NetNSDir: dir + "/netns", Socket: dir + "/state/sock", Networks: node.Readers(), proc: dir + "/proc"}
	f := &facts{node: n, dirs: state.Dirs{Root: n.Root, State: n.State, NetNSs: n.NetNSDir}, boot: "boot", daemon: daemonPID}
	netns := filepath.Join(n.NetNSDir, "berth-"+podID)
	f.pods = map[string]*state.FoundPod{podID: {ID: podID, BootID: "boot", Stage: state.Running, CgroupsPath: "/kubepods/pod1/" + podID,
		Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "name"}},
		NetNS:  netns, Tmpfs: f.dirs.Tmpfs(podID), Etc: f.dirs.Etc(podID), Network: &cni.Attachment{Network: "net", ConfList: []byte(list)},
		IPs: []string{"10.0.0.2"}, PausePID: pausePID, PauseStart: 200}}
	f.containers = map[string]*state.FoundContainer{
		runningID: {ID: runningID, PodID: podID, BootID: "boot", Stage: state.Running, CgroupsPath: "/kubepods/pod1/" + runningID, ImageID: imageID, ImageRef: imageRef, Layers: []digest.Digest{layerOne}},
		exitedID:  {ID: exitedID, PodID: podID, BootID: "boot", Stage: state.Ended, CgroupsPath: "/kubepods/pod1/" + exitedID, ImageID: imageID, ImageRef: imageRef, Layers: []digest.Digest{layerOne}},
	}
	f.images = map[string]*image.Recorded{imageID: {ID: imageID, Tags: []string{"a:1"}, Layers: []digest.Digest{layerOne}, Sequence: 1}}
	f.layers = &layer.Survey{Layers: map[digest.Digest]layer.Stored{layerOne: {Dir: dir + "/none"}}, Damaged: map[string]error{}}
	f.surveys = []record.Survey{{}}
	f.netns = []string{netns}
	f.results = []cni.CachedResult{{File: "result", PodID: podID, Network: "net", IPs: []string{"10.0.0.2"}}}
	f.reservations = []cni.Reservation{{File: "10.0.0.2", IP: "10.0.0.2", PodID: podID}}
	missing := fmt.Errorf("no exit record: %w", fs.ErrNotExist)
	f.shims = map[string]*shimDir{
		podID:     {launched: proto.Processes{InitPID: pausePID, InitStartTime: 200}, exit: missing},
		runningID: {launched: proto.Processes{ShimPID: monitorPID, ShimStartTime: 300, InitPID: initPID, InitStartTime: 310}, exit: missing},
	}
	f.processes = map[int]*process{}
	for _, p := range []*process{
		{pid: 1, name: "init"},
		{pid: daemonPID, parent: 1, name: "berthd", exe: "/usr/bin/berthd"},
		{pid: idlePID, parent: daemonPID, name: "berth-shim", exe: "/memfd:berth-shim (deleted)"},
		{pid: pausePID, parent: 1, start: 200, name: "pause", groups: []string{"/kubepods/pod1/" + podID}},
		{pid: monitorPID, parent: 1, start: 300, name: "berth-monitor", exe: n.Root + "/bin/monitor-0123/berth-monitor"},
		{pid: initPID, parent: monitorPID, start: 310, name: "sleep", groups: []string{"/kubepods/pod1/" + runningID}},
	} {
		f.processes[p.pid] = p
	}
	f.descriptors = []descriptor{{number: "1", target: "/dev/null"}, {number: "5", target: pidfdTarget, pid: pausePID}, {number: "6", target: "pidfd:[7]", pid: idlePID}}
	f.mounts = []*mountinfo.Info{}
	for _, point := range []string{n.State, f.dirs.SharedMounts(), f.dirs.RootPlace(), f.pods[podID].Tmpfs, netns, n.Root} {
		f.mounts = append(f.mounts, &mountinfo.Info{Mountpoint: point, FSType: "tmpfs", Source: "made up"})
	}
	f.views = &views{
		pods: map[string]*runtimeapi.PodSandbox{podID: {Id: podID, Metadata: &runtimeapi.PodSandboxMetadata{Name: "name"}}},
		containers: map[string]*runtimeapi.Container{
			runningID: {Id: runningID, PodSandboxId: podID, ImageRef: imageRef, ImageId: imageID, State: runtimeapi.ContainerState_CONTAINER_RUNNING},
			exitedID:  {Id: exitedID, PodSandboxId: podID, ImageRef: imageRef, ImageId: imageID, State: runtimeapi.ContainerState_CONTAINER_EXITED},
		},
		images:   map[string]*runtimeapi.Image{imageID: {Id: imageID, RepoTags: []string{"a:1"}}},
		statuses: map[string]*runtimeapi.ContainerStatus{runningID: {State: runtimeapi.ContainerState_CONTAINER_RUNNING, ImageRef: imageRef, ImageId: imageID}},
		resolved: map[string]string{"a:1": imageID},
	}
	for _, path := range []string{
		filepath.Join(f.dirs.PodFiles(""), podID), f.dirs.Trash(), filepath.Join(f.dirs.Writable(""), runningID, "upper"), filepath.Join(f.dirs.Writable(""), exitedID, "upper"),
		f.pods[podID].Etc, filepath.Join(f.dirs.Libcontainer(), podID), filepath.Join(f.dirs.Libcontainer(), runningID), n.NetNSDir, n.proc + "/" + strconv.Itoa(pausePID) + "/ns",
	} {
		testutil.Must(t, os.MkdirAll(path, 0o700))
	}
	for _, name := range []string{"resolv.conf", "hostname", "hosts"} {
		write(t, filepath.Join(f.dirs.Etc(podID), name))
	}
	testutil.Must(t, os.Symlink("/proc/self/ns/net", netns))
	testutil.Must(t, os.Symlink("/proc/self/ns/net", n.proc+"/"+strconv.Itoa(pausePID)+"/ns/net"))
	return f
}

func write(t *testing.T, path string) {
	t.Helper()
	testutil.Must(t, os.WriteFile(path, nil, 0o600))
}

func compareAll(f *facts) []Difference {
	found := []Difference{}
	for _, i := range invariants {
		i.compare(f, &finder{invariant: i.name, found: &found})
	}
	return f.report(found).Differences
}

func TestHealthyNodeHasNoDifferences(t *testing.T) {
	for _, d := range compareAll(healthy(t)) {
		t.Error(d)
	}
}

// difference is a case of TestDifferencesAreNamed.
type difference struct {
	name   string
	change func(t *testing.T, f *facts)
	want   []string
}

func kill(f *facts, pid int) { delete(f.processes, pid) }

// orphan is a process in the cgroup of an object without a record.
var orphan = &process{pid: 50, parent: 1, name: "leaked", groups: []string{"/kubepods/pod9/" + strangeID}}

var differences = []difference{
	{"an orphan without a record", func(_ *testing.T, f *facts) { f.processes[50] = orphan }, []string{"processes: process 50 (leaked): expected the pod or container"}},
	{"another runtime's container", func(_ *testing.T, f *facts) {
		f.processes[49] = &process{pid: 49, parent: 1, name: "containerd-shim"}
		f.processes[50] = &process{pid: 50, parent: 49, groups: orphan.groups}
	}, nil},
	{"a process without record in a scope of ours", func(_ *testing.T, f *facts) {
		f.processes[50] = &process{pid: 50, parent: daemonPID, name: "leaked", groups: []string{"/system.slice/berth-" + strangeID + ".scope"}}
	}, []string{"processes: process 50 (leaked)"}},
	{"a process of an exited container", func(_ *testing.T, f *facts) {
		f.processes[50] = &process{pid: 50, parent: 1, name: "leaked", groups: []string{"/kubepods/pod1/" + exitedID}}
	}, []string{"processes: container " + exitedID + ": expected no process"}},
	{"a CNI plugin's child whose run is noted", func(t *testing.T, f *facts) { f.withPlugin(t, true) }, nil},
	{"a CNI plugin's child whose run is not recorded", func(t *testing.T, f *facts) { f.withPlugin(t, false) }, []string{"processes: process 50 (plugin): expected a record of the CNI plugin"}},
	{"a launcher without a daemon", func(_ *testing.T, f *facts) { f.processes[idlePID].parent = 1; f.descriptors = nil }, []string{"processes: process 11 (berth-shim): expected the daemon"}},
	{"a monitor without a shim record", func(_ *testing.T, f *facts) {
		f.processes[50] = &process{pid: 50, parent: 1, name: "berth-monitor", exe: f.processes[monitorPID].exe}
	}, []string{"processes: process 50 (berth-monitor): expected a recorded container"}},
	{"another daemon's monitor", func(_ *testing.T, f *facts) {
		f.processes[50] = &process{pid: 50, parent: 1, exe: "/elsewhere/bin/monitor-0123/berth-monitor"}
	}, nil},
	{"the pause is gone", func(_ *testing.T, f *facts) { kill(f, pausePID); f.descriptors = nil }, []string{"processes: pod " + podID + ": expected its pause, process 20", "views: pod " + podID + ": expected a state"}},
	{"the pause is gone, as the daemon knows", func(_ *testing.T, f *facts) {
		kill(f, pausePID)
		f.descriptors = nil
		f.views.pods[podID].State = runtimeapi.PodSandboxState_SANDBOX_NOTREADY
	}, nil},
	{"the pause's ID is another process's", func(_ *testing.T, f *facts) { f.processes[pausePID].start++ }, []string{"processes: pod " + podID, "views: pod " + podID}},
	{"the monitor is gone", func(_ *testing.T, f *facts) { kill(f, monitorPID) }, []string{"processes: container " + runningID + ": expected its monitor, process 30"}},
	{"an exit without a record", func(_ *testing.T, f *facts) { kill(f, monitorPID); f.shims[runningID].exit = nil }, []string{"processes: container " + runningID + ": expected a record of its exit"}},
	{"an exit while there is no daemon", func(_ *testing.T, f *facts) {
		kill(f, monitorPID)
		kill(f, idlePID)
		f.shims[runningID].exit, f.daemon, f.views, f.descriptors = nil, 0, nil, nil
	}, nil},
	{"a stuck monitor", func(_ *testing.T, f *facts) { kill(f, initPID) }, []string{"processes: container " + runningID + ": expected its init, process 31, or an exit record"}},

	{"a shim directory without record", func(_ *testing.T, f *facts) { f.shims[strangeID] = &shimDir{exit: fs.ErrNotExist} }, []string{"shims: " + "…" + strangeID + ": expected a recorded pod"}},
	{"a shim directory of an exited container", func(_ *testing.T, f *facts) { f.shims[exitedID] = &shimDir{} }, []string{"shims: container " + exitedID + ": expected nothing of a launch"}},
	{"an unresponsive monitor", func(_ *testing.T, f *facts) { f.shims[runningID].listens = errors.New("nobody") }, []string{"shims: container " + runningID + ": expected a socket"}},
	{"a pod without shim directory", func(_ *testing.T, f *facts) { delete(f.shims, podID) }, []string{"shims: pod " + podID + ": expected a shim directory"}},
	{"runtime state without record", func(t *testing.T, f *facts) {
		testutil.Must(t, os.Mkdir(filepath.Join(f.dirs.Libcontainer(), strangeID), 0o700))
	}, []string{"shims: …" + strangeID + ": expected a recorded pod"}},

	{"a namespace without record", func(_ *testing.T, f *facts) { f.netns = append(f.netns, f.node.NetNSDir+"/berth-x") }, []string{"netns: …berth-x: expected a recorded pod"}},
	{"a namespace that is gone", func(t *testing.T, f *facts) { testutil.Must(t, os.Remove(f.netns[0])) }, []string{"netns: pod " + podID + ": expected a network namespace pinned"}},
	{"a pin of another namespace", func(t *testing.T, f *facts) {
		testutil.Must(t, os.Remove(f.netns[0]))
		testutil.Must(t, os.Symlink("/proc/self/ns/user", f.netns[0]))
	}, []string{"netns: pod " + podID + ": expected its pause in the network namespace"}},

	{"an address without a pod", func(_ *testing.T, f *facts) {
		f.reservations = append(f.reservations, cni.Reservation{File: "10.0.0.3", IP: "10.0.0.3", PodID: strangeID})
	}, []string{"addresses: 10.0.0.3: expected a recorded pod"}},
	{"an address that is not kept", func(_ *testing.T, f *facts) { f.reservations = nil }, []string{"addresses: pod " + podID + ": expected the addresses 10.0.0.2 in the store of addresses"}},
	{"a result without a pod", func(_ *testing.T, f *facts) { f.results = append(f.results, cni.CachedResult{File: "other"}) }, []string{"addresses: other: expected a recorded pod"}},
	{"an address twice", func(_ *testing.T, f *facts) {
		other := *f.pods[podID]
		other.ID, other.Stage = strangeID, state.BeingMade
		f.pods[strangeID] = &other
	}, []string{"addresses: address 10.0.0.2: expected one pod"}},

	{"a missing layer", func(_ *testing.T, f *facts) { f.layers.Layers = nil }, []string{"layers: container " + runningID + ": expected its layer sha256:01", "layers: image sha256:aa: expected its layer"}},
	{"garbage", func(_ *testing.T, f *facts) { f.layers.Layers["sha256:02"] = layer.Stored{} }, []string{"layers: layer sha256:02: expected an image or container"}},
	{"layers of a pull", func(_ *testing.T, f *facts) {
		f.layers.Layers["sha256:02"], f.views.pulls = layer.Stored{}, 1
		f.layers.Making = []string{"half"}
	}, nil},
	{"half a layer", func(_ *testing.T, f *facts) { f.layers.Making = []string{"half"} }, []string{"layers: half: expected a pull"}},
	{"a quarantined layer", func(_ *testing.T, f *facts) { f.layers.SetAside = []string{"x"} }, []string{"layers: x: expected no quarantined layer"}},
	{"no layer", func(_ *testing.T, f *facts) { f.layers.Damaged["x"] = errors.New("no record") }, []string{"layers: x: expected a layer, found no record"}},
	{"a join of a layer that is gone", func(_ *testing.T, f *facts) {
		f.layers.Joins = []layer.Stored{{Dir: "j", Layers: []digest.Digest{"sha256:03"}}}
	}, []string{"layers: j: expected the layer that it depends on"}},

	{"a mount that leaked", func(_ *testing.T, f *facts) {
		f.mounts = append(f.mounts, &mountinfo.Info{Mountpoint: f.dirs.Writable("") + "/x", FSType: "overlay", Source: "overlay"})
	}, []string{"mounts: mount at …/x: expected no mount, found overlay"}},
	{"a volume of berth run", func(_ *testing.T, f *facts) {
		f.pods[podID].Config.Metadata.Uid, f.views.pods[podID].Metadata.Uid = "uid", "uid"
		f.mounts = append(f.mounts, &mountinfo.Info{Mountpoint: f.node.Root + "/run/uid/volumes/x", FSType: "tmpfs", Source: "tmpfs"})
	}, nil},
	{"a volume without its pod", func(_ *testing.T, f *facts) {
		f.mounts = append(f.mounts, &mountinfo.Info{Mountpoint: f.node.Root + "/run/gone/volumes/x", FSType: "tmpfs", Source: "tmpfs"})
	}, []string{"mounts: mount at …/x: expected no mount, found tmpfs"}},
	{"a mount twice", func(_ *testing.T, f *facts) { f.mounts = append(f.mounts, f.mounts[3]) }, []string{"mounts: pod " + podID + ": expected one mount"}},
	{"a mount that is gone", func(_ *testing.T, f *facts) { f.mounts = f.mounts[1:] }, []string{"mounts: the daemon: expected a mount"}},
	{"images on a disk of their own", func(_ *testing.T, f *facts) { f.mounts = append(f.mounts, &mountinfo.Info{Mountpoint: f.imageRoot()}) }, nil},

	{"a pidfd of a stranger", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: pidfdTarget, pid: 1})
	}, []string{"fds: descriptor 9 of the daemon: expected a process of a running object"}},
	{"a pidfd of an ended process", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: pidfdTarget, pid: -1})
	}, []string{"fds: descriptor 9"}},
	{"too many pidfds", func(_ *testing.T, f *facts) {
		for range perProcess {
			f.descriptors = append(f.descriptors, f.descriptors[1])
		}
	}, []string{"fds: the daemon: expected at most 8 descriptors of process 20"}},
	{"a namespace held", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: "net:[4026531840]"})
	}, []string{"fds: descriptor 9 of the daemon: expected no namespace"}},
	{"a deleted file held", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: "/var/log/x (deleted)"})
	}, []string{"fds: descriptor 9 of the daemon: expected a file that exists"}},
	{"statistics that an ended thread opened", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: "/proc/7/task/8/net/dev (deleted)"})
	}, nil},
	{"a cgroup's file held", func(_ *testing.T, f *facts) {
		f.descriptors = append(f.descriptors, descriptor{number: "9", target: "/sys/fs/cgroup/kubepods/" + strangeID + "/cpu.stat"})
	}, []string{"fds: descriptor 9 of the daemon: expected a file of a recorded pod"}},
	{"too many descriptors", func(_ *testing.T, f *facts) {
		for range 1000 {
			f.descriptors = append(f.descriptors, descriptor{target: "socket:[1]"})
		}
	}, []string{"fds: the daemon: expected a number of descriptors"}},

	{"a damaged record", func(_ *testing.T, f *facts) {
		f.surveys[0].Damaged = []record.Damaged{{Path: "x", Err: record.ErrCorrupt}}
	}, []string{"records: x: expected a valid record, found record is damaged"}},
	{"a quarantined record", func(_ *testing.T, f *facts) { f.surveys[0].SetAside = []string{"x"} }, []string{"records: x: expected no quarantined record"}},
	{"a newer record", func(_ *testing.T, f *facts) { f.surveys[0].Newer = []string{"x"} }, []string{"records: x: expected a record of this version"}},
	{"a file in root", func(t *testing.T, f *facts) { write(t, f.node.Root+"/x") }, []string{"records: …/root/x: not a berth file"}},
	{"a writable layer without a container", func(t *testing.T, f *facts) {
		testutil.Must(t, os.Mkdir(filepath.Join(f.dirs.Writable(""), strangeID), 0o700))
	}, []string{"records: …" + strangeID + ": expected a recorded pod or container that has it"}},
	{"a pod's file that is gone", func(t *testing.T, f *facts) {
		testutil.Must(t, os.Remove(filepath.Join(f.dirs.Etc(podID), "hosts")))
	}, []string{"records: pod " + podID + ": expected …/hosts"}},

	{"a daemon that does not answer", func(_ *testing.T, f *facts) { f.views = &views{err: errors.New("refused"), pulls: 1} }, []string{"views: the daemon: expected an answer"}},
	{"an image that is not listed", func(_ *testing.T, f *facts) { delete(f.views.images, imageID) }, []string{"views: image " + imageID + ": expected it in ListImages"}},
	{"a pod that is not listed", func(_ *testing.T, f *facts) { delete(f.views.pods, podID) }, []string{"views: pod " + podID + ": expected it in ListPodSandbox"}},
	{"a container without record", func(_ *testing.T, f *facts) {
		f.views.containers[strangeID] = f.views.containers[exitedID]
	}, []string{"views: container " + strangeID + ": expected a record"}},
	{"another state in ContainerStatus", func(_ *testing.T, f *facts) {
		f.views.statuses[runningID].State = runtimeapi.ContainerState_CONTAINER_EXITED
	}, []string{"views: container " + runningID + ": expected the same state"}},
	{"an exited container that is listed as running", func(_ *testing.T, f *facts) {
		f.views.containers[exitedID].State = runtimeapi.ContainerState_CONTAINER_RUNNING
	}, []string{"views: container " + exitedID + ": expected a state that matches its record (ended)"}},
	{"another image", func(_ *testing.T, f *facts) { f.views.containers[exitedID].ImageId = "sha256:bb" }, []string{"views: container " + exitedID + ": expected the image sha256:aa"}},
	{"another image reference", func(_ *testing.T, f *facts) { f.views.containers[exitedID].ImageRef = "sha256:bb" }, []string{"views: container " + exitedID + ": expected the image sha256:aa"}},
	{"an image with another tag", func(_ *testing.T, f *facts) { f.views.images[imageID].RepoTags = nil }, []string{"views: image sha256:aa: expected the tags [a:1] in ListImages, found []"}},
	{"a tag that leads elsewhere", func(_ *testing.T, f *facts) { f.views.resolved["a:1"] = "sha256:bb" }, []string{"views: image sha256:aa: expected ImageStatus to find it by a:1"}},
}

// Each case introduces one difference. The reported differences must begin with the wanted texts,
// and all of these must be reported.
func TestDifferencesAreNamed(t *testing.T) {
	for _, tt := range differences {
		t.Run(tt.name, func(t *testing.T) {
			f := healthy(t)
			tt.change(t, f)
			found := compareAll(f)
			for i, d := range found {
				if i >= len(tt.want) || !begins(d.String(), tt.want[i]) {
					t.Errorf("named: %s", d)
				}
			}
			if len(found) < len(tt.want) {
				t.Errorf("%d of %q named", len(found), tt.want)
			}
		})
	}
}

// begins reports whether s begins with text. A … in text matches anything.
func begins(s, text string) bool {
	head, tail, any := strings.Cut(text, "…")
	rest, ok := strings.CutPrefix(s, head)
	return ok && (!any || strings.Contains(rest, tail))
}

func TestObjectsInTransitionHaveNoDifferences(t *testing.T) {
	for _, stage := range []state.Stage{state.BeingMade, state.BeingRemoved} {
		f := healthy(t)
		f.pods[podID].Stage, f.containers[runningID].Stage, f.containers[exitedID].Stage = stage, stage, stage
		delete(f.processes, monitorPID)
		f.netns, f.results, f.reservations, f.shims, f.mounts = nil, nil, nil, nil, f.mounts[:3]
		f.views.pods, f.views.containers = nil, nil
		for _, d := range compareAll(f) {
			t.Errorf("%s: %s", stage, d)
		}
	}
}

func TestStatLine(t *testing.T) {
	const line = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 1\n"
	p, kernel := parseStat(42, []byte(line))
	if p == nil || kernel || p.parent != 7 || p.start != 12345 || p.name != "a) b (c" || p.ended {
		t.Errorf("got %+v, %v", p, kernel)
	}
	for _, bad := range []string{"", "42", "42 (a", "42 )a(", "42 (a) S 7"} {
		if p, _ := parseStat(42, []byte(bad)); p != nil {
			t.Errorf("%q: got %+v", bad, p)
		}
	}
}

func TestIDsInGroups(t *testing.T) {
	for group, want := range map[string]string{
		"/kubepods/pod1/" + podID:                                     podID,
		"/a.slice/berth-" + podID + ".scope":                          podID,
		"/kubepods/" + podID + "/exec-1":                              podID,
		"/docker/" + exitedID + "/kubepods/pod1/" + podID:             exitedID + " " + podID,
		"/kubepods/pod" + podID:                                       "",
		"/system.slice/berth.service":                                 "",
		"/kubepods/" + strings.ToUpper(strings.Repeat("a", idLength)): "",
	} {
		if got := strings.Join(idsIn(group), " "); got != want {
			t.Errorf("%s: %q, want %q", group, got, want)
		}
	}
}

// A fake /proc: first without state, then with a daemon that has the lock file open.
func TestFindDaemon(t *testing.T) {
	dir := t.TempDir()
	n := &Node{Root: dir + "/root", State: dir + "/state", NetNSDir: dir + "/netns", CNIConfDir: dir + "/net.d", CNICacheDir: dir + "/cni", proc: dir + "/proc"}
	for path, content := range map[string]string{
		"proc/sys/kernel/random/boot_id": "boot\n",
		"proc/self/mountinfo":            "22 1 8:1 / / rw - ext4 /dev/root rw\n",
		"proc/7/stat":                    "7 (berth) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 1\n",
		"proc/7/fd/none":                 "",
		"root/lock":                      "7\n",
	} {
		testutil.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o700))
		testutil.Must(t, os.WriteFile(filepath.Join(dir, path), []byte(content), 0o600))
	}
	report, err := Run(t.Context(), n)
	testutil.Must(t, err)
	if report.Daemon != 0 || len(report.Differences) > 0 {
		t.Errorf("a process that has not opened the lock is taken for the daemon: %+v", report)
	}
	testutil.Must(t, os.Symlink(n.Root+"/lock", n.proc+"/7/fd/3"))
	n.pauses = []time.Duration{0}
	report, err = Run(t.Context(), n)
	testutil.Must(t, err)
	if report.Daemon != 7 || len(report.Differences) == 0 {
		t.Errorf("a daemon without mounts and answers: %+v", report)
	}
	for _, signature := range []string{"", "99\n"} { // a daemon started on a full disk cannot sign its lock
		testutil.Must(t, os.WriteFile(n.Root+"/lock", []byte(signature), 0o600))
		report, err = Run(t.Context(), n)
		testutil.Must(t, err)
		if report.Daemon != 7 {
			t.Errorf("a daemon that could not sign the lock: %+v", report)
		}
	}
}

// withPlugin adds a process of a CNI plugin that the daemon runs.
func (f *facts) withPlugin(t *testing.T, noted bool) {
	t.Helper()
	dir := t.TempDir()
	n, err := cni.New(cni.Config{ConfDir: dir, BinDirs: []string{dir}, CacheDir: dir, RunDir: dir + "/run"}, slog.New(slog.DiscardHandler))
	testutil.Must(t, err)
	n.Close()
	f.runs, err = cni.ReadNotedRuns(dir + "/run")
	testutil.Must(t, err)
	name := f.runs.Prefix() + "ID"
	if noted {
		testutil.Must(t, os.WriteFile(dir+"/run/"+name, nil, 0o600))
		f.runs, err = cni.ReadNotedRuns(dir + "/run")
		testutil.Must(t, err)
	}
	f.processes[50] = &process{pid: 50, parent: 1, name: "plugin", groups: []string{"/system.slice/berth.service/" + name}}
}

// The sockets that the daemon makes by default are files of berth.
func TestDefaultSocketsAreKnown(t *testing.T) {
	t.Parallel()
	c := config.Default()
	below, err := filepath.Rel(c.State, c.NRISocket)
	testutil.Must(t, err)
	if first, _, _ := strings.Cut(below, "/"); !slices.Contains(inState, first) {
		t.Errorf("%s is reported as no file of berth", c.NRISocket)
	}
}
