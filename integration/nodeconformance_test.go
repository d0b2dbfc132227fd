package integration

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/godbus/dbus/v5"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// nodeExclusions are the specs that cannot pass here.
var nodeExclusions = []string{
	// By Kubernetes' own label.
	`\[Flaky\]`,
	// Reads memory.swap.max without a check for cgroup v2.
	`with a critical pod - should avoid swap`,
	// Needs an NFS server and the kernel's NFS client.
	`temporarily failed termination due to volume failing to unmount`,
	// Wants the text of busybox' shell. The image has bash, which other specs need.
	`read only busybox container should not write to root filesystem`,
	// Wants a node that has received a megabyte over eth0, and cgroups that systemd makes.
	`Summary API when querying /stats/summary should report resource usage`,
	// Wants I/O statistics. Linux 6.18 counts no I/O in cgroup v1 (blkio.throttle.io_serviced).
	`ContainerMetrics .* should report container metrics`,
	// Makes a network device of type dummy, which the kernel of the test machine does not have.
	`PrivilegedPod should enable privileged commands`,
	// Want oom_score_adj -997 if they restart a container. The test machine lacks CAP_SYS_RESOURCE.
	`guaranteed qos .* (cpu|mem) restart`,
}

// TestNodeConformance runs Kubernetes' node tests with the label NodeConformance. Their program
// starts etcd, an API server and kubelet. BERTH_CONFORMANCE_FOCUS selects specs by a regular
// expression instead, excluded ones too.
func TestNodeConformance(t *testing.T) {
	limit := os.Getenv(conformanceEnv)
	if limit == "" {
		t.Skipf("takes hours: export %s=3h, or contrib/test -conformance", conformanceEnv)
	}
	s := newNodeSuite(t)
	if focus := os.Getenv(conformanceEnv + "_FOCUS"); focus != "" {
		s.run(t, "--procs=6", "--focus="+focus, "--timeout="+limit)
		return
	}
	skip := strings.Join(nodeExclusions, "|")
	for _, part := range []struct {
		name    string
		options []string
	}{
		{"Parallel", []string{"--procs=6", `--focus=\[NodeConformance\]`, `--skip=\[Serial\]|` + skip}},
		{"Serial", []string{`--focus=\[NodeConformance\].*\[Serial\]`, "--skip=" + skip}},
	} {
		t.Run(part.name, func(t *testing.T) {
			if results := s.run(t, append(part.options, "--timeout="+limit)...); len(results["passed"]) == 0 {
				t.Error("no spec passed")
			}
		})
	}
}

// nodeSuite is a machine for e2e_node.test. The suite's programs see the node's cgroup as the root
// of all cgroups, because specs look for kubelet's cgroups there.
type nodeSuite struct {
	*node
	dir   string
	jobs  chan runtimeJob
	enter []string // command that runs a program in the node's cgroup
}

func newNodeSuite(t *testing.T) *nodeSuite {
	t.Helper()
	if machine.Cgroup2() {
		t.Skip("NOT TESTED: the namespace of the cgroups was made for cgroup v1")
	}
	for _, name := range []string{"e2e_node.test", "ginkgo", "agnhost", "kubelet", "etcd"} {
		kubernetesProgram(t, name)
	}
	prepareNode(t)
	pushTestImages(t)
	s := &nodeSuite{node: &node{}, dir: t.TempDir(), jobs: make(chan runtimeJob)}
	s.makeCgroups(t)
	s.startMachine(t)
	s.d = harness.StartDaemon(t, harness.InNamespaces(s.enter...), harness.WithBuiltInNetwork(),
		harness.WithConfig(`cadvisor_socket = "/run/containerd/containerd.sock"`),
		harness.WithHosts("_default", fmt.Sprintf("server = \"http://%s\"\n", harness.Registry.Host)),
		harness.WithHosts("localhost:5000", "server = \"http://localhost:5000\"\n"), // specs run a registry there
		harness.WithHandler("test-handler", ""))
	s.node.dir = s.d.Dir
	t.Cleanup(func() {
		s.d.Clean(t) // kubelet leaves the pods of its last seconds
		s.removeChildCgroups(t)
	})
	s.writeFiles(t)
	s.serveUnit(t)
	return s
}

