package shim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/cgroup"
	"berth/internal/errdefs"
	"berth/internal/netns"
	"berth/shim/proto"
)

// procOf reads a file of a process.
func procOf(t *testing.T, pid int, name string) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// namespacesOf returns the namespaces that a process does not share with the test.
func namespacesOf(t *testing.T, pid int) (own []string) {
	t.Helper()
	for _, kind := range []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		if theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind)); err != nil {
			t.Fatal(err)
		} else if ours != theirs {
			own = append(own, kind)
		}
	}
	return own
}

// A pause that makes its namespaces itself is as confined as one that libcontainer makes.
func TestPauseIsConfined(t *testing.T) {
	e := newEnv(t)
	if e.runtime() != nil {
		t.Skip("only libcontainer's pods have a confined pause")
	}
	network := filepath.Join(e.dir, "netns")
	if err := netns.New(network); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.Remove(network); err != nil {
			t.Error(err)
		}
	})
	cgroups := map[proto.PauseKind]string{}
	for _, kind := range []proto.PauseKind{proto.PlainPause, proto.ContainerPause} {
		t.Run(string(kind), func(t *testing.T) {
			c := launchConfinedPause(t, e, network, kind)
			checkPauseStatus(t, c)
			checkPauseFiles(t, c)
			checkPodSettings(t, c)
			cgroups[kind] = strings.ReplaceAll(procOf(t, c.InitPID, "cgroup"), c.ID, "ID")
		})
	}
	if cgroups[proto.PlainPause] != cgroups[proto.ContainerPause] {
		t.Errorf("cgroups of pause:\n%s, with libcontainer:\n%s", cgroups[proto.PlainPause], cgroups[proto.ContainerPause])
	}
}

// launchConfinedPause launches a pause with a user, groups, sysctls, a network namespace and the
// profile RuntimeDefault.
func launchConfinedPause(t *testing.T, e *env, network string, kind proto.PauseKind) *container {
	t.Helper()
	req := e.pauseRequest("pause-" + string(kind))
	req.Pause = kind
	score := 500
	req.Spec.Hostname = "pod"
	req.Spec.Process.User = specs.User{UID: 65535, GID: 65534, AdditionalGids: []uint32{7, 8}}
	req.Spec.Process.OOMScoreAdj = &score
	req.Spec.Linux.Sysctl = map[string]string{
		"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0 7", "kernel.shm_rmid_forced": "1",
	}
	req.Spec.Linux.Namespaces = append(req.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: network})
	var err error
	if req.Spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(req.Spec); err != nil {
		t.Fatal(err)
	}
	return e.launch(req)
}

// checkPauseStatus checks the credentials, namespaces and cgroup of a pause.
func checkPauseStatus(t *testing.T, c *container) {
	t.Helper()
	status := procOf(t, c.InitPID, "status")
	for _, line := range []string{
		"Uid:\t65535\t65535\t65535\t65535", "Gid:\t65534\t65534\t65534\t65534", "Groups:\t7 8 ", "Seccomp:\t2",
		"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "CapAmb:\t0000000000000000",
	} {
		if !strings.Contains(status, line+"\n") {
			t.Errorf("no %q in its status:\n%s", line, status)
		}
	}
	if got, want := namespacesOf(t, c.InitPID), []string{"ipc", "mnt", "net", "pid", "uts"}; !slices.Equal(got, want) {
		t.Errorf("namespaces of its own: %v, want %v", got, want)
	}
	for name, want := range map[string]string{"oom_score_adj": "500\n", "cmdline": "/pause\x00"} {
		if got := procOf(t, c.InitPID, name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	group, err := cgroup.FromState(filepath.Join(c.cfg.StateRoot, c.ID, "state.json"))
	if err != nil {
		t.Fatal(err)
	}
	for name, group := range map[string]*cgroup.Group{"cgroup": c.group(), "cgroup of its state file": group} {
		if pids, err := group.Procs(); err != nil || !slices.Equal(pids, []int{c.InitPID}) {
			t.Errorf("processes in its %s: %v, %v; want %d", name, pids, err, c.InitPID)
		}
	}
}

// checkPauseFiles checks that a pause holds nothing of the host's: processes in a shared PID
// namespace can reach its files and mounts.
func checkPauseFiles(t *testing.T, c *container) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", c.InitPID))
	if err != nil || c.Pause == proto.PlainPause && len(fds) > 0 || c.Pause == proto.ContainerPause && len(fds) != 3 { // libcontainer's three are of its own /dev
		t.Errorf("open files: %v, %v", fds, err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/file", c.InitPID), nil, 0o600); err == nil {
		t.Error("its root is writable")
	}
	for i, line := range strings.Split(strings.TrimSpace(procOf(t, c.InitPID, "mountinfo")), "\n") {
		if c.Pause == proto.PlainPause && i > 0 {
			t.Errorf("a mount besides its root: %s", line)
		}
		if strings.Contains(line, "shared:") || strings.Contains(line, "master:") {
			t.Errorf("a mount that propagates: %s", line)
		}
	}
}

// checkPodSettings checks the settings of the pod's namespaces in a container that joins them.
func checkPodSettings(t *testing.T, pause *container) {
	t.Helper()
	script := "hostname; cat /proc/sys/net/ipv4/ping_group_range /proc/sys/kernel/shm_rmid_forced"
	c := pause.run("in-"+pause.ID, script, func(r *proto.Launch) {
		r.Spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.PIDNamespace}}
		for kind, name := range map[specs.LinuxNamespaceType]string{specs.UTSNamespace: "uts", specs.IPCNamespace: "ipc", specs.NetworkNamespace: "net"} {
			r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: fmt.Sprintf("/proc/%d/ns/%s", pause.InitPID, name)})
		}
	})
	c.wait()
	if got := strings.Fields(c.output("stdout")); !slices.Equal(got, []string{"pod", "0", "7", "1"}) {
		t.Errorf("hostname and sysctls are %q, %s", got, c.output("stderr"))
	}
}

