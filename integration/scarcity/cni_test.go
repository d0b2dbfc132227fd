package scarcity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/faults"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// shortTimeout is the time limit for hanging plugins. Other plugins need tens of milliseconds.
var shortTimeout = harness.WithConfig(`cni.timeout = "3s"`)

// addCases lists failures of an ADD.
var addCases = []struct {
	fault string
	code  codes.Code
	parts []string
}{
	{faults.Hang, codes.DeadlineExceeded, []string{"did not finish in time and was killed"}},
	{faults.WorkHang, codes.DeadlineExceeded, []string{"did not finish in time and was killed"}},
	{faults.Die, codes.Internal, []string{"signal: killed"}},
	{faults.WorkDie, codes.Internal, []string{"signal: killed"}},
	{faults.Crash, codes.Internal, []string{"exit status 2", "out of cheese"}},
	{faults.Garbage, codes.Internal, []string{"its result is invalid", "<html>not found"}},
	{faults.WorkGarbage, codes.Internal, []string{"its result is invalid", "<html>not found"}},
	{faults.WorkNothing, codes.Internal, []string{"its result is invalid"}},
	{faults.WorkFlood, codes.Internal, []string{"2097152 bytes, the limit is"}},
	{faults.Fail(1), codes.Unavailable, []string{"no room in the inn", "come back later"}},
}

// A failed ADD leaves nothing, wherever the plugin fails. The same pod runs once the
// plugin works again. bridge is the first plugin of the chain. When portmap fails, an address and a
// veth exist.
func TestFailedAdd(t *testing.T) {
	testutil.Long(t)
	for _, name := range []string{"bridge", "portmap"} {
		t.Run(name, func(t *testing.T) {
			plugin := faults.NewPlugin(t, name)
			d := harness.StartDaemon(t, shortTimeout, plugin.Option)
			for _, tt := range addCases {
				t.Run(tt.fault, func(t *testing.T) {
					plugin.Inject(t, "ADD", tt.fault)
					config := d.PodConfig(t, harness.HostPort(18090, 80, runtimeapi.Protocol_TCP))
					_, err := d.Cri.RunPodSandbox(t.Context(), config, "")
					harness.WantCode(t, err, tt.code, append(tt.parts, "CNI plugin "+name, "CNI ADD of pod", config.Metadata.Name)...)
					harness.Equal(t, "number of pods", len(harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)), 0)
					d.NoLeaks(t)
					d.StateSettles(t)
					plugin.Inject(t, "ADD", "")
					d.RunPodConfig(t, config).Remove(t)
				})
			}
		})
	}
}

// delCases lists failures of a DEL, including harmless ones.
var delCases = []struct {
	fault string
	code  codes.Code // OK: berth ignores the plugin's output if it exits with 0
	parts []string
}{
	{faults.Hang, codes.DeadlineExceeded, []string{"did not finish in time and was killed"}},
	{faults.WorkHang, codes.DeadlineExceeded, []string{"did not finish in time and was killed"}},
	{faults.Die, codes.Internal, []string{"signal: killed"}},
	{faults.WorkDie, codes.Internal, []string{"signal: killed"}},
	{faults.Crash, codes.Internal, []string{"exit status 2", "out of cheese"}},
	{faults.WorkGarbage, codes.OK, nil},
	{faults.WorkFlood, codes.Internal, []string{"2097152 bytes, the limit is"}},
	{faults.Fail(1), codes.Unavailable, []string{"no room in the inn"}},
}

// A failed DEL is an error of StopPodSandbox. Nevertheless the pod is marked not ready, and its
// processes have exited. The next call removes its network.
func TestFailedDel(t *testing.T) {
	plugin := faults.NewPlugin(t, "bridge")
	d := harness.StartDaemon(t, shortTimeout, plugin.Option)
	for _, tt := range delCases {
		t.Run(tt.fault, func(t *testing.T) {
			pod := d.RunPod(t)
			c := pod.Run(t)
			plugin.Inject(t, "DEL", tt.fault)
			err := d.Cri.StopPodSandbox(t.Context(), pod.Id)
			if tt.code == codes.OK {
				harness.Must(t, err)
			} else {
				harness.WantCode(t, err, tt.code, append(tt.parts, "CNI plugin bridge", "CNI DEL of pod", pod.Id)...)
			}
			harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
			harness.Equal(t, "state of the container", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_EXITED)
			plugin.Inject(t, "DEL", "")
			d.StateSettles(t)
			pod.Remove(t)
			d.Clean(t)
			d.NoLeaks(t)
			d.StateSettles(t)
		})
	}
}