// startMachine makes the namespaces of mounts and cgroups, which a process holds.
func (s *nodeSuite) startMachine(t *testing.T) {
	t.Helper()
	const script = `set -e
while read -r _ dir type options _; do
	case $dir in /sys/fs/cgroup/*) umount "$dir"; mount -t "$type" -o "$options" cgroup "$dir" ;; esac
done <<<"$(cat /proc/mounts)"
mount --make-rshared /
: >"$1/ready"
exec sleep infinity`
	holder := startProgram(t, "the machine", s.dir+"/machine.log", append(s.join("/sys/fs/cgroup/*"+s.cgroup()),
		"unshare", "--cgroup", "--mount", "bash", "-c", script, "machine", s.dir)...)
	t.Cleanup(func() { holder.stop(t) })
	holder.waitFor(t, "it is ready", func() error {
		_, err := os.Stat(s.dir + "/ready")
		return err
	})
	s.enter = append([]string{"nsenter", "--target", strconv.Itoa(holder.cmd.Process.Pid), "--mount", "--cgroup"}, s.join("/sys/fs/cgroup/*")...)
}

// join returns a command that runs a program in cgroups.
func (s *nodeSuite) join(cgroups string) []string {
	return []string{"bash", "-ec", "for procs in " + cgroups + `/cgroup.procs; do echo $$ >"$procs"; done; exec "$@"`, "join"}
}

// makeCgroups makes the node's cgroups, with all CPUs.
func (s *nodeSuite) makeCgroups(t *testing.T) {
	t.Helper()
	s.node.makeCgroups(t)
	const top = "/sys/fs/cgroup/cpuset"
	for _, dir := range []string{top + filepath.Dir(s.cgroup()), top + s.cgroup()} {
		for _, file := range []string{"/cpuset.cpus", "/cpuset.mems"} {
			all := harness.Get(os.ReadFile(filepath.Dir(dir) + file))(t)
			harness.Must(t, os.WriteFile(dir+file, all, 0o600))
		}
	}
}

// removeChildCgroups removes the cgroups of kubelet and of its pods, which it leaves when it ends.
func (s *nodeSuite) removeChildCgroups(t *testing.T) {
	t.Helper()
	for _, dir := range hierarchies(t) {
		for _, name := range []string{"kubepods", "kubelet.slice"} {
			if child := dir + s.cgroup() + "/" + name; len(machine.ReadDir(child)) > 0 {
				removeCgroupTree(t, child)
			}
		}
	}
}

// writeFiles writes kubelet's configuration and the stand-ins for systemd's commands.
func (s *nodeSuite) writeFiles(t *testing.T) {
	t.Helper()
	harness.Must(t, os.WriteFile(s.dir+"/kubelet.yaml", []byte(nodeKubelet), 0o600))
	harness.Must(t, os.Symlink(kubernetesProgram(t, "kubelet"), s.dir+"/kubelet")) // the suite looks for it in its own directory
	suite := harness.Get(os.ReadFile(kubernetesProgram(t, "e2e_node.test")))(t)
	suite = bytes.ReplaceAll(suite, []byte(fixedDigest), []byte(pushPulledImages(t).String()))
	harness.Must(t, os.WriteFile(s.dir+"/e2e_node.test", suite, 0o755))
	enter := "exec"
	for _, arg := range slices.Concat(s.enter, s.withOwnSysctls(t, nil)) {
		enter += " '" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
	}
	harness.Must(t, os.WriteFile(s.dir+"/enter", []byte(enter), 0o600))
	for _, name := range []string{"sudo", "systemd-run", "systemctl"} {
		file := s.dir + "/" + name
		harness.Must(t, os.WriteFile(file, fmt.Appendf(nil, unitCommands, s.dir), 0o755))
	}
	t.Cleanup(func() {
		if out, err := exec.Command(s.dir+"/systemctl", "stop").CombinedOutput(); err != nil {
			t.Errorf("stop kubelet: %v: %s", err, out)
		}
	})
}

