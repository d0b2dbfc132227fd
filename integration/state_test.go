package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// planted is a difference that a test has made.
type planted struct {
	want string // parts of its line, separated by "…"
	undo func()
}

func (p planted) names(found harness.Difference) bool {
	text := found.Text()
	for part := range strings.SplitSeq(p.want, "…") {
		at := strings.Index(text, part)
		if at < 0 {
			return false
		}
		text = text[at+len(part):]
	}
	return true
}

// checkNames runs the check and expects the planted differences, and no others.
func checkNames(t *testing.T, d *harness.Daemon, args []string, all ...planted) {
	t.Helper()
	found := d.StateCheck(t, args...)
	for _, p := range all {
		if !slices.ContainsFunc(found, p.names) {
			t.Errorf("missing difference: %s", p.want)
		}
	}
	for _, f := range found {
		if !slices.ContainsFunc(all, func(p planted) bool { return p.names(f) }) {
			t.Errorf("unexpected difference: %s", f.Text())
		}
	}
	for _, p := range slices.Backward(all) {
		if p.undo != nil {
			p.undo()
		}
	}
}

// fakeID returns an ID of a pod or container without a record.
func fakeID(n int) string { return fmt.Sprintf("%064x", 0xfeed0000+n) }

// plant makes differences while the daemon runs.
type plant struct {
	t *testing.T
	d *harness.Daemon
}

// planted describes a planted difference. undo runs after the check, or at the end of the test.
func (p plant) planted(want string, undo func()) planted {
	var once sync.Once
	made := planted{want, func() { once.Do(undo) }}
	p.t.Cleanup(made.undo)
	return made
}

func (p plant) dir(path, want string) planted {
	harness.Must(p.t, os.MkdirAll(path, 0o700))
	return p.planted(want, func() { harness.Must(p.t, os.RemoveAll(path)) })
}

func (p plant) file(path, content, want string) planted {
	harness.Must(p.t, os.WriteFile(path, []byte(content), 0o600))
	return p.planted(want, func() { harness.Must(p.t, os.Remove(path)) })
}

// renamed renames a file or directory until the check has run.
func (p plant) renamed(path, want string) planted {
	other := filepath.Join(p.d.Dir, "away-"+filepath.Base(path))
	if strings.HasPrefix(path, p.d.State) { // a separate mount
		other = path + ".away"
	} else if strings.HasPrefix(path, p.d.Root) { // may be on a disk
		other = p.d.Root + "-away-" + filepath.Base(path)
	}
	harness.Must(p.t, os.Rename(path, other))
	return p.planted(want, func() { harness.Must(p.t, os.Rename(other, path)) })
}

// changed flips the last byte of a file until the check has run.
func (p plant) changed(path, want string) planted {
	good := harness.Get(os.ReadFile(path))(p.t)
	bad := bytes.Clone(good)
	bad[len(bad)-1] ^= 1
	harness.Must(p.t, os.WriteFile(path, bad, 0o600))
	return p.planted(want, func() { harness.Must(p.t, os.WriteFile(path, good, 0o600)) })
}

func (p plant) mount(path, want string) planted {
	harness.Must(p.t, syscall.Mount("planted", path, "tmpfs", 0, ""))
	return p.planted(want, func() { harness.Must(p.t, syscall.Unmount(path, 0)) })
}

// orphan runs a process without a parent in the cgroup of an ID, next to the cgroup of process
// beside.
func (p plant) orphan(beside int, id, want string) planted {
	file := filepath.Join(p.d.Dir, "orphan-"+id)
	group := filepath.Join(filepath.Dir(machine.CgroupDir(p.t, beside, "pids")), id)
	harness.Must(p.t, os.MkdirAll(group, 0o755))
	out, err := exec.Command("sh", "-c", `sh -c 'echo $$ >$0/cgroup.procs; echo $$ >$1; exec sleep 1000' `+group+` `+file+` </dev/null >/dev/null 2>&1 &`).CombinedOutput()
	if err != nil {
		p.t.Fatalf("%v: %s", err, out)
	}
	var pid int
	harness.Eventually(p.t, "the orphan sleeps", func() error {
		data, err := os.ReadFile(file)
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(data)))
		}
		if err == nil && !strings.HasPrefix(machine.CommandLine(pid), "sleep") {
			err = fmt.Errorf("the process is %q", machine.CommandLine(pid))
		}
		return err
	})
	return p.planted(strings.ReplaceAll(want, "PID", strconv.Itoa(pid)), func() {
		harness.Must(p.t, syscall.Kill(pid, syscall.SIGKILL))
		harness.Must(p.t, harness.WaitFor(func() error { return os.Remove(group) }))
		harness.Must(p.t, os.Remove(file))
	})
}

