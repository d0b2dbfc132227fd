package scarcity

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/internal/testutil"
)

// Directories of the daemon that a test puts on a separate disk.
const (
	rootDisk  = "root"
	stateDisk = "state"
	logDisk   = "logs"
)

// startOn starts a daemon with one of its directories on a small disk.
func startOn(t *testing.T, which, kind string) (*harness.Daemon, *smallDisk) {
	t.Helper()
	var disk *smallDisk
	d := harness.StartDaemon(t, func(t *testing.T, d *harness.Daemon) {
		disk = newDisk(t, d, "disk", kind, 48<<20)
		place := filepath.Join(disk.path, which)
		switch which {
		case rootDisk:
			d.Root = place
		case stateDisk:
			d.State = place
		case logDisk:
			d.LogDir = place
			harness.Must(t, os.Mkdir(place, 0o700))
		}
	})
	return d, disk
}

// verdict is the allowed result of an operation while one directory accepts no writes.
type verdict int

const (
	works verdict = iota // needs no space on that disk
	fails                // returns an error about the missing space
	may                  // needs space sometimes, so it works or fails
)

// verdicts maps disks to an operation's verdict. The default is works.
type verdicts map[string]verdict

// operation is a call of kubelet.
type operation struct {
	name           string
	full, readOnly verdicts
	once           bool // not repeated after the disk has space or is writable again
	// prepare creates the objects of the operation while the disk has space.
	prepare func(t *testing.T, d *harness.Daemon, pod *harness.Pod) (call func() error)
}

var operations = []operation{
	{"RunPodSandbox", verdicts{rootDisk: fails, stateDisk: fails, logDisk: may}, verdicts{rootDisk: fails, stateDisk: fails, logDisk: fails}, false, func(t *testing.T, d *harness.Daemon, _ *harness.Pod) func() error {
		config := d.PodConfig(t)
		harness.Must(t, os.RemoveAll(config.LogDirectory)) // berth creates it if kubelet has not
		return func() error {
			id, err := d.Cri.RunPodSandbox(t.Context(), config, "")
			if err == nil {
				d.Objects = append(d.Objects, id)
			}
			return err
		}
	}},
	{"CreateContainer", verdicts{rootDisk: fails}, verdicts{rootDisk: fails}, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		config := pod.ContainerConfig()
		harness.Must(t, os.MkdirAll(filepath.Join(pod.Config.LogDirectory, config.Metadata.Name), 0o755))
		return func() error {
			id, err := d.Cri.CreateContainer(t.Context(), pod.Id, config, pod.Config)
			if err == nil {
				d.Objects = append(d.Objects, id)
			}
			return err
		}
	}},
	{"StartContainer", verdicts{rootDisk: fails, stateDisk: fails, logDisk: may}, verdicts{rootDisk: fails, stateDisk: fails, logDisk: fails}, true, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := pod.Create(t)
		return func() error { // once: a container whose start failed has exited
			return d.Cri.StartContainer(t.Context(), c.Id)
		}
	}},
	{"StopContainer", nil, nil, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := pod.Run(t, harness.Script("trap 'exit 7' TERM; while :; do sleep 0.1; done"))
		c.WaitStoppable(t)
		return func() error {
			if err := d.Cri.StopContainer(t.Context(), c.Id, 30); err != nil {
				return err
			}
			if status := c.Status(t); isReadOnly(t, d.State) { // the monitor could not write its record there
				harness.Equal(t, "reason", status.Reason, "ShimLost")
			} else {
				harness.Equal(t, "exit code", status.ExitCode, 7)
			}
			return nil
		}
	}},
	{"RemoveContainer", nil, verdicts{rootDisk: fails, stateDisk: fails}, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := runSettled(t, pod)
		return func() error { return d.Cri.RemoveContainer(t.Context(), c.Id) }
	}},
	{"StopPodSandbox", nil, verdicts{stateDisk: fails}, false, func(t *testing.T, d *harness.Daemon, _ *harness.Pod) func() error {
		pod := d.RunPod(t)
		runSettled(t, pod)
		return func() error { return d.Cri.StopPodSandbox(t.Context(), pod.Id) }
	}},
	{"RemovePodSandbox", nil, verdicts{rootDisk: fails, stateDisk: fails}, false, func(t *testing.T, d *harness.Daemon, _ *harness.Pod) func() error {
		pod := d.RunPod(t)
		runSettled(t, pod)
		return func() error { return d.Cri.RemovePodSandbox(t.Context(), pod.Id) }
	}},
	{"PullImage", verdicts{rootDisk: fails}, verdicts{rootDisk: fails}, false, func(t *testing.T, d *harness.Daemon, _ *harness.Pod) func() error {
		name, _ := harness.Push(t, harness.Registry, "another:latest", anotherImage(t))
		return func() error { _, err := d.TryPull(t, name, nil); return err }
	}},
	{"RemoveImage", nil, verdicts{rootDisk: fails}, false, func(t *testing.T, d *harness.Daemon, _ *harness.Pod) func() error {
		name, _ := harness.Push(t, harness.Registry, "another:latest", anotherImage(t))
		d.Pull(t, name)
		return func() error {
			return d.Images.RemoveImage(t.Context(), &runtimeapi.ImageSpec{Image: name})
		}
	}},
	{"ExecSync", nil, nil, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := runSettled(t, pod)
		return func() error {
			_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"true"}, time.Minute)
			return err
		}
	}},
	{"ReopenContainerLog", verdicts{logDisk: may}, verdicts{logDisk: fails}, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := runSettled(t, pod)
		harness.Must(t, os.Rename(c.LogPath(), c.LogPath()+".1"))
		return func() error { return d.Cri.ReopenContainerLog(t.Context(), c.Id) }
	}},
	{"UpdateContainerResources", verdicts{rootDisk: fails}, verdicts{rootDisk: fails}, false, func(t *testing.T, d *harness.Daemon, pod *harness.Pod) func() error {
		c := runSettled(t, pod)
		return func() error {
			before := c.Status(t).Resources.GetLinux().GetCpuShares()
			err := d.Cri.UpdateContainerResources(t.Context(), c.Id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512}})
			if after := c.Status(t).Resources.GetLinux().GetCpuShares(); err != nil && after != before {
				t.Errorf("the update failed and the shares are %d, before %d", after, before)
			}
			return err
		}
	}},
}

