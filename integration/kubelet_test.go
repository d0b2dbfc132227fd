package integration

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// A real kubelet runs static pods on berth. The subtests run in parallel on one node and mostly
// wait, so use -parallel 16.
func TestKubelet(t *testing.T) {
	n := startNode(t, quickKubelet)
	t.Run("Pods", func(t *testing.T) {
		for name, test := range kubeletPods {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t, n)
			})
		}
	})
	// These tests disturb all other pods.
	t.Run("DaemonKilled", n.testDaemonKilled)
	t.Run("KubeletRestarted", n.testKubeletRestarted)
}

// kubelet's feature gates enable optional RPCs.
func TestKubeletFeatureGates(t *testing.T) {
	n := startNode(t, quickKubelet+"featureGates: {"+strings.Join(runtimeGates(t), ": true, ")+": true}\n")
	n.statsFromCRI = true
	t.Run("Pods", func(t *testing.T) {
		for _, name := range []string{"InitAndSidecar", "Liveness", "BackOff", "Volumes", "Statistics", "HostNetwork", "UserNamespace", "GracefulDeletion"} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				if name == "InitAndSidecar" {
					needsActiveStatuses(t)
				}
				kubeletPods[name](t, n)
			})
		}
		t.Run("Summary", func(t *testing.T) {
			t.Parallel()
			testKubeletSummary(t, n)
		})
	})
	for _, method := range []string{"StreamContainers", "StreamPodSandboxes", "StreamPodSandboxStats"} {
		if !wasAsked(n.d, method) {
			t.Errorf("kubelet did not call %s", method)
		}
	}
	if n.metric(t, "kubelet_evented_pleg_connection_success_count") == 0 {
		t.Error("kubelet receives no events")
	}
	if n.metric(t, "kubelet_evented_pleg_connection_error_count") != 0 {
		t.Error("kubelet lost the stream of events")
	}
}

// runtimeGates returns kubelet's feature gates that change its calls to the runtime. With
// SecurityProfileOCI, the API of v1.38.0-beta.0 accepts such profiles, but kubelet does not pull
// them yet. The other new gates of 1.38 do not reach the CRI.
func runtimeGates(t *testing.T) []string {
	t.Helper()
	gates := []string{
		"EventedPLEG", "PodAndContainerStatsFromCRI", "CRIListStreaming", "ContainerCheckpoint", "ContainerStopSignals",
		"ImageVolumeWithDigest", "RuntimeClassInImageCriApi", "UserNamespacesHostNetworkSupport",
	}
	if kubeletVersion(t) == "1.38" {
		gates = append(gates, "SecurityProfileOCI")
	}
	return gates
}

// needsActiveStatuses skips tests of init containers with EventedPLEG, which kubelet 1.37 and 1.38
// run again and again. It looks for them in PodStatus.ActiveContainerStatuses
// (computeInitContainerActions). With EventedPLEG, GetPodStatus leaves this list empty if the
// runtime's PodSandboxStatus has a timestamp, as the API requires (kubernetes/kubernetes#133371).
func needsActiveStatuses(t *testing.T) {
	t.Helper()
	if version := kubeletVersion(t); version != "1.36" {
		t.Skipf("kubelet %s restarts init containers forever with EventedPLEG: kubernetes/kubernetes#133371", version)
	}
}

// quickKubelet shortens kubelet's periods, so that tests need not wait long for periodic work.
const quickKubelet = `containerLogMaxSize: 20Ki
containerLogMaxFiles: 40
containerLogMonitorInterval: 3s
`

