package integration

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"sigs.k8s.io/yaml"

	"berth/integration/harness"
	"berth/integration/machine"
)

// kubernetesEnv names the directory of the programs that integration/kubelet/build makes. If it is
// unset, the tests that need them are skipped, because the build takes ten minutes.
const kubernetesEnv = "BERTH_KUBERNETES"

const (
	kubeletNode    = "node"
	kubeletAddress = "192.0.2.10" // TEST-NET-1, which is not used elsewhere

	// kubeletPatience bounds waits for kubelet's periodic work. kubelet's back-off is ten seconds
	// or more, and it collects dead pods once a minute.
	kubeletPatience = 3 * time.Minute
	// kubeletPause is the time between two requests to kubelet, because many tests poll it at the
	// same time.
	kubeletPause = 200 * time.Millisecond
)

// node is a machine with a daemon and a kubelet.
type node struct {
	d   *harness.Daemon
	dir string // kubelet's files outside /var/lib/kubelet

	suffix  string   // of the names of cgroups; not empty if the machine has another node
	flags   []string // additional flags of kubelet
	config  string   // additional YAML of kubelet's configuration
	kubelet *program

	statsFromCRI bool // PodAndContainerStatsFromCRI is on
}

// kubernetesProgram returns the path of a program of Kubernetes, or skips the test.
func kubernetesProgram(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv(kubernetesEnv)
	if dir == "" {
		t.Skipf("%s is not set: export %[1]s=$(integration/kubelet/build all)", kubernetesEnv)
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%s: %v; integration/kubelet/build %s makes it", kubernetesEnv, err, name)
	}
	return path
}

// kubeletVersion returns the minor version of kubelet, such as 1.37.
func kubeletVersion(t *testing.T) string {
	t.Helper()
	out := string(harness.Get(exec.CommandContext(t.Context(), kubernetesProgram(t, "kubelet"), "--version").Output())(t))
	version := regexp.MustCompile(`v(1\.\d+)\.`).FindStringSubmatch(out)
	if version == nil {
		t.Fatalf("kubelet --version printed %q", out)
	}
	return version[1]
}

// startNode starts a daemon and a kubelet that reads its pods from a directory. At the end of the
// test kubelet must have removed its pods' files. The daemon's leak check follows.
func startNode(t *testing.T, config string, opts ...harness.DaemonOption) *node {
	t.Helper()
	n := newNode(t, config, opts...)
	n.start(t)
	t.Cleanup(func() { n.stop(t) })
	t.Cleanup(func() { n.awaitEmpty(t) })
	return n
}

// newNode prepares a node and starts the daemon, but not kubelet.
func newNode(t *testing.T, config string, opts ...harness.DaemonOption) *node {
	t.Helper()
	prepareNode(t)
	return newNodeOf(t, harness.StartDaemon(t, opts...), config)
}

// prepareNode prepares the machine for kubelet.
func prepareNode(t *testing.T) {
	t.Helper()
	kubernetesProgram(t, "kubelet")
	// kubelet has fixed places for device plugins and links to logs.
	hideBelowTmpfs(t, "/var/lib")
	hideBelowTmpfs(t, "/var/log")
	addNodeAddress(t)
}

// newNodeOf prepares a node with the given runtime, but does not start kubelet.
func newNodeOf(t *testing.T, d *harness.Daemon, config string) *node {
	t.Helper()
	n := &node{d: d, dir: d.Dir + "/kubelet", config: config}
	for _, dir := range []string{n.manifests(), n.hostDir()} {
		harness.Must(t, os.MkdirAll(dir, 0o755))
	}
	n.makeCgroups(t)
	t.Cleanup(func() {
		if n.kubelet != nil {
			n.kubelet.finish(t)
		}
	})
	return n
}

func (n *node) manifests() string { return n.dir + "/manifests" }
func (n *node) hostDir() string   { return n.dir + "/host" } // contains everything that pods mount from the host
func (n *node) cgroup() string    { return "/" + harness.Machine + "/kubelet" + n.suffix }

// kubeletCgroup returns kubelet's own cgroup, which is the same in every hierarchy.
func (n *node) kubeletCgroup() string { return n.cgroup() + ".service" }

