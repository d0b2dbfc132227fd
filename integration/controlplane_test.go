package integration

import (
	"bufio"
	"context"
	"errors"
	"fmt"
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

	"berth/integration/harness"
	"berth/integration/inventory"
	"berth/integration/machine"
)

// These are use cases of kubectl on a cluster whose node runs berth. The subtests run in parallel
// and mostly wait, so use -parallel 16.
func TestControlPlane(t *testing.T) {
	c := startCluster(t)
	for name, test := range controlPlane {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c)
		})
	}
}

var controlPlane = map[string]func(*testing.T, *cluster){
	"RunAndExec":    testControlPlaneExec,
	"Logs":          testControlPlaneLogs,
	"Attach":        testControlPlaneAttach,
	"Copy":          testControlPlaneCopy,
	"PortForward":   testControlPlanePortForward,
	"Debug":         testControlPlaneDebug,
	"Deployment":    testControlPlaneDeployment,
	"Job":           testControlPlaneJob,
	"Resize":        testControlPlaneResize,
	"ImageVolume":   testControlPlaneImageVolume,
	"UserNamespace": testControlPlaneUserNamespace,
	"HostNetwork":   testControlPlaneHostNetwork,
	"NodeStatus":    testControlPlaneNodeStatus,
}

// run starts a pod by kubectl run and waits until it is ready.
func (c *cluster) run(t *testing.T, name string, args ...string) {
	t.Helper()
	c.kubectl(t, append([]string{"run", name, "--image", harness.BaseImage}, args...)...)
	c.wait(t, "pod/"+name, "condition=Ready")
}

func testControlPlaneExec(t *testing.T, c *cluster) {
	c.run(t, "exec", "--command", "--", "sleep", "100000")
	harness.Equal(t, "output", c.kubectl(t, "exec", "exec", "--", "sh", "-c", "echo out; echo err >&2"), "out\n")
	harness.Equal(t, "output of cat with input", c.kubectlInput(t, "in\n", "exec", "-i", "exec", "--", "cat"), "in\n")

	_, stderr, err := c.try("", "exec", "exec", "--", "sh", "-c", "echo err >&2; exit 3")
	if !strings.HasPrefix(stderr, "err\n") {
		t.Errorf("standard error is %q", stderr)
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("error of a command with exit code 3: %v", err)
	}

	const size = 20 << 20
	harness.Equal(t, "bytes of a long output", len(c.kubectl(t, "exec", "exec", "--", "head", "-c", fmt.Sprint(size), "/dev/zero")), size)
}

func testControlPlaneLogs(t *testing.T, c *cluster) {
	c.kubectl(t, "run", "logs", "--image", harness.BaseImage, "--restart", "Never", "--command", "--",
		"sh", "-c", "i=0; while [ $i -lt 50 ]; do i=$((i+1)); echo line $i; usleep 100000; done")
	c.wait(t, "pod/logs", "jsonpath={.status.containerStatuses[0].state.running}")
	out := c.kubectl(t, "logs", "-f", "logs") // ends with the container
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	if len(lines) != 50 || lines[0] != "line 1" || lines[49] != "line 50" {
		t.Errorf("the log is %q", out)
	}
	harness.Equal(t, "the last line", c.kubectl(t, "logs", "--tail=1", "logs"), "line 50\n")
}

func testControlPlaneAttach(t *testing.T, c *cluster) {
	c.kubectl(t, "run", "attach", "--image", harness.BaseImage, "--restart", "Never", "--stdin", "--attach=false", "--command", "--",
		"sh", "-c", "read a; echo got $a; exit 4")
	c.wait(t, "pod/attach", "condition=Ready")
	out := c.kubectlInput(t, "words\n", "attach", "-i", "attach")
	harness.WantText(t, "output of attach", out, "got words\n")
	c.wait(t, "pod/attach", "jsonpath={.status.phase}=Failed")
	harness.Equal(t, "exit code", c.kubectl(t, "get", "pod", "attach", "-o", "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"), "4")
}

func testControlPlaneCopy(t *testing.T, c *cluster) {
	c.run(t, "copy", "--command", "--", "sleep", "100000")
	dir := t.TempDir()
	content := strings.Repeat("all work and no play\n", 100_000)
	harness.Must(t, os.MkdirAll(filepath.Join(dir, "there", "deep"), 0o755))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "there", "deep", "file"), []byte(content), 0o600))
	c.kubectl(t, "cp", filepath.Join(dir, "there"), "copy:/tmp/there")
	c.kubectl(t, "cp", "copy:/tmp/there", filepath.Join(dir, "back"))
	back := harness.Get(os.ReadFile(filepath.Join(dir, "back", "deep", "file")))(t)
	if string(back) != content {
		t.Errorf("got %d bytes, want %d", len(back), len(content))
	}
}