var kubeletPods = map[string]func(*testing.T, *node){
	"InitAndSidecar":      testKubeletInit,
	"ExecReadiness":       testKubeletExecReadiness,
	"HTTPProbe":           testKubeletHTTPProbe,
	"TCPProbe":            testKubeletTCPProbe,
	"Liveness":            testKubeletLiveness,
	"BackOff":             testKubeletBackOff,
	"Volumes":             testKubeletVolumes,
	"HostNetwork":         testKubeletHostNetwork,
	"HostPort":            testKubeletHostPort,
	"UserNamespace":       testKubeletUserNamespace,
	"SharedProcesses":     testKubeletSharedProcesses,
	"TerminationMessage":  testKubeletTerminationMessage,
	"OOM":                 testKubeletOOM,
	"GracefulDeletion":    testKubeletGracefulDeletion,
	"DeletionAfterGrace":  testKubeletDeletionAfterGrace,
	"LogRotation":         testKubeletLogRotation,
	"SecurityContext":     testKubeletSecurityContext,
	"ExecTimeout":         testKubeletExecTimeout,
	"Statistics":          testKubeletStatistics,
	"ImagePullFails":      testKubeletImagePullFails,
	"CommandDoesNotExist": testKubeletCommandDoesNotExist,
	"ManifestChanges":     testKubeletManifestChanges,
	"Hostname":            testKubeletHostname,
	"ProcMount":           testKubeletProcMount,
}

// Init containers run one after the other. A sidecar among them runs until the main containers have
// exited.
func testKubeletInit(t *testing.T, n *node) {
	p := n.apply(t, "init", `
restartPolicy: Never
initContainers:
- name: first
  command: [sh, -c, 'echo first >> /scratch/order']
  volumeMounts: [{name: host, mountPath: /scratch}]
- name: sidecar
  restartPolicy: Always
  command: [sh, -c, 'trap "echo sidecar ends >> /scratch/order; exit 0" TERM; echo sidecar >> /scratch/order; touch /started; while :; do sleep 0.1; done']
  startupProbe: {exec: {command: [test, -e, /started]}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 60}
  volumeMounts: [{name: host, mountPath: /scratch}]
- name: second
  command: [sh, -c, 'echo second >> /scratch/order']
  volumeMounts: [{name: host, mountPath: /scratch}]
containers:
- command: [sh, -c, 'echo main >> /scratch/order; cat /scratch/order']
  volumeMounts: [{name: host, mountPath: /scratch}]
terminationGracePeriodSeconds: 20
`)
	pod := p.awaitPhase(t, corev1.PodSucceeded)
	harness.Equal(t, "order", awaitFile(t, p.hostFile("order")), "first\nsidecar\nsecond\nmain\nsidecar ends\n")
	for _, name := range []string{"first", "sidecar", "second", "main"} {
		end := terminated(pod, name)
		if end == nil {
			t.Fatalf("kubelet reports no termination of %s: %+v", name, containerStatus(pod, name))
		}
		if end.ExitCode != 0 || end.Reason != "Completed" {
			t.Errorf("%s ended with %d, %s", name, end.ExitCode, end.Reason)
		}
		if end.StartedAt.IsZero() || end.FinishedAt.Before(&end.StartedAt) {
			t.Errorf("%s ran from %v to %v", name, end.StartedAt, end.FinishedAt)
		}
	}
}

func testKubeletExecReadiness(t *testing.T, n *node) {
	p := n.apply(t, "readiness", `
containers:
- readinessProbe: {exec: {command: [sh, -c, 'echo probed; test -e /host/ready']}, periodSeconds: 1}
  volumeMounts: [{name: host, mountPath: /host}]
`)
	p.container(t, "main")
	p.await(t, "not ready before its file is there", notReady)
	harness.Must(t, os.WriteFile(p.hostFile("ready"), nil, 0o600))
	p.awaitReady(t)
	harness.Must(t, os.Remove(p.hostFile("ready")))
	p.await(t, "not ready after its file is gone", notReady)
}

func testKubeletHTTPProbe(t *testing.T, n *node) {
	p := n.apply(t, "http", `
containers:
- command: [sh, -c, 'mkdir -p /site/cgi-bin; echo ok > /site/healthy; exec httpd -f -p 8080 -h /site']
  ports: [{containerPort: 8080, name: web}]
  readinessProbe: {httpGet: {port: web, path: /healthy}, periodSeconds: 1}
  livenessProbe: {httpGet: {port: web, path: /healthy}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1, initialDelaySeconds: 3}
`)
	p.awaitReady(t)
	p.container(t, "main").Exec(t, "rm", "/site/healthy")
	p.await(t, "restarted by its liveness probe", func(pod *corev1.Pod) error { return restarts(pod, "main", 1) })
	p.awaitReady(t)
}