func hideBelowTmpfs(t *testing.T, dir string) {
	t.Helper()
	harness.Must(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"))
	t.Cleanup(func() { harness.Must(t, syscall.Unmount(dir, 0)) })
}

// addNodeAddress gives the machine an address and a default route, from which kubelet derives the
// node's address. Probes and host ports use it.
func addNodeAddress(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{
		{"link", "add", "eth0", "type", "veth", "peer", "name", "eth0-peer"},
		{"address", "add", kubeletAddress + "/24", "dev", "eth0"},
		{"link", "set", "eth0", "up"},
		{"link", "set", "eth0-peer", "up"},
		{"route", "add", "default", "via", "192.0.2.1"},
	} {
		if out, err := exec.CommandContext(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	t.Cleanup(func() { harness.RemoveLink(t, "eth0") })
}

// makeCgroups makes the cgroups of kubelet and of its pods in every hierarchy.
func (n *node) makeCgroups(t *testing.T) {
	t.Helper()
	for _, dir := range hierarchies(t) {
		for _, path := range []string{dir + n.cgroup(), dir + n.kubeletCgroup()} {
			harness.Must(t, os.MkdirAll(path, 0o755))
			t.Cleanup(func() { removeCgroupTree(t, path) })
		}
	}
	if machine.Cgroup2() { // kubelet refuses a cgroup without controllers
		dir := "/sys/fs/cgroup/" + harness.Machine
		controllers := strings.Fields(string(harness.Get(os.ReadFile(dir + "/cgroup.controllers"))(t)))
		harness.Must(t, os.WriteFile(dir+"/cgroup.subtree_control", []byte("+"+strings.Join(controllers, " +")), 0o600))
	}
}

// hierarchies returns the mount points of the cgroup hierarchies.
func hierarchies(t *testing.T) []string {
	t.Helper()
	if machine.Cgroup2() {
		return []string{"/sys/fs/cgroup"}
	}
	all, err := filepath.Glob("/sys/fs/cgroup/*")
	harness.Must(t, err)
	return slices.DeleteFunc(all, func(dir string) bool {
		info, err := os.Lstat(dir) // cpu and cpuacct may be links to one hierarchy
		return err != nil || !info.IsDir()
	})
}

// removeCgroupTree removes cgroups without processes.
func removeCgroupTree(t *testing.T, top string) {
	t.Helper()
	var dirs []string
	harness.Must(t, filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			dirs = append(dirs, path)
		}
		return err
	}))
	for _, dir := range slices.Backward(dirs) {
		harness.Must(t, os.Remove(dir))
	}
}

// start starts kubelet and waits until it answers.
func (n *node) start(t *testing.T) {
	t.Helper()
	config := n.dir + "/config.yaml"
	harness.Must(t, os.WriteFile(config, []byte(n.configuration()), 0o600))
	args := append([]string{
		kubernetesProgram(t, "kubelet"), "--config", config, "--hostname-override", kubeletNode, "--node-ip", kubeletAddress, "--v", "2",
	}, n.flags...)
	n.kubelet = startProgram(t, "kubelet", n.dir+"/kubelet.log", n.withOwnSysctls(t, args)...)
	n.kubelet.waitFor(t, "it answers", func() error {
		_, err := n.list()
		return err
	})
}

// configuration returns kubelet's configuration. It disables limits for memory and disk, because
// other tests use the machine, too.
func (n *node) configuration() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: %s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
readOnlyPort: 10255
containerRuntimeEndpoint: unix://%s
staticPodPath: %s
podLogsDir: %s
cgroupDriver: cgroupfs
cgroupRoot: %s
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
protectKernelDefaults: true
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
imageGCHighThresholdPercent: 100
%s
`, kubeletAddress, n.d.Socket, n.manifests(), n.d.LogDir, n.cgroup(), n.config)
}

// withOwnSysctls returns a command line that runs args in kubelet's cgroup, with the kernel
// parameters that kubelet expects. Otherwise kubelet would change the machine's parameters. They
// are files, mounted in a separate mount namespace. Elsewhere such mounts would make the kernel
// refuse proc to a container's user namespace. kubelet's other mounts must reach the daemon.
func (n *node) withOwnSysctls(t *testing.T, args []string) []string {
	t.Helper()
	const script = `set -e
