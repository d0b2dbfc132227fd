package integration

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// The tables name the outcome of a start for each condition of root (rows) and of the state
// directory (columns), by a letter of outcomes.
const (
	whilePodsRun = `
root       present empty missing foreign older copy damaged read-only full
present    s       m     m       m       m     s    m       l         s
empty      n       n     n       n       n     n    n       n         n
missing    n       n     n       n       n     n    n       n         n
foreign    a       k     k       c       a     a    a       a         a
older      o       k     k       a       k     o    o       o         o
copy       c       k     k       a       c     c    c       c         c
damaged    d       m     m       m       m     d    d       d         d
read-only  s       m     m       m       m     s    m       l         s
full       s       m     m       m       m     s    m       l         s`

	afterPodsEnded = `
root       present empty missing foreign older copy damaged read-only full
present    s       s     s       s       s     s    r       l         s
empty      -       -     -       -       -     -    -       l         -
missing    -       -     -       -       -     -    -       l         -
foreign    -       -     -       -       -     -    -       l         -
older      -       -     -       -       -     -    -       l         -
copy       -       -     -       -       -     -    -       l         -
damaged    -       -     -       -       -     -    -       l         -
read-only  s       s     s       s       s     s    r       l         s
full       s       s     s       s       s     s    r       l         s`
)

// outcomes are texts of refusals, except for two. "cleans up" means that the daemon serves without
// the pod, because no process of it is left.
var outcomes = map[string]string{
	"s": "serves",
	"-": "cleans up",
	"n": "no berth has used this directory",
	"a": "it is another root than the one that they were started with",
	"c": "it is a copy of the root that they were started with",
	"o": "it is older than they are",
	"k": "the state directory does not know them either",
	"d": "all of their records are damaged",
	"m": "it was moved, emptied or damaged, or another filesystem covers it",
	"r": "read shim record of",
	"l": "debug.sock: bind: read-only file system",
}

// place is a directory of a daemon on a small filesystem.
type place struct {
	disk, dir string
	records   string   // pattern of its records
	folders   []string // of the records
}

// startTable has a daemon with a pod, whose directories a test spoils while no daemon runs.
type startTable struct {
	d           *harness.Daemon
	root, state place
	pod         *harness.Pod
	container   *harness.Container
	pids        []int // the container and the pause
}

func newStartTable(t *testing.T) *startTable {
	t.Helper()
	s := &startTable{}
	s.d = harness.NewDaemon(t, func(t *testing.T, d *harness.Daemon) {
		s.root = place{disk: d.Dir + "/r", records: "[pc]o*s/*.record", folders: []string{"pods", "containers"}}
		s.state = place{disk: d.Dir + "/s", records: "c/*/shim", folders: []string{"c"}}
		for _, p := range []*place{&s.root, &s.state} {
			p.dir = p.disk + "/dir"
			harness.Must(t, os.Mkdir(p.disk, 0o711))
			harness.Must(t, unix.Mount("disk", p.disk, "tmpfs", 0, "mode=711,size=48m"))
		}
		d.Root, d.State = s.root.dir, s.state.dir
	})
	t.Cleanup(func() { unmountSince(t, s.d.Dir, nil) })
	s.d.Start(t)
	s.d.Pull(t, harness.BaseImage)
	s.d.Stop(t)
	for _, p := range []place{s.root, s.state} {
		harness.Must(t, exec.Command("cp", "-a", p.dir, p.disk+"/older").Run())
	}
	s.d.Start(t)
	s.run(t)
	return s
}

// run runs the pod.
func (s *startTable) run(t *testing.T) {
	t.Helper()
	s.pod = s.d.RunPod(t, harness.HostNetwork)
	s.container = s.pod.Run(t)
	s.pids = []int{s.container.Pid(t), s.pod.PausePID(t)}
	harness.MonitorOf(t, s.d, s.container) // waits until the launcher has become the monitor
}

// mountsBelow returns the mount points at and below dir, oldest first.
func mountsBelow(t *testing.T, dir string) []string {
	t.Helper()
	return slices.DeleteFunc(machine.Mountpoints(t, os.Getpid()), func(m string) bool { return m != dir && !strings.HasPrefix(m, dir+"/") })
}