// anotherImage returns an image with a file larger than the remaining space of a full disk.
func anotherImage(t *testing.T) v1.Image {
	return harness.BuildImage(t, v1.Config{}, fixture.Tree{fixture.File("big", 0o644, strings.Repeat("berth", 1<<18))})
}

// runSettled runs a container and waits for its first log line. After that, the start writes
// nothing more.
func runSettled(t *testing.T, pod *harness.Pod) *harness.Container {
	t.Helper()
	c := pod.Run(t, harness.Script("echo settled; exec sleep 1000000"))
	harness.EventuallyGot(t, "the monitor writes", func() (bool, any) { got := c.Output(t); return got == "settled\n", got })
	return c
}

// Each operation runs on a full disk, and again with free space. It succeeds or its error names the
// missing space. The daemon may be restarted meanwhile. Containers keep running, and nothing is
// left at the end.
func TestFullDisk(t *testing.T) {
	for _, which := range []string{rootDisk, stateDisk, logDisk} {
		t.Run(which, func(t *testing.T) {
			d, disk := startOn(t, which, tmpfs)
			tryOperations(t, d, noRoom(which, disk.fill, disk.empty))
		})
	}
}

// Each operation runs on a disk with free bytes but without a free inode.
func TestDiskWithoutInodes(t *testing.T) {
	testutil.Long(t)
	disks := []string{rootDisk, stateDisk}
	if harness.Thorough() {
		disks = append(disks, logDisk)
	}
	for _, which := range disks {
		t.Run(which, func(t *testing.T) {
			d, disk := startOn(t, which, ext4)
			tryOperations(t, d, noRoom(which, disk.fillInodes, disk.empty))
		})
	}
}

// Each operation runs on a disk that is read-only, as after an error, and then writable again.
func TestReadOnlyDisk(t *testing.T) {
	testutil.Long(t)
	for _, which := range []string{rootDisk, stateDisk, logDisk} {
		t.Run(which, func(t *testing.T) {
			d, disk := startOn(t, which, tmpfs)
			place := filepath.Join(disk.path, which)
			tryOperations(t, d, trouble{
				spoil:  func(t *testing.T) { disk.readOnly(t, place, true) },
				repair: func(t *testing.T) { disk.readOnly(t, place, false) },
				code:   codes.FailedPrecondition, text: "read-only file system",
				verdict: func(o operation) verdict { return o.readOnly[which] },
				leaves:  true,
			})
		})
	}
}