// If a pause cannot be started, nothing is left, and the error has the reason.
func TestPauseRefused(t *testing.T) {
	e := newEnv(t)
	if e.runtime() != nil {
		t.Skip("only libcontainer's pods have it")
	}
	for name, test := range map[string]struct {
		change func(*proto.Launch)
		code   codes.Code
		text   string
	}{
		"sysctl value": {func(r *proto.Launch) { r.Spec.Linux.Sysctl = map[string]string{"kernel.shm_rmid_forced": "x"} }, codes.InvalidArgument, "kernel.shm_rmid_forced"},
		"unknown sysctl": {func(r *proto.Launch) {
			r.Spec.Linux.Sysctl = map[string]string{"kernel.shm_rmid_forced": "0", "fs.mqueue.there_is_none": "1"}
		}, codes.Internal, "fs.mqueue.there_is_none"},
		"no network": {func(r *proto.Launch) {
			r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: e.dir + "/none"})
		}, codes.Internal, "no such file"},
		"not a network": {func(r *proto.Launch) {
			r.Spec.Linux.Namespaces = append(r.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: "/proc/self/ns/uts"})
		}, codes.Internal, "join its network namespace: invalid argument"},
		"no program": {func(r *proto.Launch) { r.Rootfs.Layers[0].Path = e.layer }, codes.Internal, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			req := e.pauseRequest("pause-" + strings.ReplaceAll(name, " ", "-"))
			test.change(req)
			started, err := e.Launch(e.ctx, req)
			if err == nil {
				(&container{env: e, Launch: req, Started: started}).remove()
				t.Fatal("it was launched")
			}
			if errdefs.Code(err) != test.code || !strings.Contains(err.Error(), test.text) {
				t.Errorf("%v (%v), want %v and %q", err, errdefs.Code(err), test.code, test.text)
			}
			e.nothingLeft(req)
		})
	}
}

// A leading "-" marks a cgroup that may be missing. clone fails with these flags, so the pause
// makes nothing.
func TestPauseJoinsCgroups(t *testing.T) {
	const (
		stepClone  = 2 // of pause.c's enum step
		stepCgroup = 15
	)
	for list, want := range map[string][2]uint32{
		"/none/tasks":  {stepCgroup, uint32(unix.ENOENT)},
		"-/none/tasks": {stepClone, uint32(unix.EINVAL)},
	} {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := os.NewFile(uintptr(fds[0]), "pause"), os.NewFile(uintptr(fds[1]), "pause")
		cmd := exec.Command(os.Getenv(workEnv)+"/pause-root/pause", "enter", strconv.Itoa(unix.CLONE_NEWNS|unix.CLONE_FS), "/", "", "0", "0", "", "", "1", list)
		cmd.ExtraFiles = []*os.File{theirs, theirs}
		if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
			t.Fatal(err)
		}
		_, sayErr := ours.Write([]byte("+"))
		report := make([]byte, 8)
		_, readErr := io.ReadFull(ours, report)
		closeErr := ours.Close() // upon which it ends
		_ = cmd.Wait()           // its status does not matter
		if err := errors.Join(sayErr, readErr, closeErr); err != nil {
			t.Fatal(err)
		}
		if got := [2]uint32{binary.NativeEndian.Uint32(report), binary.NativeEndian.Uint32(report[4:])}; got != want {
			t.Errorf("%s: step and errno %v, want %v", list, got, want)
		}
	}
}

