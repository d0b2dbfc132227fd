package integration

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/internal/testutil"
)

// probedPod is probed by kubelet three times a second, one time of these through the runtime.
const probedPod = `
containers:
- command: [httpd, -f, -p, "8080", -h, /www]
  startupProbe: {exec: {command: ["true"]}, periodSeconds: 1, timeoutSeconds: 20}
  readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1}
  livenessProbe: {exec: {command: ["true"]}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1}
- name: other
  readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1}
`

// kubelet does not notice that the daemon is replaced: it logs no error, no call and no probe of it
// fails, and its containers run on. The same load without upgrades shows which errors of kubelet
// have other causes.
func TestKubeletThroughUpgrades(t *testing.T) {
	probed, upgrades := 3, 3
	if testutil.AllTests() {
		probed, upgrades = 20, 50
	}
	n := startNode(t, "", harness.WithHeldSocket)
	var pods []*kubePod
	for i := range probed {
		pods = append(pods, n.apply(t, fmt.Sprintf("probed-%d", i), probedPod))
	}
	before := map[string]*corev1.Pod{}
	for _, p := range pods {
		before[p.name] = p.awaitReady(t)
	}
	p := &prober{client: harness.RawRuntime(t, n.d), container: pods[0].container(t, "main").Id}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var probing sync.WaitGroup
	probing.Go(func() { p.run(ctx) })
	churn, wait := n.startAndStopPods(ctx, t)

	quiet := n.complaintsDuring(t, func() {
		for range min(upgrades, 10) {
			churn.awaitAll(t)
		}
	})
	var gaps []time.Duration
	began, first := time.Now(), churn.total()
	upgraded := n.complaintsDuring(t, func() {
		for range upgrades {
			gap, _, _ := p.upgrade(t, n.d)
			gaps = append(gaps, gap)
			harness.Must(t, healthy("http://127.0.0.1:10248/healthz"))
			churn.awaitAll(t) // clients repeat a call once, so none may meet two upgrades
		}
	})
	rate := float64(churn.total()-first) / time.Since(began).Seconds()
	cancel()
	wait()
	probing.Wait()

	for complaint, times := range upgraded {
		if quiet[complaint] == 0 && !otherCauses.MatchString(complaint) {
			t.Errorf("during upgrades only, %d times: %s", times, complaint)
		}
	}
	for _, p := range pods {
		p.wasLeftAlone(t, before[p.name])
	}
	p.check(t)
	t.Logf("%d probed pods, %d upgrades, %.1f pods a second started and stopped by kubelet, %s; gap: %s; "+
		"complaints without upgrades: %d, with: %d", probed, upgrades, rate, p.results(), spread(gaps), sum(quiet), sum(upgraded))
}

// wasLeftAlone expects that the pod's containers run as before, and that the pod was always ready.
func (p *kubePod) wasLeftAlone(t *testing.T, before *corev1.Pod) {
	t.Helper()
	pod := p.awaitReady(t)
	for _, c := range before.Status.ContainerStatuses {
		after := containerStatus(pod, c.Name)
		harness.Equal(t, "ID of "+p.name+"/"+c.Name, after.ContainerID, c.ContainerID)
		harness.Equal(t, "restarts of "+p.name+"/"+c.Name, after.RestartCount, 0)
	}
	harness.Equal(t, "time since which "+p.name+" is ready", readySince(pod), readySince(before))
}

func readySince(pod *corev1.Pod) time.Time {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.LastTransitionTime.Time
		}
	}
	return time.Time{}
}

// kubeChurn makes kubelet start and stop static pods.
type kubeChurn struct {
	n      *node
	client runtimeapi.RuntimeServiceClient
	done   [kubeChurnWorkers]atomic.Int32 // number of pods of each worker
	failed chan error
}

const kubeChurnWorkers = 8

// total returns how many pods were started and stopped.
func (c *kubeChurn) total() (n int) {
	for worker := range c.done {
		n += int(c.done[worker].Load())
	}
	return n
}

// startAndStopPods makes kubelet start and stop pods until ctx ends. The processes ignore SIGTERM,
// so most of the time a stop is in flight.
func (n *node) startAndStopPods(ctx context.Context, t *testing.T) (c *kubeChurn, wait func()) {
	c = &kubeChurn{n: n, client: harness.RawRuntime(t, n.d), failed: make(chan error, kubeChurnWorkers)}
	for worker := range kubeChurnWorkers {
		go func() {
			var err error
			for i := 0; ctx.Err() == nil && err == nil; i++ {
				err = c.one(context.WithoutCancel(ctx), fmt.Sprintf("churn-%d-%d", worker, i))
				c.done[worker].Add(1)
			}
			c.failed <- err
		}()
	}
	return c, func() {
		for range kubeChurnWorkers {
			harness.Must(t, <-c.failed)
		}
	}
}