// The check reports each planted difference of a running daemon, and nothing else.
func TestStateCheckNamesDifferences(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithLayerDriver("directory")) // a driver with files that a test can change
	pod, host := d.RunPod(t), d.RunPod(t, harness.HostNetwork)
	running, created := pod.Run(t), host.Create(t)
	exited, _ := host.RunToEnd(t, harness.Script("exit 0"))
	pause, monitor := pod.PausePID(t), harness.MonitorOf(t, d, running)
	checkNames(t, d, []string{"--bytes"})

	p := plant{t, d}
	at := func(parts ...string) string { return filepath.Join(append([]string{d.State}, parts...)...) }
	below := func(parts ...string) string { return filepath.Join(append([]string{d.Root}, parts...)...) }
	layers := machine.ReadDir(below("images/layers"))
	programs := below("images/layers", layers[0], "fs/bin")
	netns := filepath.Join("/run/netns", "berth-"+pod.Id)
	result := harness.Get(filepath.Glob(below("cni/results/*" + pod.Id + "*")))(t)[0]

	checkNames(t, d, nil,
		p.orphan(pause, fakeID(1), "processes: process PID (sleep)…no record of "+fakeID(1)),
		p.orphan(host.PausePID(t), exited.Id, "processes: container "+exited.Id+": expected no process…process PID (sleep)"),
		p.dir(at("c", fakeID(2)), "shims: "+at("c", fakeID(2))+": expected a recorded pod or container"),
		p.dir(at("libcontainer", exited.Id), "shims: container "+exited.Id+": expected nothing of a launch"),
		p.file("/run/netns/berth-"+fakeID(3), "", "netns: /run/netns/berth-"+fakeID(3)+": expected a recorded pod"),
		p.file(filepath.Join(d.DataDir, "test/10.88.0.250"), fakeID(4)+"\r\neth0", "addresses: "+d.DataDir+"/test/10.88.0.250: expected a recorded pod"),
		p.renamed(filepath.Join(d.DataDir, "test", pod.Ip(t)), "addresses: pod "+pod.Id+": expected the addresses "+pod.Ip(t)+" in the store of addresses, found []"),
		p.renamed(result, "addresses: pod "+pod.Id+": expected the addresses "+pod.Ip(t)+" in the CNI library's result, found []"),
		p.dir(below("images/layers", fakeID(5)), "layers: "+below("images/layers", fakeID(5))+": expected a layer"),
		p.dir(below("images/tmp/half-1"), "layers: "+below("images/tmp/half-1")+": expected a pull"),
		p.mount(below("rootfs", running.Id, "upper"), "mounts: mount at "+below("rootfs", running.Id, "upper")+": expected no mount, found tmpfs of planted"),
		p.mount(at("c", running.Id), "mounts: mount at "+at("c", running.Id)+": expected no mount"),
		planted{want: "processes: container " + running.Id}, // hidden by that mount
		planted{want: "processes: process " + strconv.Itoa(monitor) + " (berth-monitor): expected a recorded container"},
		p.file(below("pods/set-aside"), "", "records: "+below("pods/set-aside")+": expected a record"),
		p.file(below("notes"), "", "records: "+below("notes")+": not a berth file"),
		p.dir(below("sandboxes", fakeID(6)), "records: "+below("sandboxes", fakeID(6))+": expected a recorded pod"),
	)
	checkNames(t, d, nil,
		p.renamed(at("c", running.Id, "sock"), "shims: container "+running.Id+": expected a socket"),
		p.changed(below("containers", created.Id+".record"), "records: "+below("containers", created.Id+".record")+": expected a valid record…checksum"),
		planted{want: "views: container " + created.Id + ": expected a record, since it is listed, found none"},
		planted{want: "records: " + below("rootfs", created.Id) + ": expected a recorded pod or container"},
		p.renamed(below("images/layers", layers[0]), "layers: image …its layer sha256:"+layers[0]),
		planted{want: "layers: container …its layer sha256:" + layers[0]},
	)
	checkNames(t, d, []string{"--bytes"}, p.renamed(programs, "bytes: "+below("images/layers", layers[0])))
	checkNames(t, d, []string{"--bytes"}, p.changed(below("images/layers", layers[0], "fs/etc/passwd"), "bytes: "+below("images/layers", layers[0])+"…checksum"))

	harness.Must(t, syscall.Unmount(netns, syscall.MNT_DETACH))
	checkNames(t, d, nil,
		p.planted("netns: pod "+pod.Id+": expected a network namespace pinned at "+netns, func() {
			harness.Must(t, syscall.Mount(fmt.Sprintf("/proc/%d/ns/net", pause), netns, "", syscall.MS_BIND, ""))
		}),
		planted{want: "mounts: pod " + pod.Id + ": expected a mount at " + netns},
	)
	harness.Must(t, os.Rename(d.LogFile(), d.LogFile()+".old"))
	harness.Must(t, os.Link(d.LogFile()+".old", d.LogFile()))
	harness.Must(t, os.Remove(d.LogFile()+".old")) // the name of the daemon's open file
	checkNames(t, d, nil, planted{want: "fds: descriptor 1 of the daemon: expected a file that exists"}, planted{want: "fds: descriptor 2 of the daemon"})
	d.Restart(t)
}

