package integration

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/diskusage"
	"berth/internal/testutil"
)

// soakEnv is the duration of TestKubeletSoak, such as 8h. contrib/soak sets it.
const soakEnv = "BERTH_SOAK"

// soakPods is the number of pods that kubelet runs at a time.
const soakPods = 20

// TestKubeletSoak keeps a node busy. Pods of a kubelet come and go, commands run in them, an image
// is pulled and removed, and processes of berth are killed. At the end of each round kubelet
// removes all pods. What the node then holds must not grow after the first round. The log has a
// table.
func TestKubeletSoak(t *testing.T) {
	testutil.Long(t)
	duration := time.Minute
	if text := os.Getenv(soakEnv); text != "" {
		duration = harness.Get(time.ParseDuration(text))(t)
	}
	s := &soak{node: startNode(t, ""), random: rand.New(rand.NewPCG(rand.Uint64(), 0))}
	s.d.Pull(t, harness.BaseImage)
	img := harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("soak", 0o644, "soak")})
	s.image = harness.Get(harness.Registry.Push("soak:v1", img))(t)
	rounds := max(4, int(duration/(15*time.Minute)))
	t.Log("| hours | pods | restarts | kills | commands | pulls | daemon, MiB | heap, KiB | descriptors | disk, KiB | growth |")
	t.Log("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
	began := time.Now()
	for round := 1; round <= rounds && !t.Failed(); round++ {
		s.work(t, began.Add(duration*time.Duration(round)/time.Duration(rounds)))
		s.compare(t, time.Since(began))
	}
}

// soak is the work of a node under TestKubeletSoak.
type soak struct {
	*node
	random *rand.Rand
	pods   [soakPods]*kubePod
	image  string // no pod uses it

	started, restarts, kills, commands, pulls int

	grown func(*testing.T) []string // returns growth since the first round
}

// work keeps the node busy until the given time, at least until each action was done.
func (s *soak) work(t *testing.T, until time.Time) {
	t.Helper()
	actions := []func(*testing.T){s.replace, s.replace, s.replace, s.command, s.command, s.pull, s.kill}
	for time.Now().Before(until) {
		s.random.Shuffle(len(actions), func(i, k int) { actions[i], actions[k] = actions[k], actions[i] })
		for _, act := range actions {
			act(t)
		}
	}
	for _, p := range s.pods {
		if p != nil {
			s.restarts += int(containerStatus(p.awaitReady(t), "main").RestartCount)
		}
	}
}

// replace replaces a pod. Half of them have networks of their own and a probe that executes a
// command.
func (s *soak) replace(t *testing.T) {
	i := s.random.IntN(soakPods)
	if s.pods[i] != nil {
		s.restarts += int(containerStatus(s.pods[i].awaitReady(t), "main").RestartCount)
		s.pods[i].withdraw(t)
	}
	spec := "hostNetwork: true\ncontainers: [{}]\n"
	if s.random.IntN(2) == 0 {
		spec = "containers: [{readinessProbe: {exec: {command: ['true']}, periodSeconds: 1}}]\n"
	}
	s.started++
	s.pods[i] = s.apply(t, fmt.Sprintf("soak-%d", s.started), spec)
}

// any returns a pod of a random slot, or nil.
func (s *soak) any() *kubePod { return s.pods[s.random.IntN(soakPods)] }

// command runs a command in a container. No process of berth is killed meanwhile.
func (s *soak) command(t *testing.T) {
	p := s.any()
	if p == nil {
		return
	}
	p.awaitReady(t)
	s.commands++
	harness.Equal(t, "output of the command", p.container(t, "main").Exec(t, "echo", "it runs"), "it runs")
}

// pull pulls an image and removes it.
func (s *soak) pull(t *testing.T) {
	s.pulls++
	s.d.Pull(t, s.image)
	harness.Must(t, s.d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: s.image}))
}

// kill kills a process: the daemon, the process of sessions, an idle launcher, or a container's
// monitor. The pod of a killed monitor becomes ready again.
func (s *soak) kill(t *testing.T) {
	s.kills++
	switch s.random.IntN(4) {
	case 0:
		s.d.Kill(t)
		s.d.Start(t)
	case 1:
		killAny(t, s.random, machine.ProcessesOf("berth-stream"))
	case 2:
		killAny(t, s.random, s.d.Launchers())
	case 3:
		if p := s.any(); p != nil {
			p.awaitReady(t)
			c := p.container(t, "main")
			before := containerStatus(harness.Get(p.find())(t), "main").RestartCount
			killAny(t, s.random, []int{harness.MonitorOf(t, s.d, c)})
			p.await(t, "restarted", func(pod *corev1.Pod) error { return restarts(pod, "main", before+1) })
		}
	}
}

// killAny kills one of the processes, if there is one. It may have ended by itself.
func killAny(t *testing.T, random *rand.Rand, pids []int) {
	t.Helper()
	if len(pids) == 0 {
		return
	}
	if err := syscall.Kill(pids[random.IntN(len(pids))], syscall.SIGKILL); err != nil {
		harness.Equal(t, "error of kill", err, error(syscall.ESRCH))
	}
}

// compare removes all pods, and compares the node with its state after the first round.
func (s *soak) compare(t *testing.T, after time.Duration) {
	t.Helper()
	for i, p := range s.pods {
		if p != nil {
			p.withdraw(t)
		}
		s.pods[i] = nil
	}
	s.awaitEmpty(t)
	s.d.WaitIdle(t)
	var grown []string
	if s.grown == nil {
		s.grown = s.d.WatchGrowth(t)
	} else if grown = s.grown(t); len(grown) > 0 {
		t.Errorf("growth since the first round:\n  %s", strings.Join(grown, "\n  "))
	}
	pid := s.d.Cmd.Process.Pid
	root := harness.Get(os.Open(s.d.Root))(t)
	defer root.Close()
	used := harness.Get(diskusage.Tree(t.Context(), root))(t)
	t.Logf("| %.2f | %d | %d | %d | %d | %d | %.1f | %d | %d | %d | %d |", after.Hours(), s.started, s.restarts, s.kills, s.commands, s.pulls,
		float64(s.d.Memory(t))/1024, s.d.HeapInUse(t)>>10, len(machine.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))), used.Bytes>>10, len(grown))
}