// one adds the manifest of a pod until its container runs, and waits for the pod's end.
func (c *kubeChurn) one(ctx context.Context, name string) error {
	// kubelet takes a text that begins with a brace for JSON.
	manifest := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default}
spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "%s", command: [sleep, "100000"]}]}
`, name, harness.BaseImage)
	hidden := filepath.Join(c.n.manifests(), "."+name)
	if err := os.WriteFile(hidden, []byte(manifest), 0o600); err != nil {
		return err
	}
	if err := os.Rename(hidden, c.n.manifest(name)); err != nil {
		return err
	}
	err := c.awaitRunning(ctx, name, 1)
	if err := os.Remove(c.n.manifest(name)); err != nil {
		return err
	}
	if err == nil {
		err = c.awaitRunning(ctx, name, 0)
	}
	return err
}

// awaitRunning waits until a pod has that many running containers.
func (c *kubeChurn) awaitRunning(ctx context.Context, name string, want int) error {
	running := &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{
		LabelSelector: map[string]string{"io.kubernetes.pod.name": name + "-" + kubeletNode},
		State:         &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
	}}
	return harness.PollUpTo(kubeletPatience, kubeletPause/4, func() error {
		list, err := c.client.ListContainers(ctx, running)
		if err == nil && len(list.Containers) != want {
			err = harness.Unexpected("number of running containers of "+name, len(list.Containers), want)
		}
		return err
	})
}

// awaitAll waits until each worker's present pod has ended.
func (c *kubeChurn) awaitAll(t *testing.T) {
	t.Helper()
	for worker := range c.done {
		before := c.done[worker].Load()
		c.n.kubelet.waitFor(t, fmt.Sprintf("worker %d stops its pod", worker), func() error {
			if c.done[worker].Load() == before {
				return harness.Unexpected("the number of pods", before, "more")
			}
			return nil
		})
	}
}

// complaints counts what kubelet logs as errors, and failed probes. Failed calls of the runtime are
// among the former.
type complaints map[string]int

func sum(c complaints) (n int) {
	for times := range maps.Values(c) {
		n += times
	}
	return n
}

// complaintsDuring returns kubelet's complaints while f runs.
func (n *node) complaintsDuring(t *testing.T, f func()) complaints {
	t.Helper()
	counters, log := n.failures(t), len(harness.Get(os.ReadFile(n.kubelet.logFile))(t))
	f()
	found := complaints{}
	for name, value := range n.failures(t) {
		if more := value - counters[name]; more > 0 {
			found[name] = more
		}
	}
	for line := range strings.Lines(string(harness.Get(os.ReadFile(n.kubelet.logFile))(t)[log:])) {
		if kind := errorKind(line); kind != "" {
			found[kind]++
		}
	}
	return found
}

// failures returns kubelet's counters of failed probes.
func (n *node) failures(t *testing.T) map[string]int {
	t.Helper()
	all := map[string]int{}
	for line := range strings.Lines(string(harness.Get(n.readAll("/metrics/probes"))(t))) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "} ")
		if strings.HasPrefix(name, "prober_probe_total{") && !strings.Contains(name, `result="successful"`) {
			all[numbers.ReplaceAllString(name, "#")] += int(harness.Get(strconv.ParseFloat(value, 64))(t))
		}
	}
	return all
}

var (
	// otherCauses are errors that kubelet logs now and then whether or not berth is replaced. It asks
	// for the status of a container that it has removed meanwhile, it notices a busy machine, and
	// cAdvisor watches a cgroup that has just been removed.
	otherCauses = regexp.MustCompile(`"ContainerStatus from runtime service failed" .*code = NotFound .*pod="churn|Housekeeping took longer|Failed to watch directory`)
	// klogHead is the head of a klog line: level, date, time, thread.
	klogHead = regexp.MustCompile(`^([IWEF])\d{4} \S+ +\d+ `)
	numbers  = regexp.MustCompile(`[0-9a-f]*[0-9][0-9a-f-]*`)
)

// errorKind returns a line of kubelet's log without time, numbers and IDs, if it is an error or
// says that a probe failed.
func errorKind(line string) string {
	head := klogHead.FindStringSubmatch(line)
	if head == nil || !slices.Contains([]string{"E", "F"}, head[1]) && !strings.Contains(line, `"Probe`) {
		return ""
	}
	return numbers.ReplaceAllString(strings.TrimSpace(line[len(head[0]):]), "#")
}