// The check reports the leftovers of frozen and killed monitors, with and without a daemon.
func TestStateCheckOfLostProcesses(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	frozen, killed := pod.Run(t), pod.Run(t)
	monitors := []int{harness.MonitorOf(t, d, frozen), harness.MonitorOf(t, d, killed)}
	pid, pause := frozen.Pid(t), pod.PausePID(t)
	harness.Must(t, syscall.Kill(monitors[0], syscall.SIGSTOP))
	harness.Must(t, syscall.Kill(pid, syscall.SIGKILL))
	waitDead(t, pid)
	stuck := planted{want: fmt.Sprintf("processes: container %s: expected its init, process %d, or an exit record, found neither", frozen.Id, pid)}
	checkNames(t, d, nil, stuck)

	d.Kill(t)
	harness.Must(t, syscall.Kill(pause, syscall.SIGKILL))
	harness.Must(t, syscall.Kill(monitors[1], syscall.SIGKILL))
	waitDead(t, pause)
	waitDead(t, monitors[1])
	checkNames(t, d, nil, stuck,
		planted{want: fmt.Sprintf("processes: container %s: expected its monitor, process %d, or an exit record, found neither", killed.Id, monitors[1])},
		planted{want: fmt.Sprintf("processes: pod %s: expected its pause, process %d", pod.Id, pause)})
	harness.Must(t, syscall.Kill(monitors[0], syscall.SIGCONT))
	d.Start(t)
	harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
	harness.Equal(t, "reason of the killed monitor's container", killed.WaitExited(t).Reason, "ShimLost")
	frozen.WaitExited(t)
	d.StateMatches(t)
}

func waitDead(t *testing.T, pid int) {
	t.Helper()
	harness.EventuallyTrue(t, fmt.Sprintf("process %d ends", pid), func() bool { return !machine.Alive(pid) })
}

// While pods start and stop, the check reports nothing. A difference during an operation is gone at
// the next try.
func TestStateCheckDuringOperations(t *testing.T) {
	d := harness.StartDaemon(t)
	d.EnsureImage(t, harness.BaseImage)
	var configs []*runtimeapi.PodSandboxConfig
	for range 12 {
		configs = append(configs, d.PodConfig(t))
	}
	work := harness.Go(func() error { return runAndRemovePods(t.Context(), d, configs) })
	for {
		select {
		case err := <-work:
			harness.Must(t, err)
			return
		default:
			d.StateSettles(t) // an operation without CPU time for a second shows at each try
		}
	}
}