// The launcher of a pause serves the next request as a new one would.
func TestLauncherServesAfterPause(t *testing.T) {
	e := newEnv(t, func(c *Config) { c.Idle = 2 })
	if e.runtime() != nil {
		t.Skip("only libcontainer's pods have it")
	}
	e.awaitLaunchers()
	before := e.idlePIDs()
	for _, id := range []string{"first", "second", "third"} {
		e.launch(e.pauseRequest(id))
	}
	if now := e.idlePIDs(); !slices.Equal(now, before) {
		t.Fatalf("launchers %v were not kept, there are %v", before, now)
	}
	c := e.run("container", "read x; exit 3", withStdin)
	if got := c.launcherOf(); !slices.Contains(before, got) {
		t.Errorf("launcher %d launched the container, none of %v", got, before)
	}
	if err := OpenMonitor(c.Dir).CloseStdin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exit := c.wait(); exit.Code != 3 {
		t.Errorf("exit = %+v", exit)
	}
}

// A pause does not change what its launcher's children inherit.
func TestPauseDoesNotChangeItsLauncher(t *testing.T) {
	var network string
	e := newEnv(t, func(c *Config) {
		c.Idle = 2
		network = filepath.Join(filepath.Dir(c.StateRoot), "netns")
		if err := netns.New(network); err != nil { // before there is a launcher, which would not see it
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		if err := netns.Remove(network); err != nil {
			t.Error(err)
		}
	})
	if e.runtime() != nil {
		t.Skip("only libcontainer's pods have it")
	}
	e.awaitLaunchers()
	before := e.idlePIDs()
	var was map[string]string
	e.until("they wait for a request", func() bool {
		was = allOf(t, before)
		warm := 0 // launchers after their warm-up, which ends with a check of the cgroups
		for _, value := range was {
			if strings.HasSuffix(value, "/cgroup.procs") {
				return false // it is at that check
			}
			if value == "/sys/fs/cgroup" {
				warm++
			}
		}
		return warm == len(before) && maps.Equal(allOf(t, before), was) // and no file is open for that check
	})
	req := e.pauseRequest("pause")
	score := 500
	req.Spec.Hostname = "pod"
	req.Spec.Process.User = specs.User{UID: 65535, GID: 65534, AdditionalGids: []uint32{7, 8}}
	req.Spec.Process.OOMScoreAdj = &score
	req.Spec.Process.NoNewPrivileges = true
	req.Spec.Linux.Sysctl = map[string]string{"net.ipv4.ping_group_range": "0 7", "kernel.shm_rmid_forced": "1"}
	req.Spec.Linux.Namespaces = append(req.Spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: network})
	var err error
	if req.Spec.Linux.Seccomp, err = seccomp.GetDefaultProfile(req.Spec); err != nil {
		t.Fatal(err)
	}
	e.launch(req)
	if now := e.idlePIDs(); !slices.Equal(now, before) {
		t.Fatalf("launchers %v were not kept, there are %v", before, now)
	}
	is := allOf(t, before)
	defer func() {
		for _, key := range slices.Sorted(maps.Keys(is)) {
			if is[key] != was[key] {
				t.Logf("%s was\n%s\nis\n%s", key, was[key], is[key])
			}
		}
	}()
	e.until("it is as it was", func() bool { is = allOf(t, before); return maps.Equal(is, was) })
}

// allOf is selfOf of several processes.
func allOf(t *testing.T, pids []int) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pid := range pids {
		for key, value := range selfOf(t, pid) {
			all[itoa(pid)+" "+key] = value
		}
	}
	return all
}

// selfOf returns the attributes of a process that its children inherit or could use, except memory
// and threads.
func selfOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	self := map[string]string{"namespaces": strings.Join(namespacesOf(t, pid), " ")}
	for _, file := range []string{"cgroup", "comm", "environ", "limits", "mountinfo", "oom_score_adj", "personality", "sessionid"} {
		self[file] = procOf(t, pid, file)
	}
	for line := range strings.Lines(procOf(t, pid, "status")) {
		key, value, _ := strings.Cut(line, ":")
		if slices.Contains([]string{"Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list", "Mems_allowed_list"}, key) ||
			strings.HasPrefix(key, "Cap") {
			self[key] = value
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, f.Name()))
		if err == nil { // otherwise it was the descriptor for reading the directory
			self["file "+f.Name()] = link
		}
	}
	for _, link := range []string{"cwd", "exe", "root"} {
		if self[link], err = os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, link)); err != nil {
			t.Fatal(err)
		}
	}
	return self
}

func (e *env) idlePIDs() (pids []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.idle {
		pids = append(pids, p.pid)
	}
	slices.Sort(pids)
	return pids
}