func testKubeletTCPProbe(t *testing.T, n *node) {
	p := n.apply(t, "tcp", `
containers:
- name: main
  command: [httpd, -f, -p, "9000", -h, /www]
  readinessProbe: {tcpSocket: {port: 9000}, periodSeconds: 1}
- name: closed
  livenessProbe: {tcpSocket: {port: 9001}, periodSeconds: 1, failureThreshold: 1, initialDelaySeconds: 2}
`)
	p.await(t, "main is ready", func(pod *corev1.Pod) error {
		if !containerStatus(pod, "main").Ready {
			return fmt.Errorf("main is not ready")
		}
		return nil
	})
	p.await(t, "closed is restarted", func(pod *corev1.Pod) error { return restarts(pod, "closed", 1) })
}

// A container that fails its liveness probe gets SIGTERM and a grace period. kubelet then replaces
// it.
func testKubeletLiveness(t *testing.T, n *node) {
	p := n.apply(t, "liveness", `
terminationGracePeriodSeconds: 20
containers:
- command: [sh, -c, 'trap "exit 7" TERM; touch /healthy; while :; do sleep 0.1; done']
  startupProbe: {exec: {command: [test, -e, /healthy]}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 60}
  livenessProbe: {exec: {command: [test, -e, /healthy]}, periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 1}
`)
	p.awaitReady(t)
	p.container(t, "main").Exec(t, "rm", "/healthy")
	pod := p.await(t, "restarted", func(pod *corev1.Pod) error { return restarts(pod, "main", 1) })
	end := containerStatus(pod, "main").LastTerminationState.Terminated
	if end == nil || end.ExitCode != 7 {
		t.Errorf("the first container ended with %+v, want exit code 7", end)
	}
	p.awaitReady(t)
}

func restarts(pod *corev1.Pod, name string, want int32) error {
	if n := containerStatus(pod, name).RestartCount; n < want {
		return harness.Unexpected("number of restarts", n, want)
	}
	return nil
}

// kubelet waits longer before each restart, and counts restarts.
func testKubeletBackOff(t *testing.T, n *node) {
	p := n.apply(t, "backoff", `
containers:
- command: [sh, -c, 'echo once more >> /host/lives; exit 3']
  volumeMounts: [{name: host, mountPath: /host}]
`)
	pod := p.await(t, "in back-off after two runs", func(pod *corev1.Pod) error {
		if err := restarts(pod, "main", 1); err != nil {
			return err
		}
		if w := containerStatus(pod, "main").State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" {
			return fmt.Errorf("the container waits for %+v", w)
		}
		// Statuses lag behind, so the next run may already have begun.
		lives, restarts := strings.Count(awaitFile(t, p.hostFile("lives")), "\n"), int(containerStatus(pod, "main").RestartCount)
		if lives != restarts+1 {
			return harness.Unexpected("number of runs", lives, restarts+1)
		}
		return nil
	})
	if end := terminated(pod, "main"); end == nil || end.ExitCode != 3 || end.Reason != "Error" {
		t.Errorf("the container ended with %+v, want exit code 3 and reason Error", end)
	}
	p.await(t, "runs again after the back-off", func(pod *corev1.Pod) error { return restarts(pod, "main", 2) })
}

