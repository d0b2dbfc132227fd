package attacks

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// The bounds of TestHostileNeighbours. docs/reliability.md states them beside the measured values.
const (
	memoryBound     = 96 << 10         // the daemon's peak memory in kB
	descriptorBound = 1500             // descriptors of the daemon
	startBound      = 15 * time.Second // from a daemon's start to its first answer
	lifeBound       = 30 * time.Second // from RunPodSandbox to RemovePodSandbox
)

// neighbour is a hostile container: its attack, the kind of its pod, and its user.
type neighbour struct {
	attack string
	pod    []harness.PodOption
	opts   []harness.ContainerOption
}

// Pods without privileges run all attacks of the program neighbour at the same time. Meanwhile
// other pods run, and the daemon is killed and restarted. Its resource usage stays within the
// bounds.
func TestHostileNeighbours(t *testing.T) {
	testutil.Long(t)
	duration := 30 * time.Second
	switch {
	case harness.Thorough():
		duration = 5 * time.Minute
	case testing.Short():
		duration = 10 * time.Second
	}
	plugin := faults.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, plugin.Option)
	image := neighbourImage(t)
	null := nodeOf(t, "/dev/null")
	s := &soak{d: d, plugin: plugin, streaming: streamingAddress(t, d)}
	s.startNeighbours(t, image)
	for end := time.Now().Add(duration); time.Now().Before(end); {
		for range 10 {
			s.life(t)
		}
		s.killPlugin(t)
		s.attackExec(t)
		s.attackLog(t)
		s.checkVictim(t)
		s.sample(t)
		s.restart(t)
	}
	s.report(t)
	harness.Equal(t, "the host's /dev/null", nodeOf(t, "/dev/null"), null)
	for _, pod := range s.pods {
		began := time.Now()
		pod.Stop(t)
		if took := time.Since(began); took > lifeBound {
			t.Errorf("StopPodSandbox of the attack %s took %v", pod.Config.Metadata.Name, took)
		}
	}
}

// neighbourImage pushes an image with the program neighbour, and returns its name.
func neighbourImage(t *testing.T) string {
	t.Helper()
	program := filepath.Join(harness.BinDir, "neighbour") // a guest has no go command
	if _, err := os.Stat(program); err != nil {
		program = filepath.Join(t.TempDir(), "neighbour")
		build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./neighbour")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("build the program neighbour: %v\n%s", err, out)
		}
	}
	body := harness.Get(os.ReadFile(program))(t)
	return hostileImage(t, v1.Config{}, fixture.Tree{fixture.File("bin/neighbour", 0o755, string(body))})
}

// nodeOf returns the attributes of a device node that a container could change.
func nodeOf(t *testing.T, path string) string {
	t.Helper()
	info := harness.Get(os.Stat(path))(t)
	return info.Mode().String()
}

// streamingAddress returns the address of the session server.
func streamingAddress(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	pod := d.RunPod(t, harness.HostNetwork)
	defer pod.Remove(t)
	session := harness.Get(url.Parse(pod.Run(t).ExecURL(t, remotecommand.StreamOptions{Stdout: os.Stdout}, "true")))(t)
	return session.Host
}

// soak holds the pods of the test and its measurements.
type soak struct {
	d         *harness.Daemon
	plugin    *faults.Plugin
	streaming string
	pods      []*harness.Pod
	execs     *harness.Container // root without capabilities
	logs      *harness.Container // has its own log directory mounted
	traced    *harness.Pod       // whose processes another container traces

	lives, starts       []time.Duration
	memory, descriptors int
}

func (s *soak) neighbours() []neighbour {
	user := harness.RunAs(1001)
	hostNetwork := []harness.PodOption{harness.HostNetwork}
	return []neighbour{
		{"environ", hostNetwork, []harness.ContainerOption{user}},
		{"no-environ", hostNetwork, []harness.ContainerOption{user}},
		{"arguments", hostNetwork, []harness.ContainerOption{user}},
		{"connections " + s.streaming, hostNetwork, []harness.ContainerOption{harness.RunAs(65534)}},
		{"trace", []harness.PodOption{harness.SharedPID}, nil},
		{"inotify", hostNetwork, nil},
		{"inotify", hostNetwork, []harness.ContainerOption{user}},
		{"pipes", hostNetwork, nil},
		{"deep", nil, nil},
		{"forks", nil, nil},
		{"mounts", nil, []harness.ContainerOption{user}},
		{"names", nil, nil},
		{"files", nil, nil},
	}
}

// startNeighbours starts all attacks, and waits until each runs.
func (s *soak) startNeighbours(t *testing.T, image string) {
	t.Helper()
	for _, n := range s.neighbours() {
		pod := s.d.RunPod(t, n.pod...)
		s.pods = append(s.pods, pod)
		command := append([]string{"neighbour"}, strings.Fields(n.attack)...)
		c := pod.Run(t, append(n.opts, harness.Image(image), harness.Command(command...))...)
		harness.Eventually(t, "the attack "+n.attack+" runs", func() error {
			out := c.Output(t)
			if strings.Contains(out, "failed") {
				t.Fatalf("the attack %s: %s", n.attack, out)
			}
			if !strings.Contains(out, "ready") {
				return fmt.Errorf("the attack printed %q", out)
			}
			if strings.Contains(out, "refused") {
				t.Logf("the attack %s was %s", n.attack, out)
			}
			return nil
		})
		if n.attack == "trace" {
			s.traced = pod
		}
	}
	s.startLogAttack(t)
	pod := s.d.RunPod(t, harness.HostNetwork)
	s.pods = append(s.pods, pod)
	s.execs = pod.Run(t, harness.Security(func(c *runtimeapi.LinuxContainerSecurityContext) {
		c.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
	}))
}

