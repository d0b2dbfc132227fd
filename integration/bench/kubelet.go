package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"berth/integration/bench/subject"
)

const (
	kubeletPods    = 110          // kubelet's default for a node
	kubeletAddress = "192.0.2.10" // TEST-NET-1
	kubeletPause   = 200 * time.Millisecond
)

// throughKubelet gives a real kubelet a node's maximum of pods, as manifests in a directory, and
// waits until they are ready. It needs a machine of its own, because kubelet has fixed places in
// /var/lib.
var throughKubelet = experiment{
	name: "110 pods through kubelet", rows: []string{"kubelet-110"}, applies: func(s *subject.Subject) bool { return ownImages(s) && s.Daemon != nil },
	samples: atMost(5), limit: 6 * time.Minute, budget: 2 * time.Minute,
	sample: func(ctx context.Context, c *contestant) (v values, err error) {
		n, err := c.b.startNode(ctx, c.s)
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, n.stop()) }()
		begin := time.Now()
		for i := range kubeletPods {
			if err := n.writeManifest(fmt.Sprintf("pod%d", i)); err != nil {
				return nil, err
			}
		}
		if err := n.await(ctx, kubeletPods, ready); err != nil {
			return nil, err
		}
		took := time.Since(begin)
		if err := n.removeManifests(); err != nil {
			return nil, err
		}
		if err := n.awaitNoSandbox(ctx); err != nil {
			return nil, err
		}
		return values{"kubelet-110": {took.Seconds()}}, nil
	},
}

// node is a kubelet with a runtime.
type node struct {
	s      *subject.Subject
	dir    string
	cmd    *exec.Cmd
	mounts []string // stop removes them in reverse order
}

func (n *node) manifests() string { return filepath.Join(n.dir, "manifests") }

// startNode starts a kubelet on a runtime and waits until it answers.
func (b *bench) startNode(ctx context.Context, s *subject.Subject) (*node, error) {
	n := &node{s: s, dir: filepath.Join(b.state, "kubelet")}
	err := n.prepare(ctx, b)
	if err == nil {
		err = n.await(ctx, 0, func(*corev1.Pod) bool { return false })
	}
	if err != nil {
		return nil, errors.Join(err, n.stop())
	}
	return n, nil
}

func (n *node) prepare(ctx context.Context, b *bench) error {
	// kubelet uses fixed places for pod directories, device plugins and links to logs.
	for _, dir := range []string{"/var/lib", "/var/log"} {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("hide %s: %w", dir, err)
		}
		n.mounts = append(n.mounts, dir)
	}
	if err := os.MkdirAll(n.manifests(), 0o755); err != nil {
		return err
	}
	const link = `ip link show eth0 >/dev/null 2>&1 || { ip link add eth0 type veth peer name eth0-peer && ip address add ` + kubeletAddress + `/24 dev eth0 &&
		ip link set eth0 up && ip link set eth0-peer up && ip route add default via 192.0.2.1; }`
	if out, err := exec.CommandContext(ctx, "sh", "-c", link).CombinedOutput(); err != nil {
		return fmt.Errorf("add the node's address: %w: %s", err, out)
	}
	cgroup := filepath.Join("/", b.machine, "kubelet")
	for _, dir := range hierarchies() {
		if err := os.MkdirAll(dir+cgroup, 0o755); err != nil {
			return err
		}
	}
	config := filepath.Join(n.dir, "config.yaml")
	if err := os.WriteFile(config, []byte(n.configuration(cgroup)), 0o600); err != nil {
		return err
	}
	return n.startKubelet(b.kubelet, config)
}

// hierarchies returns the mount points of the cgroup hierarchies.
func hierarchies() []string {
	if subject.Cgroup2() {
		return []string{"/sys/fs/cgroup"}
	}
	all, _ := filepath.Glob("/sys/fs/cgroup/*") // the pattern is valid
	return slices.DeleteFunc(all, func(dir string) bool {
		info, err := os.Lstat(dir) // cpu and cpuacct may be links to one hierarchy
		return err != nil || !info.IsDir()
	})
}

