package integration

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
)

// containerdSocket is the place where kubelet's cAdvisor expects containerd.
const containerdSocket = "/run/containerd/containerd.sock"

// containerdEnv names a directory with the programs containerd, containerd-shim-runc-v2 and runc.
// integration/containerd/build makes it.
const containerdEnv = harness.ContainerdEnv

// recordedStatistics returns the file with the statistics of observedPod from a kubelet of this
// version with default feature gates, on containerd with cgroup v1.
func recordedStatistics(t *testing.T) string {
	t.Helper()
	return "testdata/kubelet-containerd-statistics-" + kubeletVersion(t)
}

var updateStatistics = flag.Bool("update-statistics", false, "rewrite testdata/kubelet-containerd-statistics-VERSION (with "+containerdEnv+")")

// observedPod causes every activity that the series measure: two containers, traffic, execs.
const observedPod = `
containers:
- name: web
  command: [httpd, -f, -p, "8080", -h, /www]
  readinessProbe: {httpGet: {port: 8080}, periodSeconds: 1}
  resources: {limits: {memory: 64Mi, cpu: 500m}}
- name: other
  command: [sh, -c, 'head -c 65536 /dev/zero >/file; echo begun; while :; do usleep 10000; done']
  readinessProbe: {exec: {command: [test, -e, /file]}, periodSeconds: 1, timeoutSeconds: 20}
`

// With its default feature gates, kubelet reports the same statistics for pods on berth as for pods
// on containerd.
func TestKubeletCadvisor(t *testing.T) {
	n := startNode(t, quickKubelet, harness.WithConfig(fmt.Sprintf("cadvisor_socket = %q", containerdSocket)))
	p := n.apply(t, "observed", observedPod)
	p.awaitReady(t)
	if machine.Cgroup2() {
		n.kubelet.waitFor(t, "the pod's network is known", func() error { return n.hasNetwork(p) })
	} else {
		n.awaitStatistics(t, p, recorded(t))
	}
	n.checkIdentity(t, p)
	t.Run("NoOtherCgroupHasThePodsName", func(t *testing.T) { n.checkNoOthers(t, p) })
	t.Run("DaemonKilled", n.testCadvisorAfterKill)
	t.Run("PodRemoved", func(t *testing.T) {
		p.withdraw(t)
		p.awaitGone(t)
		n.kubelet.waitFor(t, "the pod's series end", func() error {
			if rows, err := n.rows(p); err != nil || len(rows) > 0 {
				return fmt.Errorf("%d rows are left: %v", len(rows), err)
			}
			return nil
		})
	})
}

// testCadvisorAfterKill starts pods after a restart of the daemon until kubelet's cAdvisor reports
// the network of one. cAdvisor redials a dead socket only after up to three seconds, and asks about
// each cgroup only once.
func (n *node) testCadvisorAfterKill(t *testing.T) {
	n.d.Kill(t)
	n.d.Start(t)
	var err error
	for i := range 3 {
		later := n.apply(t, fmt.Sprintf("later%d", i), observedPod)
		later.awaitReady(t)
		if err = harness.PollUpTo(time.Minute, kubeletPause, func() error { return n.hasNetwork(later) }); err == nil {
			n.checkIdentity(t, later)
			return
		}
	}
	t.Errorf("no pod after the restart has network statistics: %v", err)
}

// The recorded statistics match containerd's output. The test needs containerd's programs, which
// are not part of the project.
func TestKubeletStatisticsMatchContainerd(t *testing.T) {
	bin := os.Getenv(containerdEnv)
	if bin == "" {
		t.Skipf("%s is not set", containerdEnv)
	}
	if machine.Cgroup2() {
		t.Skip("the recorded statistics are from cgroup v1")
	}
	prepareNode(t)
	d, _ := startContainerd(t, bin)
	n := newNodeOf(t, d, quickKubelet)
	n.start(t)
	t.Cleanup(func() { n.stop(t) })
	t.Cleanup(func() { n.awaitEmpty(t) })
	p := n.apply(t, "observed", observedPod)
	p.awaitReady(t)
	if *updateStatistics {
		var last []string
		changed := time.Now()
		n.kubelet.waitFor(t, "the statistics have not changed for a minute", func() error { // cAdvisor polls at least every 15 s
			all, err := n.statistics(p)
			if !slices.Equal(all, last) {
				last, changed = all, time.Now()
			}
			if err == nil && time.Since(changed) < time.Minute {
				err = fmt.Errorf("the last change was %v ago", time.Since(changed))
			}
			return err
		})
		harness.Must(t, os.WriteFile(recordedStatistics(t), []byte(strings.Join(last, "\n")+"\n"), 0o600))
	}
	n.awaitStatistics(t, p, recorded(t))
	n.checkIdentity(t, p)
}

