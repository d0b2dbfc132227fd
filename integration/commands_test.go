package integration

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"berth/integration/harness"
)

// berthCode runs an operator command and returns its output and exit code.
func berthCode(t *testing.T, d *harness.Daemon, args ...string) (string, int) {
	t.Helper()
	out, err := tryBerth(d, args...)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit != nil {
		return out, exit.ExitCode()
	}
	return out, 0
}

func readText(t *testing.T, path string) string {
	t.Helper()
	return string(harness.Get(os.ReadFile(path))(t))
}

// refusedWith expects an exit code and a text.
func refusedWith(t *testing.T, d *harness.Daemon, code int, text string, args ...string) {
	t.Helper()
	out, got := berthCode(t, d, args...)
	if got != code || !strings.Contains(out, text) {
		t.Errorf("berth %q: exit code %d, want %d with %q:\n%s", args, got, code, text, out)
	}
}

// The lists print tables, IDs and JSON.
func TestCommandsList(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.ContainerNamed("app"), harness.Script("exec sleep 100000"))
	done := pod.Run(t, harness.ContainerNamed("job"), harness.Script("exit 3"))
	done.WaitExited(t)

	harness.Equal(t, "ps -q --no-trunc", runBerth(t, d, "ps", "-q", "--no-trunc"), c.Id+"\n")
	harness.Equal(t, "ps -q", runBerth(t, d, "ps", "-q"), c.Id[:12]+"\n")
	harness.WantText(t, "ps -a", runBerth(t, d, "ps", "-a"), "exited (3)")
	harness.Equal(t, "pods", runBerth(t, d, "ps", "--pods", "-q", "--no-trunc"), pod.Id+"\n")
	harness.WantText(t, "ps -o json", runBerth(t, d, "ps", "-o", "json"), `"attempt": 0`, `"name": "app"`)
	harness.WantText(t, "images", runBerth(t, d, "images"), "IMAGE", "SIZE")
	refusedWith(t, d, 1, "want table or json", "ps", "-o", "wide")

	harness.WantText(t, "version", runBerth(t, d, "version", "-o", "json"), `"name": "berth"`)
	harness.WantText(t, "completion", runBerth(t, d, "__complete", "exec", c.Id[:6]), c.Id[:12])
}

// exec has podman's exit codes and kubectl's way to name a container of a pod.
func TestCommandsExec(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.ContainerNamed("app"), harness.Script("echo 'tester:x:4711:4712::/home/t:/bin/sh' >>/etc/passwd; echo ready; exec sleep 100000"))
	c.WaitOutput(t, "ready")
	job := pod.Run(t, harness.ContainerNamed("job"), harness.Script("echo from job; exit 3"))
	job.WaitExited(t)

	harness.Equal(t, "exec in a pod's container", runBerth(t, d, "exec", pod.Id, "-c", "app", "--", "echo", "-n", "hi"), "hi")
	refusedWith(t, d, 5, "", "exec", c.Id, "sh", "-c", "exit 5")
	refusedWith(t, d, 127, "not found", "exec", c.Id, "no-such-program")
	refusedWith(t, d, 127, "no such file", "exec", c.Id, "/no/such/program")
	refusedWith(t, d, 126, "permission denied", "exec", c.Id, "/etc/passwd")
	refusedWith(t, d, 125, `no container or pod "nothing"`, "exec", "nothing", "ls")
	refusedWith(t, d, 125, "container job is not running (exited 3)", "exec", job.Id, "ls")
	harness.Equal(t, "exec in a pod with one running container", runBerth(t, d, "exec", pod.Id, "echo", "-n", "hi"), "hi")
	refusedWith(t, d, 1, "has several containers; choose one with -c: app, job", "logs", pod.Id)
	harness.Equal(t, "exec -u -w -e", runBerth(t, d, "exec", "-u", "tester", "-w", "/etc", "-e", "A=b c", c.Id, "sh", "-c", `echo "$(id -u):$(id -g) $HOME $PWD $A"`), "4711:4712 /home/t /etc b c\n")
	harness.Equal(t, "exec -u UID:GID", runBerth(t, d, "exec", "-u", "4711:4712", c.Id, "sh", "-c", "id -u; id -g"), "4711\n4712\n")
	harness.Equal(t, "capabilities of another user", runBerth(t, d, "exec", "-u", "4711", c.Id, "grep", "CapEff", "/proc/self/status"), "CapEff:\t0000000000000000\n")
	refusedWith(t, d, 125, "no-such-user", "exec", "-u", "no-such-user", c.Id, "ls")
	refusedWith(t, d, 125, "not an absolute path", "exec", "-w", "etc", c.Id, "ls")
	harness.Equal(t, "logs of a pod's container", runBerth(t, d, "logs", pod.Id, "-c", "job"), "from job\n")
}