// unmountSince removes the mounts below dir that were not there before.
func unmountSince(t *testing.T, dir string, before []string) {
	t.Helper()
	left := map[string]int{}
	for _, m := range before {
		left[m]++
	}
	now := mountsBelow(t, dir)
	for _, m := range now {
		left[m]--
	}
	for _, m := range slices.Backward(now) {
		if left[m] < 0 {
			left[m]++
			harness.Must(t, unix.Unmount(m, unix.MNT_DETACH))
		}
	}
}

// spoil brings a directory into a condition. undo restores files; the caller removes mounts.
func (p place) spoil(t *testing.T, condition string) (undo func()) {
	t.Helper()
	mount := func(source, target, fstype string, flags uintptr) {
		harness.Must(t, unix.Mount(source, target, fstype, flags, ""))
		if fstype != "" {
			harness.Must(t, os.Chmod(target, 0o700))
		}
	}
	undo = func() {}
	switch condition {
	case "empty":
		mount("cover", p.dir, "tmpfs", 0)
	case "missing":
		mount("cover", p.disk, "tmpfs", 0)
	case "foreign":
		mount("cover", p.dir, "tmpfs", 0)
		harness.Must(t, os.WriteFile(p.dir+"/identity", []byte(`{"id":"ANOTHER","root":"/elsewhere"}`), 0o600))
		for _, folder := range p.folders {
			harness.Must(t, os.Mkdir(filepath.Join(p.dir, folder), 0o700))
		}
	case "older":
		for _, folder := range p.folders {
			mount(filepath.Join(p.disk, "older", folder), filepath.Join(p.dir, folder), "", unix.MS_BIND)
		}
	case "copy":
		if p.folders[0] == "c" {
			harness.Must(t, exec.Command("cp", "-a", p.dir, p.disk+"/copy").Run())
			mount(p.disk+"/copy", p.dir, "", unix.MS_BIND)
			return func() { harness.Must(t, os.RemoveAll(p.disk+"/copy")) }
		}
		mount(p.disk+"/older", p.dir, "", unix.MS_BIND)
	case "damaged":
		files := harness.Get(filepath.Glob(filepath.Join(p.dir, p.records)))(t)
		good := map[string][]byte{}
		for _, f := range files {
			good[f] = harness.Get(os.ReadFile(f))(t)
			harness.Must(t, os.WriteFile(f, []byte("damaged"), 0o600))
		}
		undo = func() {
			for f, content := range good {
				if _, err := os.Stat(f); err == nil { // otherwise the daemon has removed it
					harness.Must(t, os.WriteFile(f, content, 0o600))
				}
			}
		}
	case "read-only":
		mount(p.dir, p.dir, "", unix.MS_BIND|unix.MS_REC)
		harness.Must(t, unix.Mount("", p.dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	case "full":
		ballast := p.disk + "/ballast"
		_ = os.WriteFile(ballast, make([]byte, 64<<20), 0o600) // until there is no space
		undo = func() { harness.Must(t, os.Remove(ballast)) }
	}
	return undo
}

// try starts a daemon in the given conditions and returns what follows: "serves", "cleans up", or
// the text of the refusal.
func (s *startTable) try(t *testing.T, root, state string, running bool) string {
	t.Helper()
	s.d.Stop(t)
	if !running {
		for _, pid := range s.pids {
			harness.Must(t, unix.Kill(pid, unix.SIGKILL))
			waitDead(t, pid)
		}
	}
	before := mountsBelow(t, s.d.Dir)
	undoState, undoRoot := s.state.spoil(t, state), s.root.spoil(t, root)
	check, checkErr := s.d.Command(append([]string{"config", "check"}, s.d.Flags()...)...).CombinedOutput()
	outcome := s.d.TryStart(t)
	switch refused := strings.Contains(outcome, "berth reset"); {
	case outcome == "":
		outcome = s.look(t, running)
		s.d.Stop(t)
	case refused != (checkErr != nil && strings.Contains(string(check), outcomeOf(outcome))):
		outcome = fmt.Sprintf("config check says %v: %s, but berthd %s", checkErr, check, outcome)
	}
	if running && !(machine.Alive(s.pids[0]) && machine.Alive(s.pids[1])) {
		outcome = "KILLS: " + outcome
	}
	unmountSince(t, s.d.Dir, before)
	undoRoot()
	undoState()
	s.d.Start(t)
	return outcome
}

// look returns how a daemon that serves shows the pod.
func (s *startTable) look(t *testing.T, running bool) string {
	t.Helper()
	if len(harness.Get(s.d.Cri.ListPodSandbox(t.Context(), nil))(t)) == 0 {
		return "cleans up"
	}
	if got := s.container.Status(t).State; running != (got == runtimeapi.ContainerState_CONTAINER_RUNNING) {
		return fmt.Sprintf("serves, but the container is %s", got)
	}
	return "serves"
}

// outcomeOf returns the text of outcomes in a refusal, or the refusal.
func outcomeOf(refusal string) string {
	for _, text := range outcomes {
		if strings.Contains(refusal, text) {
			return text
		}
	}
	return refusal
}

// intact reports whether the pod runs as before.
func (s *startTable) intact(t *testing.T) bool {
	t.Helper()
	status, err := s.d.Cri.ContainerStatus(t.Context(), s.container.Id, false)
	return err == nil && status.Status.State == runtimeapi.ContainerState_CONTAINER_RUNNING && machine.Alive(s.pids[0]) && machine.Alive(s.pids[1])
}

// removePods removes all pods.
func (s *startTable) removePods(t *testing.T) {
	t.Helper()
	for _, p := range harness.Get(s.d.Cri.ListPodSandbox(t.Context(), nil))(t) {
		harness.Must(t, s.d.Cri.StopPodSandbox(t.Context(), p.Id))
		harness.Must(t, s.d.Cri.RemovePodSandbox(t.Context(), p.Id))
	}
}

// A daemon that starts while pods run serves them or refuses to start. It kills no process in any
// condition of root and the state directory. `berth config check` says the same before.
func TestStartConditions(t *testing.T) { checkStarts(t, whilePodsRun, true) }

// If the pods' processes have ended, the daemon serves, unless it cannot write or read its state.
func TestStartConditionsAfterPodsEnded(t *testing.T) {
	testutil.Long(t)
	checkStarts(t, afterPodsEnded, false)
}

func checkStarts(t *testing.T, table string, running bool) {
	t.Helper()
	before := harness.MachineSnapshot(nil)
	rows := strings.Split(strings.TrimSpace(table), "\n")
	states := strings.Fields(rows[0])[1:]
	// Reported at the end, because after a failure the harness kills all pods of the machine.
	failures := make([]string, len(rows))
	t.Run("root", func(t *testing.T) {
		for i, row := range rows[1:] {
			root, want, _ := strings.Cut(row, " ")
			t.Run(root, func(t *testing.T) {
				t.Parallel()
				failures[i] = newStartTable(t).checkRow(t, root, states, strings.Fields(want), running)
			})
		}
	})
	harness.Equal(t, "wrong starts", strings.Join(failures, ""), "")
	var grown []string
	_ = harness.WaitFor(func() error {
		if grown = inventory.Summary(harness.MachineSnapshot(nil).Grown(before)); len(grown) > 0 {
			return fmt.Errorf("%d differences", len(grown))
		}
		return nil
	})
	harness.Equal(t, "leaked", strings.Join(grown, "\n"), "")
}

// checkRow tries all conditions of the state directory with one of root.
func (s *startTable) checkRow(t *testing.T, root string, states, want []string, running bool) (failures string) {
	t.Helper()
	for i, state := range states {
		if got := outcomeOf(s.try(t, root, state, running)); got != outcomes[want[i]] {
			failures += fmt.Sprintf("root %s, state %s: %s\nwant: %s\n", root, state, got, outcomes[want[i]])
		}
		if !s.intact(t) {
			s.removePods(t)
			s.run(t)
		}
	}
	s.removePods(t)
	s.d.Stop(t)
	return failures
}