// containerdConfig is a format string. Its arguments are a directory for containerd, the socket,
// the sandbox image, runc, and the CNI directories.
const containerdConfig = `version = 3
root = "%[1]s/root"
state = "%[1]s/state"
[grpc]
address = %[2]q
[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %[3]q
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "oci"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.oci]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.oci.options]
BinaryName = %[4]q
SystemdCgroup = false
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%[5]q]
conf_dir = %[6]q
[plugins.'io.containerd.nri.v1.nri']
disable = true
[plugins.'io.containerd.internal.v1.opt']
path = "%[1]s/opt"
`

// startContainerd starts containerd at its usual socket, with all other files in a separate
// directory. It returns containerd as a runtime for a node, and a function that restarts it.
func startContainerd(t *testing.T, bin string) (d *harness.Daemon, restart func()) {
	t.Helper()
	d = harness.NewDaemon(t) // provides directories and a network
	d.Socket = containerdSocket
	pause, err := fixture.Image(v1.Config{Cmd: []string{"sleep", "100000"}})
	harness.Must(t, err)
	pauseName := harness.Get(harness.Registry.Push("pause:latest", pause))(t)
	config := d.Dir + "/containerd.toml"
	harness.Must(t, os.WriteFile(config, fmt.Appendf(nil, containerdConfig, d.Dir+"/containerd", d.Socket, pauseName,
		filepath.Join(bin, "runc"), harness.PluginDir, d.ConfDir), 0o600))
	start := func() *program {
		daemon := startProgram(t, "containerd", d.Dir+"/containerd.log",
			"env", "PATH="+bin+":"+os.Getenv("PATH"), filepath.Join(bin, "containerd"), "--config", config, "--log-level", "warn")
		t.Cleanup(func() { daemon.finish(t) })
		t.Cleanup(func() { daemon.stop(t) })
		return daemon
	}
	daemon := start()
	d.Connect(t)
	return d, func() {
		daemon.stop(t)
		daemon = start()
		harness.Eventually(t, "containerd answers", func() error {
			_, err := d.Cri.Status(t.Context(), false)
			return err
		})
	}
}

// recorded returns the lines of recordedStatistics.
func recorded(t *testing.T) []string {
	t.Helper()
	data := harness.Get(os.ReadFile(recordedStatistics(t)))(t)
	return strings.Split(strings.TrimSpace(string(data)), "\n")
}

// awaitStatistics waits until kubelet reports exactly the wanted series of the pod. It compares
// names, not values.
func (n *node) awaitStatistics(t *testing.T, p *kubePod, want []string) {
	t.Helper()
	n.kubelet.waitFor(t, "the series and the summary of "+p.name, func() error {
		got, err := n.statistics(p)
		if err != nil {
			return err
		}
		if missing, more := without(want, got), without(got, want); len(missing)+len(more) > 0 {
			return fmt.Errorf("missing:\n%s\nadditional:\n%s", strings.Join(missing, "\n"), strings.Join(more, "\n"))
		}
		return nil
	})
}

// without returns the elements of all that are not in others.
func without(all, others []string) []string {
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(others, s) })
}

// statistics lists the names of the pod's series, and of the fields in the pod's part of the
// summary.
func (n *node) statistics(p *kubePod) ([]string, error) {
	rows, err := n.rows(p)
	if err != nil {
		return nil, err
	}
	all := map[string]bool{}
	for _, r := range rows {
		// A disk has series only after something was read from it.
		if !strings.HasPrefix(r.metric, "container_fs_") && !strings.HasPrefix(r.metric, "container_blkio_") {
			all["series "+r.kind()+" "+r.metric+r.others()] = true
		}
	}
	fields, err := n.summaryOf(p)
	for path := range fields {
		all["summary."+path] = true
	}
	return slices.Sorted(maps.Keys(all)), err
}

// row is a line of /metrics/cadvisor.
type row struct {
	metric string
	labels map[string]string
}

// kind returns the cgroup of the pod to which the row belongs.
func (r row) kind() string {
	switch {
	case r.labels["container"] != "":
		return r.labels["container"]
	case r.labels["name"] != "":
		return "sandbox"
	default:
		return "pod"
	}
}