dir=$1 cgroup=$2; shift 2
for procs in /sys/fs/cgroup"$cgroup"/cgroup.procs /sys/fs/cgroup/*"$cgroup"/cgroup.procs; do
	case $procs in */cpuset/*) continue ;; esac # refuses processes before it has CPUs, and kubelet does not use it
	[ ! -e "$procs" ] || echo $$ >"$procs"
done
mount --make-private /proc
grep -q 'cpu MHz' /proc/cpuinfo || { # a user-mode kernel leaves it out
	{ cat /proc/cpuinfo; echo 'cpu MHz : 1000.000'; } >"$dir.cpuinfo"
	mount --bind "$dir.cpuinfo" /proc/cpuinfo
}
(cd "$dir" && find . -type f) | while read -r file; do mount --bind "$dir/$file" "/proc/sys/$file"; done
exec "$@"`
	dir := n.dir + "/sysctl"
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		harness.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(value+"\n"), 0o600))
	}
	return append([]string{"unshare", "--mount", "--propagation", "unchanged", "bash", "-c", script, "kubelet", dir, n.kubeletCgroup()}, args...)
}

// removePodCgroups removes the cgroups that kubelet leaves when it ends. Their pods are gone.
func (n *node) removePodCgroups(t *testing.T) {
	t.Helper()
	for _, dir := range hierarchies(t) {
		pods := dir + n.cgroup() + "/kubepods"
		if _, err := os.Stat(pods); err == nil {
			removeCgroupTree(t, pods)
		}
	}
}

func (n *node) stop(t *testing.T) {
	t.Helper()
	n.kubelet.stop(t)
}

// awaitEmpty waits until kubelet has removed its pods' sandboxes, volumes and cgroups.
func (n *node) awaitEmpty(t *testing.T) {
	t.Helper()
	n.kubelet.waitFor(t, "all pods are removed", func() error {
		sandboxes, err := n.d.Cri.ListPodSandbox(context.Background(), nil) // the test's own context is cancelled
		if err == nil && len(sandboxes) > 0 {
			err = fmt.Errorf("%d sandboxes, one is %v", len(sandboxes), sandboxes[0])
		}
		if left := machine.ReadDir("/var/lib/kubelet/pods"); err == nil && len(left) > 0 {
			err = fmt.Errorf("volumes of pods %v", left)
		}
		if left := n.podCgroups(t); err == nil && len(left) > 0 {
			err = fmt.Errorf("cgroups %v", left)
		}
		return err
	})
}

// podCgroups returns the cgroups that kubelet made for pods.
func (n *node) podCgroups(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, dir := range hierarchies(t) {
		_ = filepath.WalkDir(dir+n.cgroup(), func(path string, _ fs.DirEntry, _ error) error {
			if strings.HasPrefix(filepath.Base(path), "pod") {
				all = append(all, path)
			}
			return nil // may have been removed meanwhile
		})
	}
	return all
}

// list returns all pods that kubelet reports.
func (n *node) list() ([]corev1.Pod, error) {
	var pods corev1.PodList
	err := n.read("/pods", &pods)
	return pods.Items, err
}

// read reads a JSON document from kubelet's read-only port.
func (n *node) read(path string, document any) error {
	body, err := n.readAll(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, document)
}

func (n *node) readAll(path string) ([]byte, error) {
	client := http.Client{Timeout: harness.Patience, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + kubeletAddress + ":10255" + path)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, answer.Status, body)
	}
	return body, err
}

// metric returns the value of one of kubelet's own metrics without labels.
func (n *node) metric(t *testing.T, name string) float64 {
	t.Helper()
	for line := range strings.Lines(string(harness.Get(n.readAll("/metrics"))(t))) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return harness.Get(strconv.ParseFloat(strings.TrimSpace(value), 64))(t)
		}
	}
	return 0 // a counter appears with its first count
}

// userNamespaces reports whether the runtime supports user namespaces here.
func (n *node) userNamespaces(t *testing.T) bool {
	t.Helper()
	status := harness.Get(n.d.Cri.Status(t.Context(), false))(t)
	return slices.ContainsFunc(status.RuntimeHandlers, func(h *runtimeapi.RuntimeHandler) bool {
		return h.GetFeatures().GetUserNamespaces()
	})
}

// --- pods ---------------------------------------------------------------------

// kubePod is a pod that kubelet runs on a node.
type kubePod struct {
	n    *node
	name string // with the node's name, which kubelet appends to static pods
}

// apply makes kubelet run a pod with a name and spec (YAML) until the test ends. The spec may omit
// common fields: images, the command of a container that only runs, and the name of container main.
// The volume host is a directory of the pod on the host.
func (n *node) apply(t *testing.T, name, spec string) *kubePod {
	t.Helper()
	pod := corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"app": name}}}
	harness.Must(t, yaml.UnmarshalStrict([]byte(spec), &pod.Spec))
	harness.Must(t, os.MkdirAll(n.podDir(name), 0o755))
	host := corev1.Volume{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: n.podDir(name)}}}
	if strings.Contains(spec, "{name: host, ") {
		pod.Spec.Volumes = append(pod.Spec.Volumes, host)
	}
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			list[i].Name = cmp.Or(list[i].Name, "main")
			list[i].Image = cmp.Or(list[i].Image, harness.BaseImage)
			if len(list[i].Command) == 0 {
				list[i].Command = []string{"sleep", "100000"}
			}
		}
	}
	if pod.Spec.TerminationGracePeriodSeconds == nil {
		grace := int64(1) // a shell as process 1 ignores SIGTERM
		pod.Spec.TerminationGracePeriodSeconds = &grace
	}
	document := harness.Get(yaml.Marshal(&pod))(t)
	hidden := filepath.Join(n.manifests(), "."+name)
	harness.Must(t, os.WriteFile(hidden, document, 0o600))
	harness.Must(t, os.Rename(hidden, n.manifest(name)))
	p := &kubePod{n: n, name: name + "-" + kubeletNode}
	t.Cleanup(func() { p.withdraw(t) })
	return p
}

func (n *node) manifest(name string) string { return filepath.Join(n.manifests(), name+".yaml") }
func (n *node) podDir(name string) string   { return filepath.Join(n.hostDir(), name) }

// base returns the pod's name in its manifest.
func (p *kubePod) base() string { return strings.TrimSuffix(p.name, "-"+kubeletNode) }

// hostFile returns the path of a file in the pod's directory on the host.
func (p *kubePod) hostFile(name string) string { return filepath.Join(p.n.podDir(p.base()), name) }

// withdraw removes the pod's manifest, if it exists, so that kubelet deletes the pod.
func (p *kubePod) withdraw(t *testing.T) {
	t.Helper()
	if err := os.Remove(p.n.manifest(p.base())); err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
}

// find returns the pod that kubelet reports, or nil.
func (p *kubePod) find() (*corev1.Pod, error) {
	pods, err := p.n.list()
	for i := range pods {
		if pods[i].Name == p.name {
			return &pods[i], nil
		}
	}
	return nil, err
}

// await waits until the pod fulfils a condition, and returns it.
func (p *kubePod) await(t *testing.T, what string, condition func(*corev1.Pod) error) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	p.n.kubelet.waitFor(t, p.name+": "+what, func() error {
		var err error
		if pod, err = p.find(); err != nil {
			return err
		}
		if pod == nil {
			return fmt.Errorf("kubelet does not report the pod")
		}
		if err = condition(pod); err != nil {
			status, _ := json.Marshal(pod.Status)
			err = fmt.Errorf("%w; status of the pod: %s", err, status)
		}
		return err
	})
	return pod
}

func (p *kubePod) awaitReady(t *testing.T) *corev1.Pod {
	t.Helper()
	return p.await(t, "ready", ready)
}

func (p *kubePod) awaitPhase(t *testing.T, phase corev1.PodPhase) *corev1.Pod {
	t.Helper()
	return p.await(t, string(phase), func(pod *corev1.Pod) error {
		if pod.Status.Phase != phase {
			return harness.Unexpected("the phase", pod.Status.Phase, phase)
		}
		return nil
	})
}

func ready(pod *corev1.Pod) error { return podCondition(pod, corev1.PodReady, corev1.ConditionTrue) }

func notReady(pod *corev1.Pod) error {
	return podCondition(pod, corev1.PodReady, corev1.ConditionFalse)
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType, want corev1.ConditionStatus) error {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			if c.Status != want {
				return harness.Unexpected(string(kind), c.Status, want)
			}
			return nil
		}
	}
	return fmt.Errorf("the pod has no condition %s", kind)
}

// containerStatus returns kubelet's status of a container of any kind. It may be empty.
func containerStatus(pod *corev1.Pod, name string) corev1.ContainerStatus {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses) {
		if s.Name == name {
			return s
		}
	}
	return corev1.ContainerStatus{}
}

// terminated returns the current or else the last termination of a container; nil if there is none.
func terminated(pod *corev1.Pod, name string) *corev1.ContainerStateTerminated {
	s := containerStatus(pod, name)
	return cmp.Or(s.State.Terminated, s.LastTerminationState.Terminated)
}

// container gives access to a running container of the pod through CRI.
func (p *kubePod) container(t *testing.T, name string) *harness.Container {
	t.Helper()
	var id string
	p.await(t, name+" runs", func(pod *corev1.Pod) error {
		s := containerStatus(pod, name)
		if s.State.Running == nil {
			return fmt.Errorf("%s does not run", name)
		}
		id = strings.TrimPrefix(s.ContainerID, "berth://")
		return nil
	})
	config := &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: name}}
	return &harness.Container{Pod: &harness.Pod{D: p.n.d}, Id: id, Config: config}
}

// awaitFile waits until a file has some content, and returns it.
func awaitFile(t *testing.T, path string) string {
	t.Helper()
	var content []byte
	if err := harness.WaitUpTo(kubeletPatience, func() error {
		var err error
		if content, err = os.ReadFile(path); err == nil && len(content) == 0 {
			err = fmt.Errorf("it is empty")
		}
		return err
	}); err != nil {
		t.Fatalf("%s is written: %v", path, err)
	}
	return string(content)
}