// trouble is the state of a disk during an operation.
type trouble struct {
	spoil, repair func(*testing.T)
	code          codes.Code // of the operation's error
	text          string     // part of the operation's error
	verdict       func(operation) verdict
	leaves        bool // a daemon started meanwhile opens files below the read-only mount, so the mount is replaced
}

func noRoom(which string, spoil, repair func(*testing.T)) trouble {
	return trouble{spoil: spoil, repair: repair, code: codes.ResourceExhausted, text: "no space left on device",
		verdict: func(o operation) verdict { return o.full[which] }}
}

func tryOperations(t *testing.T, d *harness.Daemon, disk trouble) {
	t.Helper()
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	bystander := pod.Run(t, harness.Script("while :; do sleep 0.05; done"))
	pid := bystander.Pid(t)
	for _, o := range operations {
		t.Run(o.name, func(t *testing.T) {
			call := o.prepare(t, d, pod)
			disk.spoil(t)
			repaired := false
			repair := func() {
				if !repaired {
					repaired = true
					disk.repair(t)
				}
			}
			defer repair() // for the next case
			err := call()
			switch disk.verdict(o) {
			case works:
				harness.Must(t, err)
			case fails:
				harness.WantCode(t, err, disk.code, disk.text)
			case may:
				if err != nil {
					harness.WantCode(t, err, disk.code, disk.text)
				}
			}
			restarted := harness.Thorough() || slices.Contains([]string{"RunPodSandbox", "StopContainer", "StopPodSandbox"}, o.name)
			if restarted {
				d.End(t)
				d.Start(t)
			}
			harness.Equal(t, "state of the bystander", bystander.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
			harness.Equal(t, "output of an exec", bystander.Exec(t, "echo", "here"), "here")
			repair()
			if restarted && disk.leaves {
				d.Restart(t)
			}
			if err != nil && !o.once {
				harness.Must(t, call())
			}
			d.StateSettles(t)
		})
	}
	if !machine.Alive(pid) {
		t.Error("the bystander has exited")
	}
}

// The socket is in the state directory by default. If that directory is read-only, a starting
// daemon reports this and exits. Containers keep running, and the next daemon serves once the
// directory is writable.
func TestReadOnlyStateAtStart(t *testing.T) {
	var disk *smallDisk
	d := harness.StartDaemon(t, func(t *testing.T, d *harness.Daemon) {
		disk = newDisk(t, d, "disk", tmpfs, 48<<20)
		d.State = filepath.Join(disk.path, "state")
		d.Socket = filepath.Join(d.State, "berth.sock")
	})
	c := d.RunPod(t).Run(t)
	pid := c.Pid(t)
	d.End(t)
	disk.readOnly(t, d.State, true)
	serve := d.ServeCommand()
	var out bytes.Buffer
	serve.Stdout, serve.Stderr = &out, &out
	harness.Must(t, serve.Start())
	stop := time.AfterFunc(harness.Patience, func() { _ = serve.Process.Kill() }) // the daemon must exit without a signal
	if err := serve.Wait(); err == nil || !stop.Stop() {
		t.Errorf("the daemon exited with %v", err)
	}
	if text := out.String(); !strings.Contains(text, "read-only file system") || !strings.Contains(text, d.State) {
		t.Errorf("the error lacks the cause or the object: %s", text)
	}
	disk.readOnly(t, d.State, false)
	d.Start(t)
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
	harness.Equal(t, "process", c.Pid(t), pid)
	harness.Equal(t, "output of an exec", c.Exec(t, "echo", "here"), "here")
}

// Containers exit while a full disk prevents the monitor and the daemon from writing records. The
// exit code is reported at once, by the next daemon, and when the disk has space again.
func TestExitsOnFullDisk(t *testing.T) {
	var disk *smallDisk
	d := harness.StartDaemon(t, func(t *testing.T, d *harness.Daemon) {
		disk = newDisk(t, d, "disk", tmpfs, 48<<20)
		d.Root, d.State = filepath.Join(disk.path, "root"), filepath.Join(disk.path, "state")
	})
	gate := t.TempDir()
	pod := d.RunPod(t)
	exits := func(name string, code int) *harness.Container {
		return pod.Run(t, harness.Mount(&runtimeapi.Mount{HostPath: gate, ContainerPath: "/gate"}),
			harness.Script(fmt.Sprintf("trap 'exit %d' TERM; while [ ! -e /gate/%s ]; do sleep 0.05; done; exit %d", code, name, code)))
	}
	open := func(name string) { harness.Must(t, os.WriteFile(filepath.Join(gate, name), nil, 0o600)) }
	self, down, stopped, killed := exits("self", 7), exits("down", 8), exits("stopped", 9), exits("killed", 10)
	stopped.WaitStoppable(t)
	disk.fill(t)
	open("self")
	self.WaitExited(t)
	stopped.Stop(t, 30)
	killed.Stop(t, 0)
	monitor := harness.MonitorOf(t, d, down)
	d.End(t)
	open("down")
	harness.EventuallyTrue(t, "the monitor ends", func() bool { return !machine.Alive(monitor) })
	disk.fill(t)
	check := func(when string) {
		for c, code := range map[*harness.Container]int32{self: 7, down: 8, stopped: 9, killed: 137} {
			status := c.WaitExited(t)
			harness.Equal(t, when+": exit code", status.ExitCode, code)
			harness.Equal(t, when+": reason", status.Reason, "Error")
		}
	}
	d.Start(t)
	check("on a full disk, after a restart")
	disk.empty(t)
	check("with free space")
	d.Restart(t)
	check("with free space, after another restart")
}

// Root becomes read-only, as after a disk error. berth reports this in its status and in errors.
// Containers keep running and can be stopped, and a new daemon serves. When the disk works again,
// so does berth.
func TestReadOnlyRoot(t *testing.T) {
	testutil.Long(t)
	d, disk := startOn(t, rootDisk, tmpfs)
	d.Pull(t, harness.BaseImage)
	pod := d.RunPod(t)
	running, exits := pod.Run(t), pod.Run(t, harness.Script("read line; exit 5"), harness.WithStdin(false))
	created := pod.Create(t)
	waitRuntimeReady(t, d, true)
	half := filepath.Join(d.Root, "images", "tmp", "half") // left by a killed pull
	harness.Must(t, os.MkdirAll(filepath.Join(half, "fs"), 0o700))

	disk.readOnly(t, d.Root, true)
	waitRuntimeReady(t, d, false)
	_, err := d.Cri.RunPodSandbox(t.Context(), d.PodConfig(t), "")
	harness.WantCode(t, err, codes.FailedPrecondition, "read-only file system")
	_, err = pod.TryCreate(t)
	harness.WantCode(t, err, codes.FailedPrecondition, "read-only file system")
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), created.Id), codes.FailedPrecondition, "read-only file system")
	_, err = d.TryPull(t, pushUnpulled(t), nil)
	harness.WantCode(t, err, codes.FailedPrecondition, "read-only file system")
	harness.Equal(t, "output of an exec in a running container", running.Exec(t, "echo", "here"), "here")
	machine.KillProcess(t, exits.Pid(t))
	harness.Equal(t, "exit code", exits.WaitExited(t).ExitCode, 137)

	d.Restart(t)
	waitRuntimeReady(t, d, false)
	harness.Equal(t, "exit code, for the next daemon", exits.Status(t).ExitCode, 137)
	harness.Equal(t, "output of an exec in a running container", running.Exec(t, "echo", "here"), "here")
	running.Stop(t, 0)
	harness.Equal(t, "exit code", running.Status(t).ExitCode, 137)
	harness.WantCode(t, d.Cri.RemoveContainer(t.Context(), running.Id), codes.FailedPrecondition, "read-only file system")
	pod.Stop(t)

	disk.readOnly(t, d.Root, false)
	waitRuntimeReady(t, d, true)
	d.Restart(t)
	harness.Equal(t, "exit code, on the repaired disk", exits.Status(t).ExitCode, 137)
	if _, err := os.Lstat(half); !os.IsNotExist(err) {
		t.Errorf("files of the failed pull remain: %v", err)
	}
	pod.Remove(t)
	d.RunPod(t).Remove(t)
}