// runAndRemovePods runs pods with a container one after the other, and removes them.
func runAndRemovePods(ctx context.Context, d *harness.Daemon, configs []*runtimeapi.PodSandboxConfig) error {
	for _, config := range configs {
		id, err := d.Cri.RunPodSandbox(ctx, config, "")
		if err != nil {
			return err
		}
		pod := &harness.Pod{D: d, Id: id, Config: config}
		container, err := d.Cri.CreateContainer(ctx, id, pod.ContainerConfig(func(c *runtimeapi.ContainerConfig) { c.LogPath = "log" }), config)
		if err != nil {
			return err
		}
		for _, step := range []func() error{
			func() error { return d.Cri.StartContainer(ctx, container) },
			func() error { return d.Cri.StopContainer(ctx, container, 0) },
			func() error { return d.Cri.StopPodSandbox(ctx, id) },
			func() error { return d.Cri.RemovePodSandbox(ctx, id) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
	}
	return nil
}

// `berth check` reports no difference for the files of `berth run`, neither while its pod runs nor
// afterwards.
func TestStateCheckAfterBerthRun(t *testing.T) {
	d := harness.StartDaemon(t)
	d.EnsureImage(t, harness.BaseImage)
	manifest := filepath.Join(d.Dir, "pod.yaml")
	harness.Must(t, os.WriteFile(manifest, []byte(`
apiVersion: v1
kind: Pod
metadata: {name: kept}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers: [{name: c, image: "`+harness.BaseImage+`", imagePullPolicy: Never, command: [sleep, "100000"]}]
`), 0o600))
	runDir := filepath.Join(d.Root, "run") // like the default, /var/lib/berth/run in /var/lib/berth
	run := operatorCommand(d, "run", "--detach", "--run-dir", runDir, "--cgroup-parent", d.PodConfig(t).Linux.CgroupParent, manifest)
	id := strings.TrimSpace(string(harness.Get(run.Output())(t)))
	d.StateMatches(t)
	runBerth(t, d, "rm", "--run-dir", runDir, "--force", id)
	d.StateMatches(t)
	harness.Must(t, os.RemoveAll(runDir))
}

// Another berth on the machine causes no differences by its cgroups and directories, whether its
// daemon runs, was restarted or has exited.
func TestStateCheckWithAnotherDaemon(t *testing.T) {
	d, other := harness.StartDaemon(t), harness.StartDaemon(t)
	pod := d.RunPod(t)
	pod.Run(t)
	beside := func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = pod.Config.Linux.CgroupParent }
	its := other.RunPod(t, beside)
	c := its.Run(t)
	d.StateMatches(t)
	other.StateMatches(t)
	other.Restart(t)
	d.StateMatches(t)
	other.StateMatches(t)
	other.Kill(t)
	d.StateMatches(t)
	other.Start(t)
	c.Stop(t, 0)
	its.Remove(t)
	pod.Remove(t)
}

// checkOf runs `berth check` with only the daemon's socket and these flags.
func checkOf(t *testing.T, d *harness.Daemon, flags ...string) (out string, err error) {
	t.Helper()
	raw, err := d.Command(append([]string{"check", "--json", "--listen", d.Socket}, flags...)...).Output()
	if onlyWarnings(err) {
		err = nil
	}
	return string(raw), err
}

// `berth check` uses the configuration and flags of the running daemon, unless its own flags
// override them.
func TestCheckUsesDaemonsConfiguration(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t)
	pod.Run(t)
	var report struct {
		Differences              []harness.Difference
		Daemon, Pods, Containers int
	}
	out, err := checkOf(t, d, "--state")
	harness.Must(t, json.Unmarshal([]byte(out), &report))
	harness.Equal(t, "state: daemon, pods and containers of the report", fmt.Sprint(report.Daemon, report.Pods, report.Containers), fmt.Sprint(d.Cmd.Process.Pid, 1, 1))
	if err != nil || len(report.Differences) > 0 {
		t.Errorf("state: %v\n%s", err, out)
	}
	out, err = checkOf(t, d)
	for _, want := range []string{"of the daemon that serves on " + d.Socket, "room in " + d.Root, "ok"} {
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("check: %v; the output does not contain %q:\n%s", err, want, out)
		}
	}
	out, err = checkOf(t, d, "--state", "--root", filepath.Join(d.Dir, "none"))
	if err != nil || !strings.Contains(out, `"daemon": 0`) || !strings.Contains(out, `"pods": 0`) {
		t.Errorf("state of another root: %v\n%s", err, out)
	}
	out, err = checkOf(t, d, "--config", os.DevNull)
	if err != nil || strings.Contains(out, d.Root) {
		t.Errorf("check of a configuration file: %v; the output mentions the daemon's root:\n%s", err, out)
	}
	d.Kill(t)
	if out, _ = checkOf(t, d); !strings.Contains(out, "none answers at "+d.Socket) {
		t.Errorf("the output of check does not mention that no daemon answers:\n%s", out)
	}
	d.Start(t)
	pod.Remove(t)
}

// The check reports no problem with user namespaces if pods can have them, for any mode of the
// state directory.
func TestCheckOfUserNamespaces(t *testing.T) {
	d := harness.StartDaemon(t)
	const base = 6 * usernsLength
	pod := runMapped(t, d, base)
	harness.Equal(t, "a container in a user namespace", pod.Sh(t, "echo fine", inUserNamespace(base)), "fine\n")
	harness.Equal(t, "mode of the state directory", harness.Get(os.Stat(d.State))(t).Mode().Perm(), os.FileMode(0o700))
	out, err := checkOf(t, d)
	var findings []struct{ Subject, Level, Found string }
	harness.Must(t, json.Unmarshal([]byte(out), &findings))
	for _, f := range findings {
		if f.Subject == "user namespaces" && f.Level != "ok" || err != nil {
			t.Errorf("check: %v; the result for user namespaces is %s, %s", err, f.Level, f.Found)
		}
	}
	harness.WantText(t, "output of check", out, `"user namespaces"`)
	pod.Remove(t)
}