// fixedDigest is that of busybox' image on the original registry, which the suite also pulls.
const fixedDigest = "sha256:a9155b13325b2abef48e71de77bb8ac015412a566829f621d06bfae5c699b1b9"

// pushPulledImages pushes stand-ins for the other images that the suite pulls before it runs specs.
// It returns the digest of busybox.
func pushPulledImages(t *testing.T) v1.Hash {
	t.Helper()
	image := harness.Get(fixture.Image(v1.Config{Cmd: []string{"sh"}}))(t)
	for _, name := range []string{"e2e-test-images/busybox:digest", "cadvisor/cadvisor:v0.47.2", "nfvpe/sriov-device-plugin:v3.1",
		"e2e-test-images/node-perf/npb-ep:1.6.0", "e2e-test-images/node-perf/npb-is:1.7.0", "e2e-test-images/node-perf/pytorch-wide-deep:1.0.0",
		"node-problem-detector/node-problem-detector:v1.35.2", "e2e-test-images/volume/nfs:1.6.0"} {
		harness.Get(harness.Registry.Push(name, image))(t)
	}
	plugin := fixture.File("sampledeviceplugin", 0o755, string(harness.Get(os.ReadFile(kubernetesProgram(t, "sample-device-plugin")))(t)))
	layer := harness.PackLayer(t, fixture.Tree{fixture.Dir("tmp", 0o1777), plugin}, fixture.Gzip)
	harness.Get(harness.Registry.Push("e2e-test-images/sample-device-plugin:1.8.0",
		harness.Get(fixture.ImageOf(v1.Config{Entrypoint: []string{"/sampledeviceplugin", "-alsologtostderr"}}, layer))(t)))(t)
	return harness.Get(image.Digest())(t)
}

// nodeKubelet is the suite's own default configuration (test/e2e_node/jenkins), without thresholds
// of memory and disk, and with what only machines of the tests need.
const nodeKubelet = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
cgroupRoot: /
podCIDR: 10.100.0.0/24
volumeStatsAggPeriod: 10s
fileCheckFrequency: 10s
serializeImagePulls: false
evictionPressureTransitionPeriod: 30s
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, pid.available: "10"}
imageGCHighThresholdPercent: 100
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
maxOpenFiles: 20000
protectKernelDefaults: true
`

// unitCommands stands in for sudo, and for systemd-run and systemctl with the only unit, kubelet.
const unitCommands = `#!/bin/bash
set -eu
dir=%s
unit=$dir/unit

running() { [ -s "$unit.pid" ] && kill -0 "$(<"$unit.pid")" 2>/dev/null; }
start() {
	setsid bash "$unit" </dev/null >>"$(<"$unit.log")" 2>&1 &
	echo $! >"$unit.pid"
}
signal() { ! running || kill "$(<"$unit.pid")"; }
stop() { signal; ! running || tail --pid="$(<"$unit.pid")" -f /dev/null; }

case ${0##*/}:${1:-} in
sudo:*) exec "$@" ;;
systemd-run:--version) echo "systemd 257" ;;
systemd-run:*)
	while [ "${1#-}" != "$1" ]; do
		case $1 in
		-p) shift; case $1 in StandardError=append:*) echo "${1#*:}" >"$unit.log" ;; esac ;;
		--unit=*) echo "${1#*=}" >"$unit.name" ;;
		esac
		shift
	done
	{ cat "$dir/enter"; printf ' %%q' "$@"; } >"$unit"
	start
	;;