func testControlPlanePortForward(t *testing.T, c *cluster) {
	c.run(t, "forward", "--command", "--", "httpd", "-f", "-p", "80", "-h", "/www")
	c.kubectl(t, "exec", "forward", "--", "sh", "-c", "until wget -q -O- http://127.0.0.1/; do usleep 100000; done")
	ctx, cancel := context.WithCancel(t.Context())
	cmd := c.command(ctx, "port-forward", "pod/forward", ":80")
	stdout := harness.Get(cmd.StdoutPipe())(t)
	harness.Must(t, cmd.Start())
	defer func() { cancel(); _ = cmd.Wait() }()
	line := harness.Get(bufio.NewReader(stdout).ReadString('\n'))(t)
	port := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindStringSubmatch(line)
	if port == nil {
		t.Fatalf("kubectl port-forward printed %q", line)
	}
	for range 20 {
		harness.Equal(t, "answer", httpGet(t, "http://127.0.0.1:"+port[1]+"/"), "hello from a pod\n")
	}
}

// An ephemeral container joins the PID namespace of its target.
func testControlPlaneDebug(t *testing.T, c *cluster) {
	c.run(t, "debug", "--command", "--", "sleep", "123456")
	c.kubectl(t, "debug", "debug", "--image", harness.BaseImage, "--target", "debug", "--container", "looker", "--", "ps", "-o", "pid,args")
	c.wait(t, "pod/debug", "jsonpath={.status.ephemeralContainerStatuses[0].state.terminated.exitCode}=0")
	harness.WantText(t, "processes in the ephemeral container", c.kubectl(t, "logs", "debug", "-c", "looker"), "1 sleep 123456")
	// This profile adds a privileged container to a pod that was created without one.
	c.kubectl(t, "debug", "debug", "--image", harness.BaseImage, "--profile", "sysadmin", "--container", "admin", "--",
		"sh", "-c", "mkdir /m && mount -t tmpfs tmpfs /m")
	harness.EventuallyGot(t, "the privileged container has exited with 0", func() (bool, any) {
		code := c.kubectl(t, "get", "pod", "debug", "-o", `jsonpath={.status.ephemeralContainerStatuses[?(@.name=="admin")].state.terminated.exitCode}`)
		return code == "0", code
	})
}

func testControlPlaneDeployment(t *testing.T, c *cluster) {
	c.create(t, `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: IMAGE
        command: [httpd, -f, -p, "80", -h, /www]
        readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
`)
	c.kubectl(t, "rollout", "status", "deployment/web")
	c.kubectl(t, "set", "env", "deployment/web", "VERSION=2")
	c.kubectl(t, "rollout", "status", "deployment/web")
	c.kubectl(t, "scale", "deployment/web", "--replicas", "1")
	c.wait(t, "deployment/web", "jsonpath={.status.replicas}=1")
	harness.Equal(t, "VERSION in the new pod", c.kubectl(t, "exec", "deployment/web", "--", "sh", "-c", "echo $VERSION"), "2\n")
}

func testControlPlaneJob(t *testing.T, c *cluster) {
	c.create(t, `
apiVersion: batch/v1
kind: Job
metadata: {name: sums}
spec:
  completions: 4
  parallelism: 2
  completionMode: Indexed
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: main
        image: IMAGE
        command: [sh, -c, 'echo part $JOB_COMPLETION_INDEX']
`)
	c.wait(t, "job/sums", "condition=Complete")
	lines := strings.Fields(strings.ReplaceAll(c.kubectl(t, "logs", "-l", "job-name=sums", "--tail=-1"), "part ", "part"))
	slices.Sort(lines)
	harness.Equal(t, "logs of the parts", strings.Join(lines, " "), "part0 part1 part2 part3")
}