func testKubeletVolumes(t *testing.T, n *node) {
	p := n.apply(t, "volumes", `
containers:
- name: writer
  command: [sh, -c, 'echo disk > /disk/f; echo memory > /memory/f; echo host > /host/f; mkdir /disk/sub; echo deep > /disk/sub/f; exec sleep 100000']
  volumeMounts:
  - {name: disk, mountPath: /disk}
  - {name: memory, mountPath: /memory}
  - {name: host, mountPath: /host}
- name: reader
  volumeMounts:
  - {name: disk, mountPath: /disk, readOnly: true}
  - {name: memory, mountPath: /memory}
  - {name: disk, mountPath: /sub, subPath: part}
  - {name: about, mountPath: /about}
  - {name: host, mountPath: /file, subPath: seed}
volumes:
- name: disk
  emptyDir: {}
- name: memory
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: about
  downwardAPI:
    items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]
`)
	harness.Must(t, os.WriteFile(p.hostFile("seed"), []byte("from the host"), 0o600))
	pod := p.awaitReady(t)
	harness.Equal(t, "the host's file", awaitFile(t, p.hostFile("f")), "host\n")
	reader := p.container(t, "reader")
	harness.Equal(t, "emptyDir", reader.Exec(t, "cat", "/disk/f"), "disk")
	harness.Equal(t, "emptyDir in memory", reader.Exec(t, "cat", "/memory/f"), "memory")
	harness.Equal(t, "its file system", reader.Exec(t, "stat", "-f", "-c", "%T", "/memory"), "tmpfs")
	harness.Equal(t, "downward API", reader.Exec(t, "cat", "/about/labels"), `app="volumes"`)
	harness.Equal(t, "a file as sub path", reader.Exec(t, "cat", "/file"), "from the host")
	harness.WantText(t, "error of a write to a read-only volume", reader.Exec(t, "sh", "-c", "touch /disk/g 2>&1 || true"), "Read-only")
	reader.Exec(t, "touch", "/sub/mine")
	p.container(t, "writer").Exec(t, "test", "-e", "/disk/part/mine")

	// A restarted kubelet does not find sub paths of host volumes, because it keeps no directory
	// for such volumes. testKubeletRestarted would leave them behind, so this pod is removed
	// before.
	p.withdraw(t)
	p.awaitGone(t)
	p.n.kubelet.waitFor(t, "the pod's volumes are removed", func() error {
		if left := machine.ReadDir("/var/lib/kubelet/pods/" + string(pod.UID)); len(left) > 0 {
			return fmt.Errorf("volumes left: %v", left)
		}
		return nil
	})
}

func testKubeletHostNetwork(t *testing.T, n *node) {
	p := n.apply(t, "hostnet", `
hostNetwork: true
containers:
- command: [httpd, -f, -p, "18080", -h, /www]
  ports: [{containerPort: 18080, hostPort: 18080}]
  readinessProbe: {httpGet: {port: 18080}, periodSeconds: 1}
`)
	p.awaitReady(t)
	main := p.container(t, "main")
	harness.WantText(t, "addresses in the pod", main.Exec(t, "ip", "-o", "address", "show", "eth0"), kubeletAddress)
	host := harness.Get(os.Hostname())(t)
	harness.Equal(t, "hostname", main.Exec(t, "hostname"), host)
	harness.Equal(t, "answer", httpGet(t, "http://127.0.0.1:18080/"), "hello from a pod\n")
}

func testKubeletHostPort(t *testing.T, n *node) {
	p := n.apply(t, "hostport", `
containers:
- command: [httpd, -f, -p, "80", -h, /www]
  ports: [{containerPort: 80, hostPort: 18081}]
  readinessProbe: {httpGet: {port: 80}, periodSeconds: 1}
`)
	pod := p.awaitReady(t)
	for _, host := range []string{pod.Status.PodIP + ":80", kubeletAddress + ":18081", "127.0.0.1:18081"} {
		harness.Equal(t, "answer of "+host, httpGet(t, "http://"+host+"/"), "hello from a pod\n")
	}
}

// With hostUsers: false the pod's root has no rights on the host, but owns the pod's volumes.
func testKubeletUserNamespace(t *testing.T, n *node) {
	if !n.userNamespaces(t) {
		t.Skip("the runtime does not support user namespaces for pods here")
	}
	p := n.apply(t, "userns", `
hostUsers: false
containers:
- command: [sh, -c, 'id -u > /disk/id; exec httpd -f -p 8080 -h /disk']
  readinessProbe: {httpGet: {port: 8080, path: /id}, periodSeconds: 1}
  volumeMounts: [{name: disk, mountPath: /disk}, {name: about, mountPath: /about}]
volumes:
- name: disk
  emptyDir: {}
- name: about
  downwardAPI:
    items: [{path: name, mode: 0400, fieldRef: {fieldPath: metadata.name}}]
`)
	p.awaitReady(t)
	main := p.container(t, "main")
	fields := strings.Fields(main.Exec(t, "cat", "/proc/self/uid_map"))
	if len(fields) != 3 || fields[0] != "0" || fields[1] == "0" || fields[2] != "65536" {
		t.Errorf("uid_map is %v, want 65536 users that are not the host's first", fields)
	}
	harness.Equal(t, "the user inside", main.Exec(t, "cat", "/disk/id"), "0")
	harness.Equal(t, "owner of a file it made", main.Exec(t, "stat", "-c", "%u", "/disk/id"), "0")
	harness.Equal(t, "a file that only root may read", main.Exec(t, "cat", "/about/name"), p.name)
	harness.Equal(t, "the user outside", strings.Fields(machine.StatusField(t, main.Pid(t), "Uid"))[0], fields[1])
}