// The DEL of a pod fails ten times. The eleventh call stops the pod, which keeps its address until
// then.
func TestStopSucceedsAfterTenFailedDels(t *testing.T) {
	plugin := faults.NewPlugin(t, "bridge")
	d := harness.StartDaemon(t, plugin.Option)
	pod := d.RunPod(t)
	address := filepath.Join(d.DataDir, "test", pod.Ip(t))
	plugin.Inject(t, "DEL", faults.Fail(10))
	for i := range 10 {
		harness.WantCode(t, d.Cri.StopPodSandbox(t.Context(), pod.Id), codes.Unavailable, "no room in the inn")
		if _, err := os.Stat(address); err != nil {
			t.Fatalf("after %d failures: %v", i+1, err)
		}
	}
	pod.Stop(t)
	if _, err := os.Stat(address); err == nil {
		t.Error("the address is still in use")
	}
	pod.Stop(t)
	if n := len(plugin.Calls("DEL")); n != 11 {
		t.Errorf("DEL was called %d times, want 11", n)
	}
}

// If RunPodSandbox fails and its undo fails too, the undo is retried in the background. Retries
// have growing pauses until one succeeds. Verbose Status shows the retries. A new start of the pod
// takes over the undo, and other pods start meanwhile.
func TestFailedUndoIsRetried(t *testing.T) {
	failures, longest := 3, 9.0 // pauses of 1, 5 and 10 seconds
	if harness.Thorough() {
		failures, longest = 10, 60
	}
	plugin := faults.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, plugin.Option)
	plugin.Inject(t, "ADD", faults.Fail(1))
	plugin.Inject(t, "DEL", faults.Fail(1000))
	config := d.PodConfig(t)
	_, err := d.Cri.RunPodSandbox(t.Context(), config, "")
	harness.WantCode(t, err, codes.Unavailable, "no room in the inn")
	abandoned := plugin.Calls("ADD")[0]
	_, err = d.Cri.RunPodSandbox(t.Context(), config, "")
	harness.WantCode(t, err, codes.Unavailable, "an earlier start of the pod is not undone")
	second := d.RunPod(t)

	harness.Must(t, harness.PollUpTo(10*time.Minute, 100*time.Millisecond, func() error {
		pause := undoPause(t, d)
		if pause > 60 {
			t.Fatalf("a pause of %v s", pause)
		}
		if pause < longest || len(plugin.Calls("DEL")) < failures {
			return fmt.Errorf("a pause of %v s after %d DELs", pause, len(plugin.Calls("DEL")))
		}
		return nil
	}))
	plugin.Inject(t, "DEL", "")
	third := d.RunPodConfig(t, config)
	for _, id := range plugin.Calls("DEL") {
		harness.Equal(t, "pod ID of a DEL", id, abandoned)
	}
	second.Remove(t)
	third.Remove(t)
}

// failingPlugin is a CNI plugin whose ADD and DEL fail while a file exists. It records its calls.
const failingPlugin = `#!/bin/bash
in=$(cat)
[ "$CNI_COMMAND" = VERSION ] && { echo '{"cniVersion":"1.0.0","supportedVersions":["0.4.0","1.0.0"]}'; exit; }
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS" >>%[1]s/calls
[ -e %[1]s/fail ] && { echo '{"cniVersion":"1.0.0","code":999,"msg":"datastore: unauthorized"}'; exit 1; }
[ "$CNI_COMMAND" = ADD ] && echo "$in" | jq -c .prevResult
exit 0
`

// failingChain is a network whose last plugin is failingPlugin, and whether it fails.
type failingChain struct{ dir string }

