package packages

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"berth/integration/harness"
)

const (
	nodeAddress = "192.0.2.10" // TEST-NET-1
	manifests   = "/etc/kubernetes/manifests"
	patience    = 5 * time.Minute // a guest may be many times slower than a node
)

// run executes a command that must succeed and returns its output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := try(name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

func try(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// property returns a property of a unit.
func property(t *testing.T, unit, name string) string {
	t.Helper()
	return run(t, "systemctl", "show", "--property", name, "--value", unit)
}

func write(t *testing.T, path, content string) {
	t.Helper()
	harness.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	harness.Must(t, os.WriteFile(path, []byte(content), 0o600))
}

// eventually waits until a condition returns nil. On failure it prints the logs of kubelet, berth
// and more units.
func eventually(t *testing.T, what string, condition func() error, units ...string) {
	t.Helper()
	err := harness.PollUpTo(patience, time.Second, func() error {
		err := condition()
		if err != nil && property(t, "kubelet.service", "ActiveState") == "failed" {
			return nil
		}
		return err
	})
	if err == nil && property(t, "kubelet.service", "ActiveState") == "failed" {
		err = errors.New("kubelet has exited")
	}
	if err != nil {
		for _, unit := range append(units, "kubelet.service", "berth.service") {
			out, _ := exec.Command("journalctl", "--no-pager", "--lines", "60", "--output", "cat", "--unit", unit).CombinedOutput()
			t.Logf("log of %s:\n%s", unit, out)
		}
		t.Fatalf("not within %v: %s: %v", patience, what, err)
	}
}

// addAddress gives the node an address and a default route, which kubelet needs. An earlier test
// may have done it.
func addAddress(t *testing.T) {
	t.Helper()
	if exists(t, "/sys/class/net/eth0") {
		return
	}
	for _, args := range []string{
		"link add eth0 type veth peer name eth0-peer", "address add " + nodeAddress + "/24 dev eth0", "link set eth0 up",
		"link set eth0-peer up", "route add default via 192.0.2.1",
	} {
		run(t, "ip", strings.Fields(args)...)
	}
}

// completeCPUInfo adds the clock rate to /proc/cpuinfo, which a user-mode kernel leaves out.
// kubelet does not start without it.
func completeCPUInfo(t *testing.T) {
	t.Helper()
	info := string(harness.Get(os.ReadFile("/proc/cpuinfo"))(t))
	if strings.Contains(info, "cpu MHz") {
		return
	}
	const path = "/run/tmp/cpuinfo"
	write(t, path, strings.ReplaceAll(info, "model name", "cpu MHz\t\t: 1000.000\nmodel name"))
	run(t, "mount", "--bind", path, "/proc/cpuinfo")
}

// kubeletConfig is the configuration of a kubelet that runs static pods on berth.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: ` + nodeAddress + `
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
readOnlyPort: 10255
containerRuntimeEndpoint: unix:///run/berth/berth.sock
staticPodPath: ` + manifests + `
cgroupDriver: systemd
protectKernelDefaults: true
makeIPTablesUtilChains: false
failSwapOn: false
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
imageGCHighThresholdPercent: 100
`

// startKubelet starts kubelet as a unit of systemd. It uses the systemd driver, and with
// protectKernelDefaults it requires the kernel settings of the package.
func startKubelet(t *testing.T) {
	t.Helper()
	write(t, "/etc/kubernetes/kubelet.yaml", kubeletConfig)
	startKubeletWith(t, "/etc/kubernetes/kubelet.yaml")
}

// startKubeletWith starts kubelet in a unit, with a configuration file.
func startKubeletWith(t *testing.T, config string) {
	t.Helper()
	harness.Must(t, os.MkdirAll(manifests, 0o755))
	write(t, "/run/systemd/system/kubelet.service", `[Unit]
Description=kubelet
[Service]
ExecStart=`+filepath.Join(os.Getenv(kubernetesEnv), "kubelet")+` --config `+config+` --hostname-override node --node-ip `+nodeAddress+`
KillMode=process
`)
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "start", "kubelet.service")
}

// applyPod makes kubelet run a pod with a web server and a readiness probe that executes a command.
func applyPod(t *testing.T, name string) {
	t.Helper()
	write(t, filepath.Join(manifests, name+".yaml"), fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: %s
    imagePullPolicy: IfNotPresent
    command: [sh, -c, 'mkdir -p /site; echo served by %[1]s > /site/index.html; exec httpd -f -p 8080 -h /site']
    readinessProbe: {exec: {command: [test, -e, /site/index.html]}, periodSeconds: 2, timeoutSeconds: 30}
    resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
`, name, harness.BaseImage))
}