// pushUnpulled pushes an image that no daemon has pulled yet.
func pushUnpulled(t *testing.T) string {
	t.Helper()
	name, _ := harness.Push(t, harness.Registry, "another:latest", anotherImage(t))
	return name
}

func waitRuntimeReady(t *testing.T, d *harness.Daemon, want bool) {
	t.Helper()
	harness.Eventually(t, "RuntimeReady reflects the state of the disk", func() error {
		for _, c := range harness.Get(d.Cri.Status(t.Context(), false))(t).Status.Conditions {
			if c.Type == runtimeapi.RuntimeReady && c.Status != want {
				return harness.Unexpected("RuntimeReady", c, want)
			}
		}
		return nil
	})
}

// The log directory becomes read-only. A rotation fails, and the old log stays in use.
func TestReadOnlyLogs(t *testing.T) {
	d, disk := startOn(t, logDisk, tmpfs)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("while read line; do echo $line; done"), harness.WithStdin(false))
	harness.Must(t, os.Rename(c.LogPath(), c.LogPath()+".1"))
	disk.readOnly(t, d.LogDir, true)
	harness.WantCode(t, d.Cri.ReopenContainerLog(t.Context(), c.Id), codes.FailedPrecondition, "read-only file system", "reopen log")
	created := pod.Create(t, func(config *runtimeapi.ContainerConfig) { config.LogPath = "0.log" })
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), created.Id), codes.FailedPrecondition, "read-only file system", "open log")
	disk.readOnly(t, d.LogDir, false)
	harness.Must(t, d.Cri.ReopenContainerLog(t.Context(), c.Id))
	if _, err := os.Stat(c.LogPath()); err != nil {
		t.Error(err)
	}
}

