package statecheck

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"

	"berth/checkpoint/record"
	"berth/cmd/node"
	"berth/cni"
	"berth/image"
	"berth/image/layer"
	"berth/image/profile"
	"berth/sandbox/state"
)

// facts are the records and the machine's state, read at one time.
type facts struct {
	node *Node
	dirs state.Dirs
	boot string    // boot ID
	run  state.Run // of the state directory

	// From the records.
	pods       map[string]*state.FoundPod
	containers map[string]*state.FoundContainer
	images     map[string]*image.Recorded
	surveys    []record.Survey

	// From the machine.
	daemon       int             // process ID, 0: not running
	others       map[string]bool // IDs of pods and containers in the records of other berths on this machine
	processes    map[int]*process
	mounts       []*mountinfo.Info
	shims        map[string]*shimDir
	netns        []string // pinned paths
	results      []cni.CachedResult
	reservations []cni.Reservation
	objects      []cni.Object
	runs         cni.NotedRuns
	layers       *layer.Survey
	partial      image.PartialSurvey
	descriptors  []descriptor

	views *views // nil without a daemon
}

// gather reads everything once. It reads objects before records, because an object's record exists
// until the object is removed.
func gather(ctx context.Context, n *Node) (*facts, error) {
	f := &facts{node: n, dirs: state.Dirs{Root: n.Root, State: n.State, NetNSs: n.NetNSDir}}
	for _, step := range []func() error{
		f.readBoot, f.readProcesses, f.findDaemon, f.readMounts, f.readShims, f.readNamespaces, f.readLayers, f.readDescriptors,
		f.readOthers, f.readRecords, f.readNetwork, func() error { return f.readViews(ctx) },
	} {
		if err := step(); err != nil {
			return nil, err
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (f *facts) procFile(parts ...string) string {
	return filepath.Join(append([]string{f.node.proc}, parts...)...)
}

func (f *facts) readBoot() (err error) {
	data, err := f.readProc("sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	f.boot = strings.TrimSpace(string(data))
	f.run, err = f.dirs.ReadRun()
	return err
}

// maxProcFile bounds the files in /proc that are read here, in bytes. The longest files have cgroup
// paths, with up to 4096 bytes for each of about 15 hierarchies.
const maxProcFile = 256 << 10

// readProc reads a file in /proc with a size limit, because the process may influence its content.
func (f *facts) readProc(parts ...string) ([]byte, error) {
	file, err := os.Open(f.procFile(parts...))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxProcFile))
}

// findDaemon finds the process that has the lock file of root open. The signature in the file may
// be missing if the disk was full or read-only when the daemon started.
func (f *facts) findDaemon() error {
	path, err := filepath.EvalSymlinks(filepath.Join(f.node.Root, "lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the daemon: %w", err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("find the daemon: %w", err)
	}
	candidates := []string{strings.TrimSpace(string(data))}
	for _, pid := range slices.Sorted(maps.Keys(f.processes)) {
		if node.IsDaemon(f.processes[pid].name) {
			candidates = append(candidates, strconv.Itoa(pid))
		}
	}
	for _, pid := range candidates {
		if slices.ContainsFunc(f.linksOf(pid, firstDescriptors),
			func(link descriptor) bool { return link.target == path }) {
			f.daemon, err = strconv.Atoi(pid)
			return err
		}
	}
	return nil
}

// Daemon returns the process ID of the daemon that uses the directory root, or 0.
func Daemon(root string) (pid int, err error) {
	f := &facts{node: &Node{Root: root, proc: "/proc"}}
	if err := f.readProcesses(); err != nil {
		return 0, err
	}
	err = f.findDaemon()
	return f.daemon, err
}

func (f *facts) readMounts() error {
	file, err := os.Open(f.procFile("self/mountinfo"))
	if err != nil {
		return fmt.Errorf("read mounts: %w", err)
	}
	defer file.Close()
	f.mounts, err = mountinfo.GetMountsFromReader(file, nil)
	return err
}

func (f *facts) readRecords() error {
	records, err := state.Inspect(f.node.Root, f.node.State)
	if err != nil {
		return err
	}
	images, survey, err := image.ReadRecords(f.imageRoot())
	if err != nil {
		return err
	}
	partial, err := image.InspectPartial(f.imageRoot(), f.node.PartialTTL)
	if err != nil {
		return err
	}
	profiles, err := profile.Inspect(f.imageRoot())
	if err != nil {
		return err
	}
	f.partial = *partial
	f.pods, f.containers, f.images = records.Pods, records.Containers, images
	f.surveys = append(records.Surveys, survey, f.partial.Records, profiles)
	return nil
}

func (f *facts) imageRoot() string { return filepath.Join(f.node.Root, "images") }

// known reports whether a pod or container with that ID is recorded.
func (f *facts) known(id string) bool { return f.pods[id] != nil || f.containers[id] != nil }

func podName(id string) string       { return "pod " + id }
func containerName(id string) string { return "container " + id }

// podRuns reports whether a pod has a pause, a network and mounts by its record. Pods of an earlier
// boot, or of an earlier state directory, have none of these.
func (f *facts) podRuns(p *state.FoundPod) bool {
	return p.Stage == state.Running && p.BootID == f.boot && f.isThisRun(p.RunID)
}

// podIsOver reports whether a pod no longer has a pause, a network and mounts. The next daemon
// completes an unfinished stop.
func (f *facts) podIsOver(p *state.FoundPod) bool {
	return f.daemon != 0 && p.Stage == state.Ended && p.Network == nil
}

// containerRuns reports whether a container was launched in this boot, by its record.
func (f *facts) containerRuns(c *state.FoundContainer) bool {
	return c.Stage == state.Running && c.BootID == f.boot && f.isThisRun(c.RunID)
}

// isThisRun reports whether an object belongs to the present state directory, so that it can have
// runtime state. It cannot if the directory was emptied since. Earlier versions record no run IDs.
func (f *facts) isThisRun(id string) bool { return f.run.Has(id) || f.run.ID == "" }

// containerIsIdle reports whether the container was not started, or the remains of its launch were
// removed.
func (f *facts) containerIsIdle(c *state.FoundContainer) bool {
	return c.Stage == state.Created || c.Stage == state.Ended && f.daemon != 0
}

// namesIn lists a directory. A missing directory counts as empty.
func namesIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// idLength is the length of pod and container IDs, in hex digits.
const idLength = 64

func isID(name string) bool {
	if len(name) != idLength {
		return false
	}
	return strings.Trim(name, "0123456789abcdef") == ""
}
