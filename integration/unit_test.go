package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// unitTest is a daemon that systemd started with berth's unit file, and one of its containers.
type unitTest struct {
	d   *harness.Daemon
	c   *harness.Container
	pid int // process ID of the container
}

// TestSystemdUnit tests the unit file with systemd. After any exit of the daemon, the next daemon
// serves the running container. When the last daemon has stopped, the unit has no process.
func TestSystemdUnit(t *testing.T) {
	d := harness.StartDaemon(t, harness.ByUnit)
	pod := d.RunPod(t)
	c := pod.Run(t)
	u := &unitTest{d: d, c: c, pid: c.Pid(t)}
	t.Run("resources", func(t *testing.T) { haveUnitsResources(t, d, c) })
	t.Run("kill", u.testKill)
	t.Run("hang", u.testHang)
	t.Run("stop", u.testStop)
	t.Run("restart", u.testRestart)
	t.Run("start returns when the daemon is ready", u.testStart)
	t.Run("socket", u.testSocket)
	t.Run("unit of release 0.2", u.testServe)
	t.Run("end", func(t *testing.T) {
		pod.Remove(t)
		group := harness.UnitCgroup(t)
		d.Stop(t)
		if _, err := os.Stat(group); !os.IsNotExist(err) {
			t.Errorf("the unit's cgroup still has processes: %v", harness.Journal())
		}
		d.Start(t)
	})
}

// checkContainer checks that the container runs and that the daemon serves it.
func (u *unitTest) checkContainer(t *testing.T) {
	t.Helper()
	harness.Equal(t, "state of the container", u.c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Equal(t, "process ID of the container", u.c.Pid(t), u.pid)
	harness.Equal(t, "output of an exec", u.c.Exec(t, "echo", "still here"), "still here")
	noLeftovers(t, u.d)
	u.d.StateSettles(t)
}

// testServe starts the daemon with the command of release 0.2, as a drop-in of an operator may.
func (u *unitTest) testServe(t *testing.T) {
	harness.DropIn(t, harness.UnitName, "[Service]", "ExecStart=", "ExecStart=/usr/local/bin/berth serve")
	harness.Systemctl(t, "restart", harness.UnitName)
	u.d.AdoptRestarted(t)
	running := harness.Get(os.Readlink(fmt.Sprintf("/proc/%d/exe", u.d.Cmd.Process.Pid)))(t)
	harness.Equal(t, "the unit's program", running, "/usr/local/bin/berthd")
	u.checkContainer(t)
	harness.DropIn(t, harness.UnitName)
	harness.Systemctl(t, "restart", harness.UnitName)
	u.d.AdoptRestarted(t)
}

func (u *unitTest) testKill(t *testing.T) {
	// Without StartLimitIntervalSec=0 systemd would stop restarting the unit after these kills.
	harness.DropIn(t, harness.UnitName, "[Service]", "RestartSec=20ms")
	for range 10 {
		killMain(t, u.d, syscall.SIGKILL)
	}
	u.d.AdoptRestarted(t)
	harness.DropIn(t, harness.UnitName)
	u.checkContainer(t)
}

func (u *unitTest) testHang(t *testing.T) {
	harness.DropIn(t, harness.UnitName, "[Service]", "WatchdogSec=10")
	harness.Systemctl(t, "restart", harness.UnitName)
	u.d.AdoptRestarted(t)
	killMain(t, u.d, syscall.SIGSTOP)
	u.d.AdoptRestarted(t)
	log := harness.Journal()
	harness.WantText(t, "journal", log, "Watchdog timeout", "SIGABRT: abort", "goroutine 1 ")
	harness.DropIn(t, harness.UnitName)
	u.checkContainer(t)
}

func (u *unitTest) testStop(t *testing.T) {
	u.d.Stop(t)
	harness.Equal(t, "whether the container runs without a daemon", machine.Alive(u.pid), true)
	u.d.Start(t)
	u.checkContainer(t)
}

func (u *unitTest) testRestart(t *testing.T) {
	harness.Systemctl(t, "restart", harness.UnitName)
	u.d.AdoptRestarted(t)
	u.checkContainer(t)
}

func (u *unitTest) testStart(t *testing.T) {
	u.d.Stop(t)
	harness.Systemctl(t, "start", harness.UnitName)
	// One call on a raw connection, which does not wait for a daemon.
	status := harness.Get(harness.RawRuntime(t, u.d).ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: u.c.Id}))(t)
	harness.Equal(t, "state of the container", status.Status.State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Systemctl(t, "stop", harness.UnitName)
	u.d.Start(t)
	u.checkContainer(t)
}

