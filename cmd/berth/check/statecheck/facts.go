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

	"berth/checkpoint"
	"berth/cni"
	"berth/image"
	"berth/image/layer"
	"berth/sandbox/state"
)

// facts are what one look has found, in the records and on the machine.
type facts struct {
	node *Node
	dirs state.Dirs
	boot string    // boot ID
	run  state.Run // of the state directory

	// records
	pods       map[string]*state.FoundPod
	containers map[string]*state.FoundContainer
	images     map[string]*image.Recorded
	surveys    []checkpoint.Survey

	// the machine
	daemon       int             // process ID, 0: none runs
	others       map[string]bool // IDs of pods and containers that other berths of this machine have recorded
	processes    map[int]*process
	mounts       []*mountinfo.Info
	shims        map[string]*shimDir
	netns        []string // paths
	results      []cni.CachedResult
	reservations []cni.Reservation
	objects      []cni.Object
	runs         cni.NotedRuns
	layers       *layer.Survey
	descriptors  []descriptor

	views *views // nil without a daemon
}

// gather looks at everything once. Things before records: what a thing was made for has its
// record until the thing is gone.
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

// maxProcFile is more than the kernel writes into any of the files in /proc that are read here,
// whatever a process does: paths of cgroups are the longest, with 4096 bytes in each of some 15
// hierarchies.
const maxProcFile = 256 << 10

// readProc reads a file in /proc, with a limit: what it holds may be up to the process that it is
// about.
func (f *facts) readProc(parts ...string) ([]byte, error) {
	file, err := os.Open(f.procFile(parts...))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxProcFile))
}

// findDaemon finds who holds the lock of root: a process that has the lock file open. That is who signed it, unless there was no
// room for a signature, or the disk was read-only, when it was started.
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
		if f.processes[pid].name == daemonName {
			candidates = append(candidates, strconv.Itoa(pid))
		}
	}
	for _, pid := range candidates {
		if slices.ContainsFunc(f.linksOf(pid, firstDescriptors), func(link descriptor) bool { return link.target == path }) {
			f.daemon, err = strconv.Atoi(pid)
			return err
		}
	}
	return nil
}

// daemonName is what ps calls it.
const daemonName = "berth"

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
	f.pods, f.containers, f.images = records.Pods, records.Containers, images
	f.surveys = append(records.Surveys, survey)
	return nil
}

func (f *facts) imageRoot() string { return filepath.Join(f.node.Root, "images") }

// known tells whether an ID is that of a recorded pod or container.
func (f *facts) known(id string) bool { return f.pods[id] != nil || f.containers[id] != nil }

// object names the pod or container with an ID.
func (f *facts) object(id string) string {
	switch {
	case f.pods[id] != nil:
		return podName(id)
	case f.containers[id] != nil:
		return containerName(id)
	}
	return "unrecorded " + id
}

func podName(id string) string       { return "pod " + id }
func containerName(id string) string { return "container " + id }

// podRuns tells that a pod has a pause, a network and mounts, as far as its record says. Those of
// an earlier boot, or of an earlier run of the state directory, have none.
func (f *facts) podRuns(p *state.FoundPod) bool {
	return p.Stage == state.Running && p.BootID == f.boot && f.isThisRun(p.RunID)
}

// podIsOver tells that a pod has nothing of that any more. A stop that a daemon did not finish
// the next one does.
func (f *facts) podIsOver(p *state.FoundPod) bool {
	return f.daemon != 0 && p.Stage == state.Ended && p.Network == nil
}

// containerRuns tells that a container was launched in this boot, as far as its record says.
func (f *facts) containerRuns(c *state.FoundContainer) bool {
	return c.Stage == state.Running && c.BootID == f.boot && f.isThisRun(c.RunID)
}

// isThisRun tells whether an object that was recorded in a run of the state directory can have
// runtime state: the directory was not emptied since. Earlier versions have no IDs of runs.
func (f *facts) isThisRun(id string) bool { return f.run.Has(id) || f.run.ID == "" }

// containerIsIdle tells that a container has nothing that a launch makes: it was not started, or
// what there was has been cleaned up.
func (f *facts) containerIsIdle(c *state.FoundContainer) bool {
	return c.Stage == state.Created || c.Stage == state.Ended && f.daemon != 0
}

// namesIn lists a directory; one that does not exist is empty.
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

// idLength is that of the IDs of pods and containers, in hex digits.
const idLength = 64

func isID(name string) bool {
	if len(name) != idLength {
		return false
	}
	return strings.Trim(name, "0123456789abcdef") == ""
}