// findPod returns a static pod as kubelet sees it.
func findPod(name string) (*corev1.Pod, error) {
	client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + nodeAddress + ":10255/pods")
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var pods corev1.PodList
	if err := json.NewDecoder(answer.Body).Decode(&pods); err != nil {
		return nil, err
	}
	for i := range pods.Items {
		if pods.Items[i].Name == name+"-node" {
			return &pods.Items[i], nil
		}
	}
	return nil, fmt.Errorf("kubelet has no pod %s", name)
}

// life identifies the process of a pod's container, which a restart would replace.
type life struct {
	containerID string
	restarts    int32
	pid         string
	start       string // of the process, in clock ticks
}

// awaitPod waits until a pod is ready and serves, and returns its container's life.
func awaitPod(t *testing.T, name string) life {
	t.Helper()
	var l life
	eventually(t, "pod "+name+" is ready", func() error {
		pod, err := findPod(name)
		if err != nil {
			return err
		}
		if len(pod.Status.ContainerStatuses) == 0 || !pod.Status.ContainerStatuses[0].Ready {
			return fmt.Errorf("its status is %+v", pod.Status)
		}
		s := pod.Status.ContainerStatuses[0]
		l.containerID, l.restarts = strings.TrimPrefix(s.ContainerID, "berth://"), s.RestartCount
		return serves(pod.Status.PodIP, name)
	})
	l.pid, l.start = processOf(t, l.containerID)
	return l
}

// serves requests the page of a pod.
func serves(ip, name string) error {
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + ip + ":8080/index.html")
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	body := make([]byte, 100)
	n, _ := answer.Body.Read(body) // short and with an end
	if got := string(body[:n]); got != "served by "+name+"\n" {
		return fmt.Errorf("the pod serves %q", got)
	}
	return nil
}

// processOf returns the first process in a container's cgroup, and its start time. The cgroup must
// be a scope in the slice that kubelet created for the pod.
func processOf(t *testing.T, containerID string) (pid, start string) {
	t.Helper()
	found := harness.Get(filepath.Glob("/sys/fs/cgroup/kubepods.slice/*/*/berth-" + containerID + ".scope/cgroup.procs"))(t)
	if len(found) != 1 {
		t.Fatalf("cgroups of container %s: %v", containerID, found)
	}
	pids := strings.Fields(string(harness.Get(os.ReadFile(found[0]))(t)))
	if len(pids) == 0 {
		t.Fatalf("%s is empty", found[0])
	}
	stat := string(harness.Get(os.ReadFile("/proc/" + pids[0] + "/stat"))(t))
	return pids[0], strings.Fields(stat[strings.LastIndex(stat, ")")+1:])[19]
}

// alive reports whether the process of a life runs.
func (l life) alive() bool {
	stat, err := os.ReadFile("/proc/" + l.pid + "/stat")
	return err == nil && strings.Fields(string(stat[strings.LastIndex(string(stat), ")")+1:]))[19] == l.start
}

// mainPID returns the process ID of the daemon, which must be active.
func mainPID(t *testing.T) int {
	t.Helper()
	pid := harness.Get(strconv.Atoi(property(t, "berth.service", "MainPID")))(t)
	if state := property(t, "berth.service", "ActiveState"); pid == 0 || state != "active" {
		t.Fatalf("the unit is %s, process %d", state, pid)
	}
	return pid
}

// runsInstalled checks that the daemon is the program of the package.
func runsInstalled(t *testing.T) {
	t.Helper()
	runsProgram(t, "/usr/bin/berthd")
}

// runsProgram checks that the unit's main process runs a program.
func runsProgram(t *testing.T, path string) {
	t.Helper()
	exe := fmt.Sprintf("/proc/%d/exe", mainPID(t))
	harness.Equal(t, "the daemon's program", harness.Get(os.Readlink(exe))(t), path)
}

// exists reports whether a path exists.
func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}