func (n *node) configuration(cgroup string) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %[1]s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
readOnlyPort: 10255
containerRuntimeEndpoint: unix://%[2]s
staticPodPath: %[3]s
podLogsDir: %[4]s
cgroupDriver: cgroupfs
cgroupRoot: %[5]s
maxPods: %[6]d
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
protectKernelDefaults: true
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
imageGCHighThresholdPercent: 100
`, kubeletAddress, n.s.Daemon.Socket, n.manifests(), filepath.Join(n.dir, "logs"), cgroup, kubeletPods+10)
}

// startKubelet starts kubelet in a mount namespace. In it, files with kubelet's wanted values cover
// the kernel's parameters, because kubelet would change those of this machine. kubelet's other
// mounts must reach the runtime.
func (n *node) startKubelet(program, config string) error {
	const script = `set -e; dir=$1; shift
mount --make-private /proc
(cd "$dir" && find . -type f) | while read -r file; do mount --bind "$dir/$file" "/proc/sys/$file"; done
exec "$@"`
	dir := filepath.Join(n.dir, "sysctl")
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(value+"\n"), 0o600); err != nil {
			return err
		}
	}
	log, err := os.Create(filepath.Join(n.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	n.cmd = exec.Command("unshare", "--mount", "--propagation", "unchanged", "bash", "-c", script, "kubelet", dir,
		program, "--config", config, "--hostname-override", "node", "--node-ip", kubeletAddress)
	n.cmd.Stdout, n.cmd.Stderr = log, log
	return n.cmd.Start()
}

// stopLimit bounds kubelet's shutdown.
const stopLimit = 30 * time.Second

// stop ends kubelet and removes its directories.
func (n *node) stop() error {
	var errs []error
	if n.cmd != nil && n.cmd.Process != nil {
		errs = append(errs, n.cmd.Process.Signal(unix.SIGTERM))
		enough := time.AfterFunc(stopLimit, func() { _ = n.cmd.Process.Kill() }) // Wait returns the error
		defer enough.Stop()
		var exit *exec.ExitError
		if err := n.cmd.Wait(); err != nil && (!errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGTERM) {
			errs = append(errs, fmt.Errorf("kubelet: %w", err))
		}
	}
	for _, dir := range slices.Backward(n.mounts) {
		errs = append(errs, unix.Unmount(dir, unix.MNT_DETACH))
	}
	return errors.Join(append(errs, os.RemoveAll(n.dir))...)
}

func (n *node) manifest(name string) string { return filepath.Join(n.manifests(), name+".yaml") }

// writeManifest adds the manifest of one more pod.
func (n *node) writeManifest(name string) error {
	grace := int64(1)
	document, err := yaml.Marshal(&corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers:                    []corev1.Container{{Name: "main", Image: n.s.Image, Command: n.s.Command, ImagePullPolicy: corev1.PullIfNotPresent}},
		},
	})
	if err != nil {
		return err
	}
	hidden := filepath.Join(n.manifests(), "."+name)
	if err := os.WriteFile(hidden, document, 0o600); err != nil {
		return err
	}
	return os.Rename(hidden, n.manifest(name))
}

func (n *node) removeManifests() error {
	all, err := filepath.Glob(n.manifest("*"))
	for _, path := range all {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

func ready(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// await waits until kubelet answers and want pods fulfil the condition.
func (n *node) await(ctx context.Context, want int, condition func(*corev1.Pod) bool) error {
	return poll(ctx, func() error {
		pods, err := n.pods(ctx)
		if err != nil {
			return err
		}
		got := 0
		for i := range pods {
			if condition(&pods[i]) {
				got++
			}
		}
		if got < want {
			return fmt.Errorf("%d of %d pods are ready", got, want)
		}
		return nil
	})
}

// awaitNoSandbox waits until kubelet has removed all pods.
func (n *node) awaitNoSandbox(ctx context.Context) error {
	return poll(ctx, func() error {
		count, err := n.s.CountAllPods(ctx)
		if err == nil && count > 0 {
			err = fmt.Errorf("%d pods are left", count)
		}
		return err
	})
}

// poll calls ask until it succeeds or ctx ends.
func poll(ctx context.Context, ask func() error) error {
	for {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kubelet: %w: %w", ctx.Err(), err)
		case <-time.After(kubeletPause):
		}
	}
}

// pods returns all pods that kubelet reports.
func (n *node) pods(ctx context.Context) ([]corev1.Pod, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+kubeletAddress+":10255/pods", nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("/pods: %s", answer.Status)
	}
	var list corev1.PodList
	err = json.NewDecoder(answer.Body).Decode(&list)
	return list.Items, err
}