func newFailingChain(t *testing.T) failingChain {
	c := failingChain{t.TempDir()}
	harness.Must(t, os.WriteFile(filepath.Join(c.dir, "fka"), fmt.Appendf(nil, failingPlugin, c.dir), 0o700))
	return c
}

func (c failingChain) option(t *testing.T, d *harness.Daemon) {
	d.BinDirs = append([]string{c.dir}, d.BinDirs...)
	harness.WithNetwork(c.list(d, "test", `, {"type": "fka"}`))(t, d)
}

func (c failingChain) list(d *harness.Daemon, name, last string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
		{"type": "bridge", "bridge": "berth0", "isGateway": true,
			"ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.88.0.0/24"}]]}},
		{"type": "portmap", "capabilities": {"portMappings": true}}%s]}`, name, d.DataDir, last)
}

func (c failingChain) fail(t *testing.T) {
	harness.Must(t, os.WriteFile(filepath.Join(c.dir, "fail"), nil, 0o600))
}

func (c failingChain) work(t *testing.T) { harness.Must(t, os.Remove(filepath.Join(c.dir, "fail"))) }

func (c failingChain) calls(verb string) (calls [][]string) {
	for _, line := range machine.ReadLines(filepath.Join(c.dir, "calls")) {
		if strings.HasPrefix(line, verb+" ") {
			calls = append(calls, strings.Split(line, " "))
		}
	}
	return calls
}

// leases returns the addresses that pods hold.
func leases(d *harness.Daemon) (ips []string) {
	for _, name := range machine.ReadDir(filepath.Join(d.DataDir, "test")) {
		if net.ParseIP(name) != nil {
			ips = append(ips, name)
		}
	}
	return ips
}

// pins returns the network namespaces of pods.
func pins() []string { return machine.ReadDir("/run/netns") }

// unreleased waits until a number of pods are pending, and returns their description.
func unreleased(t *testing.T, d *harness.Daemon, want int) (pending []string) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("%d pods are pending", want), func() error {
		out, err := d.Command("check", "--state", "--config", d.ConfigFile(), "--listen", d.Socket, "--root", d.Root, "--json", "--state="+d.State).Output()
		var report struct{ Pending []string }
		if err := errors.Join(err, json.Unmarshal(out, &report)); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		pending = report.Pending
		if len(pending) != want {
			return fmt.Errorf("pending: %q", pending)
		}
		return nil
	})
	return pending
}

// kubelet starts a pod again and again, and each start and its undo fail (calico#5712). One pod's
// resources stay. After some failures only what the plugins hold stays. Everything is released when
// the plugins work again.
func TestRepeatedStartsLeaveOnePod(t *testing.T) {
	chain := newFailingChain(t)
	d := harness.StartDaemon(t, chain.option)
	chain.fail(t)
	config := d.PodConfig(t)
	for try := range 25 {
		config.Metadata.Attempt = uint32(try % 3)
		if _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); err == nil || !strings.Contains(err.Error(), "datastore: unauthorized") {
			t.Fatalf("try %d: %v", try, err)
		}
	}
	harness.Equal(t, "ADDs", len(chain.calls("ADD")), 1)
	harness.Equal(t, "addresses", len(leases(d)), 1)
	harness.Equal(t, "network namespaces", fmt.Sprint(pins()), "[]") // after so many failures
	pending := unreleased(t, d, 1)[0]
	for _, part := range []string{"network test", "datastore: unauthorized", config.Metadata.Namespace + "/" + config.Metadata.Name} {
		if !strings.Contains(pending, part) {
			t.Errorf("%q lacks %q", pending, part)
		}
	}
	d.Restart(t)
	unreleased(t, d, 1)
	if _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); err == nil {
		t.Error("the pod started")
	}
	harness.Equal(t, "addresses after a restart", len(leases(d)), 1)
	harness.Equal(t, "network namespace of the last DEL", chain.calls("DEL")[len(chain.calls("DEL"))-1][2], "")
	chain.work(t)
	pod := d.RunPodConfig(t, config)
	unreleased(t, d, 0)
	harness.Equal(t, "addresses", fmt.Sprint(leases(d)), fmt.Sprint([]string{pod.Ip(t)}))
	pod.Remove(t)
}

// Many pods whose start and undo fail share one loop of retries. When the plugins work again, all
// are released.
func TestRetriesOfUndoAreBounded(t *testing.T) {
	const pods = 20
	chain := newFailingChain(t)
	d := harness.StartDaemon(t, chain.option)
	chain.fail(t)
	for range pods {
		if _, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), ""); err == nil {
			t.Fatal("the pod started")
		}
	}
	unreleased(t, d, pods)
	first := len(chain.calls("DEL"))
	began := time.Now()
	harness.Must(t, harness.PollUpTo(5*time.Minute, 100*time.Millisecond, func() error {
		if more := len(chain.calls("DEL")) - first; more < 3 {
			return fmt.Errorf("%d retries", more)
		}
		return nil
	}))
	if limit := int(time.Since(began)/(5*time.Second)) + 2; len(chain.calls("DEL"))-first > limit {
		t.Errorf("%d retries in %v", len(chain.calls("DEL"))-first, time.Since(began))
	}
	d.Restart(t) // no burst
	first = len(chain.calls("DEL"))
	unreleased(t, d, pods)
	if more := len(chain.calls("DEL")) - first; more > pods/2 {
		t.Errorf("%d DELs at a start", more)
	}
	chain.work(t)
	unreleased(t, d, 0)
	harness.Equal(t, "addresses", len(leases(d)), 0)
}

// When the CNI configuration changes, DEL with the new one releases the pod: at once if it is the
// same network, and after some failures if it is another.
func TestUndoWithChangedConfiguration(t *testing.T) {
	for _, name := range []string{"test", "other"} {
		t.Run(name, func(t *testing.T) {
			chain := newFailingChain(t)
			d := harness.StartDaemon(t, chain.option)
			chain.fail(t)
			config := d.PodConfig(t)
			tries := 1
			if name != "test" {
				tries = 6
			}
			for range tries {
				if _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); err == nil {
					t.Fatal("the pod started")
				}
			}
			harness.Must(t, os.WriteFile(d.NetworkFile(), []byte(chain.list(d, name, "")), 0o600))
			unreleased(t, d, 0)
			harness.Equal(t, "addresses of the first network", len(leases(d)) > 0, name != "test") // only its plugins can release them
			pod := d.RunPodConfig(t, config)
			pod.Remove(t)
			harness.Must(t, os.RemoveAll(d.DataDir))
		})
	}
}

// slack is the tolerance in seconds of a time limit in these tests.
const slack = 15

// undoPause returns the wait before the next retry of an undo, in seconds, from verbose Status. It
// returns 0 without such a wait.
func undoPause(t *testing.T, d *harness.Daemon) float64 {
	t.Helper()
	var waits []struct {
		What         string
		LimitSeconds float64
	}
	harness.Must(t, json.Unmarshal([]byte(harness.Get(d.Cri.Status(t.Context(), true))(t).Info["waits"]), &waits))
	for _, w := range waits {
		if strings.HasPrefix(w.What, "retry: undo") {
			return w.LimitSeconds - slack
		}
	}
	return 0
}

// The daemon dies while a plugin runs. The next daemon kills the plugin's processes, and a repeated
// request for the pod succeeds.
func TestDaemonDiesWithPlugin(t *testing.T) {
	testutil.Long(t)
	for _, fault := range []string{faults.Hang, faults.WorkHang, faults.WorkKill} {
		for _, name := range []string{"bridge", "portmap"} {
			t.Run(name+" "+fault, func(t *testing.T) {
				plugin := faults.NewPlugin(t, name)
				d := harness.StartDaemon(t, plugin.Option)
				config := d.PodConfig(t, harness.HostPort(18090, 80, runtimeapi.Protocol_TCP))
				plugin.Inject(t, "ADD", fault)
				killDuring(t, d, plugin, func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
				plugin.Inject(t, "ADD", "")
				d.Start(t)
				pod := d.RunPodConfig(t, config)

				plugin.Inject(t, "DEL", fault)
				killDuring(t, d, plugin, func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) })
				plugin.Inject(t, "DEL", "")
				d.Start(t)
				harness.Equal(t, "state of the pod", pod.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_NOTREADY)
				pod.Remove(t)
			})
		}
	}
}

// killDuring kills the daemon while the plugin runs in a call, which must fail.
func killDuring(t *testing.T, d *harness.Daemon, plugin *faults.Plugin, call func() error) {
	t.Helper()
	before := plugin.Left()
	ended := harness.Go(call)
	plugin.AwaitChildren(t, before)
	d.End(t)
	if err := <-ended; err == nil {
		t.Error("the call succeeded although the daemon was killed")
	}
}

// Children of a successful plugin keep running, even after the daemon is killed.
func TestChildOfPluginSurvivesDaemon(t *testing.T) {
	plugin := faults.NewPlugin(t, "bridge")
	d := harness.StartDaemon(t, plugin.Option)
	plugin.Inject(t, "ADD", faults.WorkLeave)
	pod := d.RunPod(t)
	d.End(t)
	d.Start(t)
	for _, line := range []string{"sleep 100000", "sleep 100001"} {
		pids := machine.ProcessesOf(line)
		harness.Equal(t, "number of "+line, len(pids), 1)
		for _, pid := range pids {
			machine.KillProcess(t, pid)
		}
	}
	pod.Remove(t)
}

// While a plugin hangs for one pod, pods on the host's network and on another network start and
// stop, and the daemon answers all requests.
func TestHungPluginDelaysNoOtherPod(t *testing.T) {
	plugin := faults.NewPlugin(t, "portmap")
	d := harness.StartDaemon(t, plugin.Option)
	victim := d.RunPod(t)
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run(verb, func(t *testing.T) {
			plugin.Inject(t, verb, faults.Hang)
			before := plugin.Left()
			ctx, cancel := context.WithCancel(t.Context())
			config, ended := d.PodConfig(t), make(chan error, 1)
			go func() {
				if verb == "ADD" {
					_, err := d.Cri.RunPodSandbox(ctx, config, "")
					ended <- err
					return
				}
				ended <- d.Cri.StopPodSandbox(ctx, victim.Id)
			}()
			plugin.AwaitChildren(t, before)
			plugin.Inject(t, verb, "")
			d.RunPod(t, harness.HostNetwork).Remove(t)
			harness.WithNetwork(fmt.Sprintf(otherNetwork, d.DataDir))(t, d)
			other := d.RunPod(t)
			other.Run(t)
			other.Remove(t)
			harness.Get(d.Cri.ListPodSandbox(t.Context(), nil))(t)
			waits := harness.Get(d.Cri.Status(t.Context(), true))(t).Info["waits"]
			if !harness.Contains(waits, "CNI "+verb) {
				t.Errorf("verbose Status does not show the wait for a plugin: %s", waits)
			}
			select {
			case err := <-ended:
				t.Errorf("the plugin does not hang: %v", err)
			default:
			}
			cancel()
			<-ended
		})
	}
	d.End(t) // otherwise the cleanup would wait for the plugins
	d.Start(t)
}

// otherNetwork shares only host-local with the default network configuration. %q is its data
// directory.
const otherNetwork = `{"cniVersion": "1.0.0", "name": "other", "plugins": [
	{"type": "ptp", "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": "10.89.0.0/24"}]]}}]}`

// DEL needs neither ADD's configuration nor the CNI library's cached result.
func TestDelWithoutConfig(t *testing.T) {
	for _, restart := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %v", restart), func(t *testing.T) {
			d := harness.StartDaemon(t)
			pod := d.RunPod(t, harness.HostPort(18090, 80, runtimeapi.Protocol_TCP))
			harness.Must(t, os.Remove(d.NetworkFile()))
			harness.Must(t, os.RemoveAll(filepath.Join(d.Root, "cni")))
			if restart {
				d.Restart(t)
			}
			pod.Remove(t)
		})
	}
}

// A pod whose record is lost is removed. A DEL with the CNI library's cached result releases the
// address. The pod's ID identifies the other objects.
func TestPodWithLostRecordIsRemoved(t *testing.T) {
	for _, c := range []struct {
		name string
		also func(d *harness.Daemon, id, address string) []string // returns the paths of further files to truncate
	}{
		{"alone", func(*harness.Daemon, string, string) []string { return nil }},
		{"with the CNI library's cache", func(d *harness.Daemon, id, _ string) []string {
			return []string{filepath.Join(d.Root, "cni/results", "test-"+id+"-eth0")}
		}},
		{"with the content of the address file, as in a power failure", func(d *harness.Daemon, id, address string) []string {
			return []string{filepath.Join(d.Root, "cni/results", "test-"+id+"-eth0"), address}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := harness.StartDaemon(t)
			pod, other := d.RunPod(t), d.RunPod(t)
			pod.Run(t)
			address := filepath.Join(d.DataDir, "test", pod.Ip(t))
			d.End(t)
			harness.Must(t, os.Truncate(filepath.Join(d.Root, "pods", pod.Id+".record"), 100))
			for _, path := range c.also(d, pod.Id, address) {
				harness.Must(t, os.Truncate(path, 0))
			}
			d.Start(t)
			harness.Eventually(t, "the address is released", func() error {
				if _, err := os.Stat(address); err == nil {
					return fmt.Errorf("%s is there", address)
				}
				return nil
			})
			harness.Equal(t, "state of the other pod", other.Status(t).State, runtimeapi.PodSandboxState_SANDBOX_READY)
			if _, err := os.Stat(filepath.Join(d.DataDir, "test", other.Ip(t))); err != nil {
				t.Errorf("the other pod has lost its address: %v", err)
			}
			aside := harness.Get(filepath.Glob(filepath.Join(d.Root, "pods", "set-aside", "*")))(t)
			harness.Equal(t, "number of records set aside", len(aside), 1)
			harness.Must(t, os.RemoveAll(filepath.Join(d.Root, "pods", "set-aside"))) // otherwise the leak check would find it
		})
	}
}

// A stopping daemon does not interrupt a plugin, because the next daemon could not finish the
// plugin's work.
func TestDaemonStopInterruptsNoPlugin(t *testing.T) {
	testutil.Long(t)
	plugin := faults.NewPlugin(t, "bridge")
	d := harness.StartDaemon(t, plugin.Option)
	stopWhilePaused := func(t *testing.T, exitCode int) {
		t.Helper()
		plugin.AwaitChildren(t, plugin.Resumed())
		d.Disconnect(t)
		d.Signal(t, syscall.SIGTERM)
		harness.Equal(t, "the daemon's exit code", d.Cmd.ProcessState.ExitCode(), exitCode)
		before := plugin.Resumed()
		plugin.Inject(t, "ADD", "")
		plugin.Inject(t, "DEL", "")
		harness.EventuallyTrue(t, "the plugin finishes", func() bool { return plugin.Resumed() != before })
		d.Start(t)
	}
	inBackground := func(call func() error) <-chan error {
		ended := harness.Go(call)
		return ended
	}
	t.Run("of a client's request", func(t *testing.T) {
		config := d.PodConfig(t)
		plugin.Inject(t, "ADD", faults.WorkPause)
		ended := inBackground(func() error { _, err := d.Cri.RunPodSandbox(t.Context(), config, ""); return err })
		stopWhilePaused(t, 1)
		if <-ended == nil {
			t.Error("the request succeeded")
		}
		pod := d.RunPodConfig(t, config)
		plugin.Inject(t, "DEL", faults.WorkPause)
		ended = inBackground(func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) })
		stopWhilePaused(t, 1)
		if <-ended == nil {
			t.Error("the request succeeded")
		}
		pod.Remove(t)
	})
	t.Run("of a retry", func(t *testing.T) {
		plugin.Inject(t, "ADD", faults.Fail(1))
		plugin.Inject(t, "DEL", faults.Fail(1))
		_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), "")
		harness.WantCode(t, err, codes.Unavailable, "no room in the inn")
		plugin.Inject(t, "DEL", faults.WorkPause)
		stopWhilePaused(t, 0)
	})
}