// others are the labels that do not identify the row's pod or container.
func (r row) others() string {
	var others []string
	for key, value := range r.labels {
		if !slices.Contains([]string{"container", "id", "image", "name", "namespace", "pod"}, key) {
			others = append(others, key+"="+value)
		}
	}
	slices.Sort(others)
	return "{" + strings.Join(others, ",") + "}"
}

var (
	metricLine  = regexp.MustCompile(`^(\w+)\{(.*)\} `)
	metricLabel = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// allRows returns the rows of /metrics/cadvisor.
func (n *node) allRows() ([]row, error) {
	body, err := n.readAll("/metrics/cadvisor")
	if err != nil {
		return nil, err
	}
	var rows []row
	for line := range strings.Lines(string(body)) {
		parts := metricLine.FindStringSubmatch(line)
		if parts == nil {
			continue
		}
		r := row{metric: parts[1], labels: map[string]string{}}
		for _, label := range metricLabel.FindAllStringSubmatch(parts[2], -1) {
			r.labels[label[1]] = label[2]
		}
		rows = append(rows, r)
	}
	return rows, nil
}

func (n *node) rows(p *kubePod) ([]row, error) {
	rows, err := n.allRows()
	return slices.DeleteFunc(rows, func(r row) bool { return r.labels["pod"] != p.name }), err
}

// hasNetwork returns an error if series or summary lack data of the pod's network.
func (n *node) hasNetwork(p *kubePod) error {
	all, err := n.statistics(p)
	if err != nil {
		return err
	}
	for _, want := range []string{
		"series sandbox container_network_receive_bytes_total{interface=eth0}", "series sandbox container_network_transmit_bytes_total{interface=eth0}",
		"series web container_processes{}", "summary.network.rxBytes", "summary.network.interfaces[eth0].txBytes", "summary.process_stats.process_count",
	} {
		if !slices.Contains(all, want) {
			return fmt.Errorf("%s is missing", want)
		}
	}
	return nil
}

// checkIdentity checks the labels that identify the pod in its rows.
func (n *node) checkIdentity(t *testing.T, p *kubePod) {
	t.Helper()
	ids := map[string]string{"pod": "", "sandbox": p.sandboxID(t)}
	pod := p.awaitReady(t)
	for _, s := range pod.Status.ContainerStatuses {
		_, ids[s.Name], _ = strings.Cut(s.ContainerID, "://")
	}
	rows := harness.Get(n.rows(p))(t)
	seen := map[string]bool{}
	for _, r := range rows {
		kind := r.kind()
		seen[kind] = true
		id, known := ids[kind]
		harness.Equal(t, "name of a row of "+kind, r.labels["name"], id)
		harness.Equal(t, "namespace of a row of "+kind, r.labels["namespace"], "default")
		if !strings.HasPrefix(r.labels["id"], n.cgroup()) || !known || id != "" && filepath.Base(r.labels["id"]) != id {
			t.Errorf("%s of %s is of cgroup %s", r.metric, kind, r.labels["id"])
		}
		image := r.labels["image"]
		if kind != "pod" && kind != "sandbox" {
			harness.Equal(t, "image of a row of "+kind, image, harness.BaseImage)
		} else if (image != "") != (kind == "sandbox") {
			t.Errorf("%s of %s has image %q", r.metric, kind, image)
		}
	}
	for kind := range ids {
		if !seen[kind] {
			t.Errorf("no row of %s", kind)
		}
	}
}

// checkNoOthers checks that nested cgroups, such as those of execs, are not counted again.
func (n *node) checkNoOthers(t *testing.T, p *kubePod) {
	main := p.container(t, "web")
	for range 5 {
		main.Exec(t, "true")
	}
	rows := harness.Get(n.allRows())(t)
	for _, r := range rows {
		if strings.Contains(r.labels["id"], main.Id+"/") && (r.labels["pod"] != "" || r.labels["container"] != "" || !machine.Cgroup2()) {
			t.Errorf("a row of a cgroup of an exec: %v", r)
		}
	}
}

// sandboxID returns the ID of the pod's only sandbox.
func (p *kubePod) sandboxID(t *testing.T) string {
	t.Helper()
	all := harness.Get(p.n.d.Cri.ListPodSandbox(t.Context(), &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"io.kubernetes.pod.name": p.name}}))(t)
	if len(all) != 1 {
		t.Fatalf("%s has %d sandboxes", p.name, len(all))
	}
	return all[0].Id
}