// startLogAttack runs a container that keeps replacing its log by a FIFO without a reader.
func (s *soak) startLogAttack(t *testing.T) {
	t.Helper()
	pod := s.d.RunPod(t, harness.HostNetwork)
	s.pods = append(s.pods, pod)
	s.logs = pod.Run(t, harness.Mount(&runtimeapi.Mount{HostPath: pod.Config.LogDirectory, ContainerPath: "/logs"}),
		harness.Script(`while :; do for log in /logs/*/0.log; do rm -f $log; mkfifo $log; done; echo line; sleep 0.1; done`))
}

// life runs a pod through kubelet's calls, with an exec, and records the duration.
func (s *soak) life(t *testing.T) {
	t.Helper()
	began := time.Now()
	pod := s.d.RunPod(t)
	c := pod.Run(t)
	harness.Equal(t, "output of an exec", c.Exec(t, "echo", "here"), "here")
	pod.Remove(t)
	s.lives = append(s.lives, time.Since(began))
}

// killPlugin makes a CNI plugin die from a signal. The daemon must find and kill the plugin's
// children among the neighbours' processes.
func (s *soak) killPlugin(t *testing.T) {
	t.Helper()
	began := time.Now()
	s.plugin.Inject(t, "ADD", faults.WorkDie)
	_, err := s.d.Cri.RunPodSandbox(t.Context(), s.d.PodConfig(t), "")
	s.plugin.Inject(t, "ADD", "")
	harness.WantCode(t, err, codes.Internal, "signal: killed")
	if took := time.Since(began); took > lifeBound {
		t.Errorf("a pod whose CNI plugin died took %v to fail", took)
	}
}

// attackExec runs an exec that changes the files of its descriptors.
func (s *soak) attackExec(t *testing.T) {
	t.Helper()
	_, _, err := s.d.Cri.ExecSync(t.Context(), s.execs.Id, []string{"chmod", "000", "/proc/self/fd/0", "/proc/self/fd/1", "/proc/self/fd/2"}, time.Minute)
	if err != nil && harness.ExitCode(err) != 1 {
		t.Errorf("an exec that changes its descriptors: %v", err)
	}
}

// attackLog reopens a log that has become a FIFO. The call may fail, but must return.
func (s *soak) attackLog(t *testing.T) {
	t.Helper()
	began := time.Now()
	_ = s.d.Cri.ReopenContainerLog(t.Context(), s.logs.Id)
	if took := time.Since(began); took > lifeBound {
		t.Errorf("ReopenContainerLog of a FIFO took %v", took)
	}
}

// checkVictim runs a container while another container traces its processes. The daemon must report
// its exit code.
func (s *soak) checkVictim(t *testing.T) {
	t.Helper()
	began := time.Now()
	// The command waits for a second without a child. The kernel would not notify the shell of a
	// traced child's exit.
	_, status := s.traced.RunToEnd(t, harness.Script("read -t 1 line <>/dev/ptmx; exit 7"))
	harness.Equal(t, "exit code of a traced container", status.ExitCode, 7)
	if took := time.Since(began); took > lifeBound {
		t.Errorf("a traced container took %v", took)
	}
}

// sample records the daemon's highest resource usage. The kernel keeps the peak of its memory.
func (s *soak) sample(t *testing.T) {
	t.Helper()
	var peak int
	_, err := fmt.Sscan(machine.StatusField(t, s.d.Cmd.Process.Pid, "VmHWM"), &peak)
	harness.Must(t, err)
	s.memory = max(s.memory, peak)
	s.descriptors = max(s.descriptors, machine.CountFiles(t, s.d.Cmd.Process.Pid, "fd"))
}

// restart kills the daemon, starts it and records the time until its first answer.
func (s *soak) restart(t *testing.T) {
	t.Helper()
	s.d.Kill(t)
	began := time.Now()
	s.d.Start(t)
	s.starts = append(s.starts, time.Since(began))
}

func (s *soak) report(t *testing.T) {
	t.Helper()
	slices.Sort(s.lives)
	slices.Sort(s.starts)
	t.Logf("%d pods, each %v (median) to %v; %d starts of the daemon, each %v to %v; at most %d kB of memory and %d descriptors", len(s.lives), s.lives[len(s.lives)/2],
		s.lives[len(s.lives)-1], len(s.starts), s.starts[len(s.starts)/2], s.starts[len(s.starts)-1], s.memory, s.descriptors)
	within := func(what string, got, bound any, ok bool) {
		if !ok {
			t.Errorf("%s: %v, more than %v", what, got, bound)
		}
	}
	slowest := s.lives[len(s.lives)-1]
	within("a pod's life", slowest, lifeBound, slowest <= lifeBound)
	slowest = s.starts[len(s.starts)-1]
	within("a start of the daemon", slowest, startBound, slowest <= startBound)
	within("the daemon's memory in kB", s.memory, memoryBound, s.memory <= memoryBound)
	within("the daemon's descriptors", s.descriptors, descriptorBound, s.descriptors <= descriptorBound)
}