// A container's resources change while it runs.
func testControlPlaneResize(t *testing.T, c *cluster) {
	c.create(t, `
apiVersion: v1
kind: Pod
metadata: {name: resize}
spec:
  containers:
  - name: main
    image: IMAGE
    command: [sleep, "100000"]
    resources: {requests: {cpu: 100m, memory: 32Mi}, limits: {cpu: 200m, memory: 64Mi}}
`)
	c.wait(t, "pod/resize", "condition=Ready")
	before := c.pod(t, "resize").Status.ContainerStatuses[0]
	c.kubectl(t, "patch", "pod", "resize", "--subresource", "resize", "--patch",
		`{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"150m","memory":"48Mi"},"limits":{"cpu":"300m","memory":"96Mi"}}}]}}`)
	c.wait(t, "pod/resize", "jsonpath={.status.containerStatuses[0].resources.limits.memory}=96Mi")
	c.wait(t, "pod/resize", "jsonpath={.status.containerStatuses[0].resources.limits.cpu}=300m")
	after := c.pod(t, "resize").Status.ContainerStatuses[0]
	harness.Equal(t, "container", after.ContainerID, before.ContainerID)
	harness.Equal(t, "restarts", after.RestartCount, 0)
	limit := "/sys/fs/cgroup/memory/memory.limit_in_bytes"
	if machine.Cgroup2() {
		limit = "/sys/fs/cgroup/memory.max"
	}
	harness.Equal(t, "limit in the container", c.kubectl(t, "exec", "resize", "--", "cat", limit), fmt.Sprintln(96<<20))
}

func (c *cluster) pod(t *testing.T, name string) *corev1.Pod {
	t.Helper()
	var pod corev1.Pod
	c.readObject(t, &pod, "pod", name)
	return &pod
}

func testControlPlaneImageVolume(t *testing.T, c *cluster) {
	c.create(t, `
apiVersion: v1
kind: Pod
metadata: {name: imagevolume}
spec:
  containers:
  - name: main
    image: IMAGE
    command: [sleep, "100000"]
    volumeMounts: [{name: data, mountPath: /data}, {name: data, mountPath: /page, subPath: www}]
  volumes:
  - name: data
    image: {reference: IMAGE, pullPolicy: IfNotPresent}
`)
	c.wait(t, "pod/imagevolume", "condition=Ready")
	for _, file := range []string{"/data/www/index.html", "/page/index.html"} {
		harness.Equal(t, file, c.kubectl(t, "exec", "imagevolume", "--", "cat", file), "hello from a pod\n")
	}
	harness.WantText(t, "error of a write to an image", c.kubectl(t, "exec", "imagevolume", "--", "sh", "-c", "touch /data/x 2>&1 || true"), "Read-only")
}