// A command that cannot start, for example in a missing directory, has the exit codes of podman and
// docker, with each runtime.
func TestCommandsExecCodes(t *testing.T) {
	d := harness.StartDaemon(t, harness.WithHandler("crun", harness.Crun(t)))
	for _, handler := range []string{"", "crun"} {
		c := runPodWith(t, d, handler, harness.HostNetwork).Run(t, harness.Script("echo text >/text; echo ready; exec sleep 100000"))
		c.WaitOutput(t, "ready")
		for _, k := range []struct {
			code int
			args []string // with the container's ID for ID
		}{
			{127, []string{"ID", "no-such-program"}},
			{127, []string{"ID", "/no/such/program"}},
			{127, []string{"ID", "/text/program"}},
			{126, []string{"ID", "/etc/passwd"}},
			{126, []string{"ID", "/etc"}},
			{127, []string{"-w", "/missing", "ID", "true"}},
			{127, []string{"-w", "/missing/below", "ID", "true"}},
			{127, []string{"-w", "/text", "ID", "true"}},
		} {
			args := append([]string{"exec"}, k.args...)
			args[slices.Index(args, "ID")] = c.Id
			t.Run(fmt.Sprint(handler, k.args), func(t *testing.T) { refusedWith(t, d, k.code, "", args...) })
		}
	}
}

// cp needs no program in the container, and keeps inside its root.
func TestCommandsCopy(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.ContainerNamed("app"), harness.Script(`
mkdir -p /data/sub /out && echo one >/data/one && echo two >/data/sub/two && mkfifo /data/fifo && chmod 4755 /data/one
ln -s /etc /escape; ln -s ../../../../../../../../etc/passwd /up
rm -f /bin/tar; echo ready; exec sleep 100000`))
	c.WaitOutput(t, "ready")
	dir := t.TempDir()
	out := runBerth(t, d, "cp", c.Id+":/data", dir)
	harness.WantText(t, "output", out, "skipping /data/fifo")
	harness.Equal(t, "copied file", readText(t, filepath.Join(dir, "data/sub/two")), "two\n")
	if info, err := os.Stat(filepath.Join(dir, "data/one")); err != nil || info.Mode() != 0o755 {
		t.Errorf("mode of the copy: %v, %v; want it without setuid", info.Mode(), err)
	}
	runBerth(t, d, "cp", c.Id+":/data/.", dir)
	harness.Equal(t, "content of a directory", readText(t, filepath.Join(dir, "one")), "one\n")

	// Symlinks of the container lead to files of the container.
	secret := filepath.Join(t.TempDir(), "secret")
	harness.Must(t, os.WriteFile(secret, []byte("of the host\n"), 0o600))
	runBerth(t, d, "cp", secret, c.Id+":/escape/planted")
	if _, err := os.Stat("/etc/planted"); err == nil {
		_ = os.Remove("/etc/planted")
		t.Error("the copy went to the host's /etc")
	}
	harness.Equal(t, "copy through a symlink", runBerth(t, d, "exec", c.Id, "cat", "/etc/planted"), "of the host\n")
	harness.Equal(t, "owner", runBerth(t, d, "exec", c.Id, "stat", "-c", "%u:%g", "/etc/planted"), "0:0\n")
	runBerth(t, d, "cp", "-L", c.Id+":/up", filepath.Join(dir, "passwd"))
	harness.Equal(t, "target of a symlink", readText(t, filepath.Join(dir, "passwd")), runBerth(t, d, "exec", c.Id, "cat", "/etc/passwd"))

	refusedWith(t, d, 1, "no such file", "cp", c.Id+":/nothing", dir)
	refusedWith(t, d, 1, "one of SOURCE and DESTINATION must be NAME:PATH", "cp", "/etc/hosts", dir)
	c.Stop(t, 0)
	refusedWith(t, d, 1, "is not running (exited 137)", "cp", c.Id+":/data", dir)
}

// In a pod with a user namespace copies belong to the container's root.
func TestCommandsCopyInUserNamespace(t *testing.T) {
	const hostID = 1 << 20
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork, userNamespace(hostID))
	c := pod.Run(t, inUserNamespace(hostID))
	source := filepath.Join(t.TempDir(), "file")
	harness.Must(t, os.WriteFile(source, []byte("text\n"), 0o640))
	for _, target := range []string{"/root/file", "/tmp/file"} {
		runBerth(t, d, "cp", source, c.Id+":"+target)
		harness.Equal(t, target, runBerth(t, d, "exec", c.Id, "stat", "-c", "%u:%g %a", target), "0:0 640\n")
	}
	back := filepath.Join(t.TempDir(), "back")
	runBerth(t, d, "cp", "-a", c.Id+":/root/file", back)
	harness.Equal(t, "copy", readText(t, back), "text\n")
	if info, err := os.Stat(back); err != nil || info.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("owner of the copy: %+v, %v", info.Sys(), err)
	}
}