// Pods start and stop while another goroutine fills and empties the disk. Errors name the missing
// space, each started container ends with its exit code, and nothing is left.
func TestDiskFillsAtAnyMoment(t *testing.T) {
	testutil.Long(t)
	rounds := 6
	if harness.Thorough() {
		rounds = 100
	}
	for _, which := range []string{rootDisk, stateDisk, logDisk} {
		t.Run(which, func(t *testing.T) {
			d, disk := startOn(t, which, tmpfs)
			d.Pull(t, harness.BaseImage)
			ctx, cancel := context.WithCancel(t.Context())
			var filling sync.WaitGroup
			defer filling.Wait() // a write after the unmount would go to the filesystem below
			defer cancel()
			filling.Go(func() {
				for ctx.Err() == nil {
					disk.fill(t)
					time.Sleep(rand.N(50 * time.Millisecond)) // any moment may reveal a bug
					disk.empty(t)
					time.Sleep(rand.N(100 * time.Millisecond))
				}
			})
			// Timing decides which pods meet a full disk. Some must fail and some must run, except
			// when only logs are on the full disk.
			failed, lived := 0, 0
			decided := func() bool { return lived > 0 && (failed > 0 || which == logDisk) }
			for n := 0; n < rounds || !decided() && n < 20*rounds; n++ {
				if runPodToEnd(t, d) {
					lived++
				} else {
					failed++
				}
			}
			cancel()
			filling.Wait()
			t.Logf("%d pods succeeded, %d failed", lived, failed)
			if !decided() {
				t.Error("no pod succeeded or no pod failed")
			}
			if !runPodToEnd(t, d) {
				t.Error("a pod failed although the disk has free space")
			}
		})
	}
}

// runPodToEnd runs a pod with a container that exits with 3, and removes it. It returns false if
// the disk was full at some point.
func runPodToEnd(t *testing.T, d *harness.Daemon) bool {
	t.Helper()
	ctx := t.Context()
	noRoom := func(err error) bool {
		if err != nil {
			harness.WantCode(t, err, codes.ResourceExhausted, "no space left on device")
		}
		return err != nil
	}
	config := d.PodConfig(t)
	id, err := d.Cri.RunPodSandbox(ctx, config, "")
	if noRoom(err) {
		return false
	}
	d.Objects = append(d.Objects, id)
	pod := &harness.Pod{D: d, Id: id, Config: config}
	defer pod.Remove(t)
	created, err := d.Cri.CreateContainer(ctx, id, pod.ContainerConfig(harness.Script("exit 3"), func(c *runtimeapi.ContainerConfig) { c.LogPath = "0.log" }), config)
	if noRoom(err) {
		return false
	}
	d.Objects = append(d.Objects, created)
	c := &harness.Container{Pod: pod, Id: created, Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: created}}}
	if noRoom(d.Cri.StartContainer(ctx, created)) {
		return false
	}
	status := c.WaitExited(t)
	harness.Equal(t, "exit code", status.ExitCode, 3)
	return true
}