func testKubeletSharedProcesses(t *testing.T, n *node) {
	p := n.apply(t, "shared", `
shareProcessNamespace: true
containers:
- name: main
  command: [sleep, "100001"]
- name: other
  command: [httpd, -f, -h, /www]
`)
	p.awaitReady(t)
	out := p.container(t, "main").Exec(t, "ps", "-o", "pid,args")
	harness.WantText(t, "processes in main", out, "sleep 100001", "httpd -f", "pause")
	p.container(t, "main").Exec(t, "killall", "httpd")
	p.await(t, "the other is restarted", func(pod *corev1.Pod) error { return restarts(pod, "other", 1) })
}

func testKubeletTerminationMessage(t *testing.T, n *node) {
	p := n.apply(t, "messages", `
restartPolicy: Never
containers:
- name: file
  command: [sh, -c, 'echo in the log; printf "in the file" > /dev/termination-log; exit 1']
  terminationMessagePolicy: FallbackToLogsOnError
- name: elsewhere
  command: [sh, -c, 'printf elsewhere > /tmp/message']
  terminationMessagePath: /tmp/message
- name: log
  command: [sh, -c, 'echo in the log; exit 1']
  terminationMessagePolicy: FallbackToLogsOnError
- name: none
  command: [sh, -c, 'echo in the log; exit 1']
`)
	pod := p.awaitPhase(t, corev1.PodFailed)
	for name, want := range map[string]string{"file": "in the file", "elsewhere": "elsewhere", "log": "in the log\n", "none": ""} {
		if end := terminated(pod, name); end == nil || end.Message != want {
			t.Errorf("%s ended with %+v, want message %q", name, end, want)
		}
	}
}

func testKubeletOOM(t *testing.T, n *node) {
	p := n.apply(t, "oom", `
restartPolicy: Never
containers:
- command: [sh, -c, 'tail /dev/zero']
  resources: {limits: {memory: 20Mi, cpu: 500m}}
`)
	pod := p.awaitPhase(t, corev1.PodFailed)
	if end := terminated(pod, "main"); end == nil || end.Reason != "OOMKilled" || end.ExitCode != 137 {
		t.Errorf("it ended with %+v, want OOMKilled and 137", end)
	}
}

// preStop runs first, then SIGTERM is sent. A process that exits on SIGTERM is not killed.
func testKubeletGracefulDeletion(t *testing.T, n *node) {
	p := n.apply(t, "graceful", `
terminationGracePeriodSeconds: 60
containers:
- command: [sh, -c, 'trap "echo asked to end >> /host/end; sleep 1; echo ended >> /host/end; exit 0" TERM; touch /ready; while :; do sleep 0.1; done']
  readinessProbe: {exec: {command: [test, -e, /ready]}, periodSeconds: 1}
  lifecycle: {preStop: {exec: {command: [sh, -c, 'sleep 1; echo prepared >> /host/end']}}}
  volumeMounts: [{name: host, mountPath: /host}]
`)
	p.awaitReady(t)
	p.withdraw(t)
	p.awaitGone(t)
	harness.Equal(t, "content of the file end", awaitFile(t, p.hostFile("end")), "prepared\nasked to end\nended\n")
}