func (u *unitTest) testSocket(t *testing.T) {
	u.d.Stop(t)
	harness.DropIn(t, harness.SocketName, "[Socket]", "ListenStream=", "ListenStream="+u.d.Socket)
	harness.Systemctl(t, "start", harness.SocketName)
	for _, what := range []string{"before the daemon is started", "while systemd restarts it"} {
		// One call on a new raw connection, which does not wait for a daemon.
		_, err := harness.RawRuntime(t, u.d).ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: u.c.Id})
		if err != nil {
			t.Errorf("a call %s: %v", what, err)
		}
		killMain(t, u.d, syscall.SIGKILL)
	}
	u.d.Start(t)
	u.checkContainer(t)
	u.d.Stop(t)
	harness.Systemctl(t, "stop", harness.SocketName)
	u.d.Start(t)
	u.checkContainer(t)
}

// killMain sends a signal to the unit's main process, and returns once the unit has another one.
// The new daemon may not be ready.
func killMain(t *testing.T, d *harness.Daemon, signal syscall.Signal) {
	t.Helper()
	before := 0
	harness.EventuallyGot(t, "the unit has a main process", func() (bool, any) { before = harness.MainPID(t); return before != 0, harness.UnitProperty(t, "Result") })
	harness.Must(t, syscall.Kill(before, signal))
	harness.EventuallyGot(t, "systemd replaces the main process", func() (bool, any) { pid := harness.MainPID(t); return pid != before, pid })
}

// noLeftovers fails the test if the unit's cgroup contains processes other than the daemon, its
// children and monitors of containers.
func noLeftovers(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.Eventually(t, "the processes of earlier daemons have exited", func() error {
		main := d.Cmd.Process.Pid
		own := append(machine.ChildrenOf(main), main)
		for _, pid := range harness.UnitProcesses(t) {
			line := machine.CommandLine(pid)
			if !slices.Contains(own, pid) && machine.Alive(pid) && !strings.HasPrefix(line, "berth-monitor") {
				return fmt.Errorf("process %d is in the unit's cgroup: %s", pid, line)
			}
		}
		return nil
	})
}

// haveUnitsResources checks that the daemon and the container have the unit's limits.
func haveUnitsResources(t *testing.T, d *harness.Daemon, c *harness.Container) {
	t.Helper()
	pid, group := d.Cmd.Process.Pid, harness.UnitCgroup(t)
	harness.Equal(t, "cgroup of the daemon", machine.CgroupDir(t, pid, ""), group)
	harness.Equal(t, "Delegate of the unit", harness.UnitProperty(t, "Delegate"), "yes")
	have := strings.Fields(content(t, filepath.Join(group, "cgroup.controllers")))
	for _, controller := range strings.Fields(harness.UnitProperty(t, "DelegateControllers")) {
		if there := strings.Fields(content(t, "/sys/fs/cgroup/cgroup.controllers")); slices.Contains(there, controller) && !slices.Contains(have, controller) {
			t.Errorf("controller %s is not delegated, only %v", controller, have)
		}
	}
	for _, controller := range []string{"cpu", "memory", "pids"} {
		if !slices.Contains(have, controller) {
			t.Errorf("controller %s is not delegated, only %v", controller, have)
		}
	}
	harness.Equal(t, "pids.max of the unit", content(t, filepath.Join(group, "pids.max")), "max")
	harness.Equal(t, "OOMPolicy of the unit", harness.UnitProperty(t, "OOMPolicy"), "continue")
	harness.Equal(t, "the daemon's oom_score_adj", content(t, fmt.Sprintf("/proc/%d/oom_score_adj", pid)), "-999")
	harness.Equal(t, "the container's oom_score_adj", content(t, fmt.Sprintf("/proc/%d/oom_score_adj", c.Pid(t))), fmt.Sprint(c.Config.Linux.Resources.OomScoreAdj))

	systemds := harness.UnitProperty(t, "LimitNOFILESoft") + " " + harness.UnitProperty(t, "LimitNOFILE")
	if own := machine.Limits(t, pid, "Max open files"); own == systemds {
		t.Errorf("the daemon has not raised its limit of open files from %s", own)
	}
	harness.Equal(t, "limit of the container's open files", machine.Limits(t, c.Pid(t), "Max open files"), systemds)
	for _, of := range []int{pid, c.Pid(t)} {
		for _, name := range []string{"Max processes", "Max core file size"} {
			harness.Equal(t, name, machine.Limits(t, of, name), "unlimited unlimited")
		}
	}
}

// content returns the content of a file, without the final newline.
func content(t *testing.T, path string) string {
	t.Helper()
	return strings.TrimSpace(string(harness.Get(os.ReadFile(path))(t)))
}