func testControlPlaneUserNamespace(t *testing.T, c *cluster) {
	if !c.userNamespaces(t) {
		t.Skip("the runtime does not support user namespaces for pods here")
	}
	c.create(t, `
apiVersion: v1
kind: Pod
metadata: {name: userns}
spec:
  hostUsers: false
  containers:
  - name: main
    image: IMAGE
    command: [sleep, "100000"]
`)
	c.wait(t, "pod/userns", "condition=Ready")
	fields := strings.Fields(c.kubectl(t, "exec", "userns", "--", "cat", "/proc/self/uid_map"))
	if len(fields) != 3 || fields[0] != "0" || fields[1] == "0" {
		t.Errorf("uid_map is %v", fields)
	}
	// kubelet mounts the account's token from a tmpfs. The token belongs to the pod's root.
	c.kubectl(t, "exec", "userns", "--", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/token")
}

func testControlPlaneHostNetwork(t *testing.T, c *cluster) {
	c.create(t, `
apiVersion: v1
kind: Pod
metadata: {name: hostnet}
spec:
  hostNetwork: true
  containers:
  - name: main
    image: IMAGE
    command: [httpd, -f, -p, "18082", -h, /www]
    readinessProbe: {httpGet: {port: 18082}, periodSeconds: 1}
`)
	c.wait(t, "pod/hostnet", "condition=Ready")
	harness.Equal(t, "the pod's address", c.pod(t, "hostnet").Status.PodIP, kubeletAddress)
}

// The runtime's status reaches the API.
func testControlPlaneNodeStatus(t *testing.T, c *cluster) {
	var n corev1.Node
	c.readObject(t, &n, "node", kubeletNode)
	if version := n.Status.NodeInfo.ContainerRuntimeVersion; !strings.HasPrefix(version, "berth://") {
		t.Errorf("the runtime's version is %q", version)
	}
	names := map[string]corev1.NodeRuntimeHandler{}
	for _, h := range n.Status.RuntimeHandlers {
		names[h.Name] = h
	}
	for _, name := range []string{"", "berth"} {
		h, ok := names[name]
		if !ok || h.Features == nil || h.Features.UserNamespaces == nil || h.Features.RecursiveReadOnlyMounts == nil {
			t.Errorf("handler %q is %+v", name, h)
			continue
		}
		harness.Equal(t, "user namespaces", *h.Features.UserNamespaces, c.userNamespaces(t))
	}
	if f := n.Status.Features; f == nil || f.SupplementalGroupsPolicy == nil || !*f.SupplementalGroupsPolicy {
		t.Errorf("the node's features are %+v", f)
	}
}

// --- many pods --------------------------------------------------------------------

// TestControlPlaneBurst creates a hundred pods at once. It logs the durations and checks none of
// them.
func TestControlPlaneBurst(t *testing.T) {
	const pods = 100
	c := startCluster(t)
	c.run(t, "first", "--command", "--", "sleep", "100000") // pulls the image
	cpu := newCPUMeter(t, c.d)

	start := time.Now()
	c.create(t, fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: burst}
spec:
  replicas: %d
  progressDeadlineSeconds: 600
  selector: {matchLabels: {app: burst}}
  template:
    metadata: {labels: {app: burst}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: IMAGE
        imagePullPolicy: IfNotPresent
        command: [sh, -c, 'trap "exit 0" TERM; while :; do sleep 1000 & wait; done']
`, pods))
	c.wait(t, "deployment/burst", fmt.Sprintf("jsonpath={.status.readyReplicas}=%d", pods))
	up := time.Since(start)
	spent := cpu.seconds(t)
	durations := durations(t, c.d, "RunPodSandbox")
	t.Logf("%d pods Ready after %.1f s; CPU seconds of berth, its shims and CNI plugins: %.1f; RunPodSandbox p50 %v, p99 %v",
		pods, up.Seconds(), spent, durations[len(durations)/2], durations[len(durations)*99/100])

	start = time.Now()
	c.kubectl(t, "delete", "deployment", "burst", "--cascade=foreground")
	c.kubectl(t, "wait", "--for=delete", "pod", "-l", "app=burst", fmt.Sprintf("--timeout=%v", kubeletPatience))
	t.Logf("%d pods deleted after %.1f s; CPU seconds: %.1f", pods, time.Since(start).Seconds(), cpu.seconds(t)-spent)
	if failed := failedCalls(c.d); len(failed) > 0 {
		t.Errorf("calls failed:\n%s", strings.Join(inventory.Summary(failed), "\n"))
	}
}

// cpuMeter measures the CPU time of the daemon and its children, which it puts into a separate
// cgroup.
type cpuMeter struct{ file string }

func newCPUMeter(t *testing.T, d *harness.Daemon) cpuMeter {
	t.Helper()
	controller, file := "/cpuacct", "cpuacct.usage"
	if machine.Cgroup2() {
		controller, file = "", "cpu.stat"
	}
	home := machine.CgroupDir(t, d.Cmd.Process.Pid, "cpuacct")
	dir := "/sys/fs/cgroup" + controller + "/" + harness.Machine + "/berth.service"
	harness.Must(t, os.MkdirAll(dir, 0o755))
	for _, pid := range append(machine.ChildrenOf(d.Cmd.Process.Pid), d.Cmd.Process.Pid) {
		moveToCgroup(t, pid, dir)
	}
	t.Cleanup(func() {
		for _, pid := range machine.ReadLines(dir + "/cgroup.procs") {
			moveToCgroup(t, harness.Get(strconv.Atoi(pid))(t), home)
		}
		harness.Eventually(t, "the daemon's cgroup is empty", func() error { return os.Remove(dir) })
	})
	return cpuMeter{dir + "/" + file}
}

// moveToCgroup moves a process to a cgroup. The process may have exited.
func moveToCgroup(t *testing.T, pid int, dir string) {
	t.Helper()
	if err := os.WriteFile(dir+"/cgroup.procs", fmt.Append(nil, pid), 0o600); !errors.Is(err, syscall.ESRCH) {
		harness.Must(t, err)
	}
}

func (m cpuMeter) seconds(t *testing.T) float64 {
	t.Helper()
	content, err := os.ReadFile(m.file)
	harness.Must(t, err)
	var n, unit float64 = 0, float64(time.Second)
	if strings.HasPrefix(string(content), "usage_usec ") {
		unit = float64(time.Second / time.Microsecond)
		_, err = fmt.Sscanf(string(content), "usage_usec %g", &n)
	} else {
		_, err = fmt.Sscan(string(content), &n)
	}
	harness.Must(t, err)
	return n / unit
}