// A container that ignores SIGTERM is killed after the grace period.
func testKubeletDeletionAfterGrace(t *testing.T, n *node) {
	p := n.apply(t, "stubborn", `
terminationGracePeriodSeconds: 15
containers:
- command: [sh, -c, 'trap "echo heard >> /host/end" TERM; touch /ready; while :; do sleep 0.1; done']
  readinessProbe: {exec: {command: [test, -e, /ready]}, periodSeconds: 1}
  volumeMounts: [{name: host, mountPath: /host}]
`)
	p.awaitReady(t)
	p.withdraw(t)
	harness.Equal(t, "signals of the container", awaitFile(t, p.hostFile("end")), "heard\n")
	p.awaitGone(t)
}

// awaitGone waits until kubelet no longer reports the pod and CRI reports no running container of
// it.
func (p *kubePod) awaitGone(t *testing.T) {
	t.Helper()
	p.n.kubelet.waitFor(t, p.name+" is gone", func() error {
		if pod, err := p.find(); pod != nil || err != nil {
			return fmt.Errorf("kubelet still reports the pod: %v", err)
		}
		running, err := p.n.d.Cri.ListContainers(t.Context(), &runtimeapi.ContainerFilter{
			LabelSelector: map[string]string{"io.kubernetes.pod.name": p.name},
			State:         &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
		})
		if err == nil && len(running) > 0 {
			err = fmt.Errorf("%d containers run", len(running))
		}
		return err
	})
}

// kubelet rotates the log while the container writes. Every line is in one of the files.
func testKubeletLogRotation(t *testing.T, n *node) {
	const lines = 4000
	p := n.apply(t, "logs", fmt.Sprintf(`
containers:
- command: [sh, -c, 'i=0; while [ $i -lt %d ]; do i=$((i+1)); echo line $i; usleep 4000; done; exec sleep 100000']
`, lines))
	log := p.container(t, "main").Status(t).LogPath
	p.n.kubelet.waitFor(t, "all lines are in the log's files", func() error {
		files, err := filepath.Glob(log + ".*")
		if err != nil {
			return err
		}
		if len(files) < 3 {
			return fmt.Errorf("the log was rotated %d times, want 3 at least", len(files))
		}
		slices.Sort(files) // names end with the time of rotation
		next := 1
		for _, file := range append(files, log) {
			found, err := logText(file)
			if err != nil {
				return err // kubelet may be compressing the file
			}
			for _, text := range found {
				if want := fmt.Sprintf("line %d", next); text != want {
					return fmt.Errorf("%s: got %q, want %q", file, text, want)
				}
				next++
			}
		}
		if next != lines+1 {
			return harness.Unexpected("the number of lines", next-1, lines)
		}
		return nil
	})
}

// logText returns the lines of a log. kubelet may have compressed it.
func logText(path string) ([]string, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var in io.Reader = file
	if strings.HasSuffix(path, ".gz") {
		if in, err = gzip.NewReader(file); err != nil {
			return nil, err
		}
	}
	var out []string
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		fields := strings.SplitN(lines.Text(), " ", 4)
		if len(fields) != 4 {
			return nil, fmt.Errorf("%s: not a CRI log record: %q", path, lines.Text())
		}
		out = append(out, fields[3])
	}
	return out, lines.Err()
}

func testKubeletSecurityContext(t *testing.T, n *node) {
	p := n.apply(t, "security", `
securityContext: {runAsUser: 1001, runAsGroup: 2001, fsGroup: 3001, supplementalGroups: [4001], supplementalGroupsPolicy: Strict, seccompProfile: {type: RuntimeDefault}, sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: "80"}]}
containers:
- name: main
  command: [httpd, -f, -p, "80", -h, /disk]
  securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
  volumeMounts: [{name: disk, mountPath: /disk}]
- name: privileged
  securityContext: {privileged: true, runAsUser: 0}
volumes:
- name: disk
  emptyDir: {}
`)
	pod := p.awaitReady(t)
	harness.Equal(t, "image", containerStatus(pod, "main").Image, harness.BaseImage)
	harness.Equal(t, "image ID", containerStatus(pod, "main").ImageID, n.d.ImageStatus(t, harness.BaseImage).RepoDigests[0])
	main := p.container(t, "main")
	harness.Equal(t, "user", main.Exec(t, "sh", "-c", "id -u; id -g; id -G"), "1001\n2001\n2001 3001 4001")
	harness.Equal(t, "group of the volume", main.Exec(t, "stat", "-c", "%g", "/disk"), "3001")
	harness.WantText(t, "error of a write to the root filesystem", main.Exec(t, "sh", "-c", "touch /tmp/x 2>&1 || true"), "Read-only")
	pid := main.Pid(t)
	harness.Equal(t, "seccomp mode", machine.StatusField(t, pid, "Seccomp"), "2")
	harness.Equal(t, "no_new_privs", machine.StatusField(t, pid, "NoNewPrivs"), "1")
	harness.Equal(t, "capabilities", machine.StatusField(t, pid, "CapBnd"), "0000000000000000")
	harness.Equal(t, "capabilities of the privileged container", machine.StatusField(t, p.container(t, "privileged").Pid(t), "CapBnd"), machine.StatusField(t, os.Getpid(), "CapBnd"))
	user := containerStatus(pod, "main").User
	if user == nil || user.Linux == nil || user.Linux.UID != 1001 || user.Linux.GID != 2001 {
		t.Errorf("kubelet reports the user %+v", user)
	}
}