systemctl:list-units) [[ "$*" = *--state=running* ]] && ! running || echo "$(<"$unit.name") loaded" ;;
systemctl:reset-failed) ;;
systemctl:start) running || start ;;
systemctl:restart) stop; start ;;
systemctl:kill) signal ;;
systemctl:stop) stop ;;
*) echo "unknown command $0 $*" >&2; exit 1 ;;
esac
`

// run runs e2e_node.test with options of ginkgo. It stops and starts the daemon when a spec asks.
func (s *nodeSuite) run(t *testing.T, options ...string) map[string][]string {
	t.Helper()
	report := s.dir + "/report"
	harness.Must(t, os.MkdirAll(report, 0o755))
	args := slices.Concat(s.enter, []string{"env", "PATH=" + s.dir + ":" + os.Getenv(kubernetesEnv) + ":" + os.Getenv("PATH"), busVariable + "=" + s.bus(),
		kubernetesProgram(t, "ginkgo")}, ginkgoReport(report), options,
		[]string{s.dir + "/e2e_node.test", "--", "--node-name=" + kubeletNode, "--report-dir=" + report,
			"--kubelet-config-file=" + s.dir + "/kubelet.yaml",
			"--kubelet-flags=--node-ip=" + kubeletAddress,
			"--container-runtime-endpoint=unix://" + s.d.Socket, "--container-runtime-process-name=" + harness.DaemonProgram, "--container-runtime-pid-file="})
	p := startProgram(t, "e2e_node.test", s.dir+"/e2e_node.log", args...)
	t.Cleanup(func() { p.finish(t) })
	for {
		select {
		case job := <-s.jobs:
			job.do(t)
			close(job.done)
		case <-p.exited:
			keepOutput(t, report+"/kubelet.log")
			return specResults(t, p, report)
		}
	}
}

// --- the runtime's unit ---------------------------------------------------------------

// runtimeJob stops or starts the daemon.
type runtimeJob struct {
	do   func(*testing.T)
	done chan struct{}
}

// busVariable names the bus that serves for systemd's.
const busVariable = "DBUS_SYSTEM_BUS_ADDRESS"

func (s *nodeSuite) bus() string { return "unix:path=" + s.dir + "/bus" }

// serveUnit answers the calls to systemd by which specs stop and start the runtime.
func (s *nodeSuite) serveUnit(t *testing.T) {
	t.Helper()
	daemon := startProgram(t, "dbus-daemon", s.dir+"/dbus.log", "dbus-daemon", "--session", "--nofork", "--address="+s.bus())
	t.Cleanup(func() { daemon.finish(t) })
	var conn *dbus.Conn
	daemon.waitFor(t, "it accepts connections", func() (err error) {
		conn, err = dbus.Connect(s.bus())
		return err
	})
	t.Cleanup(func() { harness.Must(t, conn.Close()) })
	const unit, manager = "/org/freedesktop/systemd1/unit/berth_2eservice", "org.freedesktop.systemd1.Manager"
	job := func(do func(*testing.T)) func(string, string) (dbus.ObjectPath, *dbus.Error) {
		return func(name, _ string) (dbus.ObjectPath, *dbus.Error) {
			j := runtimeJob{do, make(chan struct{})}
			select {
			case s.jobs <- j:
				<-j.done
			case <-t.Context().Done():
				return "", dbus.MakeFailedError(t.Context().Err())
			}
			if err := conn.Emit("/org/freedesktop/systemd1", manager+".JobRemoved", uint32(1), dbus.ObjectPath(unit+"/1"), name, "done"); err != nil {
				return "", dbus.MakeFailedError(err)
			}
			return unit + "/1", nil
		}
	}
	harness.Must(t, conn.ExportMethodTable(map[string]any{
		"GetUnitByPID": func(uint32) (dbus.ObjectPath, *dbus.Error) { return unit, nil },
		"StopUnit":     job(s.d.Stop),
		"StartUnit": job(func(t *testing.T) {
			if s.d.Gone() {
				s.d.Start(t)
			}
		}),
	}, "/org/freedesktop/systemd1", manager))
	harness.Get(conn.RequestName("org.freedesktop.systemd1", dbus.NameFlagDoNotQueue))(t)
}