// A probe that exceeds its timeout fails.
func testKubeletExecTimeout(t *testing.T, n *node) {
	p := n.apply(t, "slowprobe", `
containers:
- livenessProbe: {exec: {command: [sleep, "100000"]}, timeoutSeconds: 1, periodSeconds: 1, failureThreshold: 1}
`)
	p.await(t, "restarted", func(pod *corev1.Pod) error { return restarts(pod, "main", 1) })
}

// kubelet's summary is the source of autoscalers and kubectl top.
func testKubeletStatistics(t *testing.T, n *node) {
	p := n.apply(t, "busy", `
containers:
- command: [sh, -c, 'head -c 65536 /dev/zero >/file; while :; do usleep 10000; done']
`)
	p.n.kubelet.waitFor(t, "the summary lists the pod", func() error {
		var all kubeSummary
		if err := n.read("/stats/summary", &all); err != nil {
			return err
		}
		for _, pod := range all.Pods {
			if pod.PodRef.Name == p.name {
				return n.complete(pod)
			}
		}
		return fmt.Errorf("the pod is not among %d pods", len(all.Pods))
	})
}

// kubeSummary contains the tested part of kubelet's /stats/summary.
type kubeSummary struct{ Pods []podSummary }

type podSummary struct {
	PodRef  struct{ Name string }
	CPU     struct{ UsageNanoCores, UsageCoreNanoSeconds *uint64 }
	Memory  struct{ WorkingSetBytes *uint64 }
	Network struct{ RxBytes, TxBytes *uint64 }

	ProcessStats map[string]uint64 `json:"process_stats"`
	Containers   []struct {
		Name   string
		CPU    struct{ UsageNanoCores, UsageCoreNanoSeconds *uint64 }
		Memory struct{ WorkingSetBytes *uint64 }
		Rootfs struct{ UsedBytes *uint64 }
	}
}

// complete returns an error if the statistics of a pod with one container lack fields.
func (n *node) complete(pod podSummary) error {
	if len(pod.Containers) != 1 {
		return fmt.Errorf("the pod has %d containers", len(pod.Containers))
	}
	c := pod.Containers[0]
	values := map[string]*uint64{
		"CPU of the pod": pod.CPU.UsageNanoCores, "CPU time of the pod": pod.CPU.UsageCoreNanoSeconds,
		"memory of the pod": pod.Memory.WorkingSetBytes,
		"CPU":               c.CPU.UsageNanoCores, "CPU time": c.CPU.UsageCoreNanoSeconds,
		"memory": c.Memory.WorkingSetBytes, "writable layer": c.Rootfs.UsedBytes,
	}
	if n.statsFromCRI { // cAdvisor finds interfaces only in pods of runtimes that it supports
		values["bytes received"], values["bytes sent"] = pod.Network.RxBytes, pod.Network.TxBytes
	}
	for name, value := range values {
		if value == nil || *value == 0 {
			return fmt.Errorf("%s is missing in %+v", name, pod)
		}
	}
	return nil
}

func testKubeletImagePullFails(t *testing.T, n *node) {
	p := n.apply(t, "noimage", fmt.Sprintf(`
containers:
- image: %s/no/such:image
`, harness.Registry.Host))
	p.await(t, "the image cannot be pulled", func(pod *corev1.Pod) error {
		if w := containerStatus(pod, "main").State.Waiting; w == nil || w.Reason != "ErrImagePull" && w.Reason != "ImagePullBackOff" {
			return fmt.Errorf("the container waits for %+v", w)
		}
		return nil
	})
}

func testKubeletCommandDoesNotExist(t *testing.T, n *node) {
	p := n.apply(t, "nocommand", `
restartPolicy: Never
containers:
- command: [/no/such/command]
`)
	pod := p.awaitPhase(t, corev1.PodFailed)
	if end := terminated(pod, "main"); end == nil || end.Reason != "StartError" && end.Reason != "ContainerCannotRun" || !strings.Contains(end.Message, "/no/such/command") {
		t.Errorf("it ended with %+v", end)
	}
}

// A changed manifest is another pod. The old pod ends first.
func testKubeletManifestChanges(t *testing.T, n *node) {
	const spec = `
containers:
- env: [{name: VERSION, value: "%d"}]
`
	p := n.apply(t, "changes", fmt.Sprintf(spec, 1))
	harness.Equal(t, "version", p.container(t, "main").Exec(t, "sh", "-c", "echo $VERSION"), "1")
	old := p.awaitReady(t).UID
	n.apply(t, "changes", fmt.Sprintf(spec, 2))
	p.await(t, "replaced", func(pod *corev1.Pod) error {
		if pod.UID == old {
			return fmt.Errorf("the pod is still the old one")
		}
		return ready(pod)
	})
	harness.Equal(t, "version", p.container(t, "main").Exec(t, "sh", "-c", "echo $VERSION"), "2")
}

// While no daemon runs, one container exits and another keeps running. kubelet gets the correct
// exit code from the next daemon, and restarts only the exited container.
func (n *node) testDaemonKilled(t *testing.T) {
	p := n.apply(t, "survivor", `
containers:
- name: runs
- name: exits
  command: [sh, -c, 'while [ ! -e /host/exit ]; do sleep 0.1; done; rm /host/exit; exit 42']
  volumeMounts: [{name: host, mountPath: /host}]
`)
	before := p.awaitReady(t)
	exits := p.container(t, "exits").Pid(t)
	n.d.Kill(t)
	harness.Must(t, os.WriteFile(p.hostFile("exit"), nil, 0o600))
	n.kubelet.waitFor(t, "the container has ended", func() error {
		if err := syscall.Kill(exits, 0); err == nil {
			return fmt.Errorf("process %d is there", exits)
		}
		return nil
	})
	n.apply(t, "meanwhile", `containers: [{}]`)
	n.d.Start(t)
	after := p.await(t, "restarted", func(pod *corev1.Pod) error {
		if err := restarts(pod, "exits", 1); err != nil {
			return err
		}
		return ready(pod)
	})
	if end := terminated(after, "exits"); end == nil || end.ExitCode != 42 {
		t.Errorf("the container that exited without a daemon ended with %+v, want exit code 42", end)
	}
	harness.Equal(t, "the other's ID", containerStatus(after, "runs").ContainerID, containerStatus(before, "runs").ContainerID)
	harness.Equal(t, "the other's restarts", containerStatus(after, "runs").RestartCount, 0)
	(&kubePod{n: n, name: "meanwhile-" + kubeletNode}).awaitReady(t)
}

// A restarted kubelet finds the existing pods and does not restart them.
func (n *node) testKubeletRestarted(t *testing.T) {
	p := n.apply(t, "steady", `containers: [{}]`)
	before := containerStatus(p.awaitReady(t), "main")
	n.stop(t)
	n.start(t)
	after := containerStatus(p.awaitReady(t), "main")
	harness.Equal(t, "container", after.ContainerID, before.ContainerID)
	harness.Equal(t, "restarts", after.RestartCount, before.RestartCount)
	sandboxes := harness.Get(n.d.Cri.ListPodSandbox(context.Background(), &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"io.kubernetes.pod.name": p.name}}))(t)
	harness.Equal(t, "number of its sandboxes", len(sandboxes), 1)
}
