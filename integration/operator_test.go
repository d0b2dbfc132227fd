package integration

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/term"
	"golang.org/x/sys/unix"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// runBerth runs an operator command for this daemon, expects success, and returns its output.
func runBerth(t *testing.T, d *harness.Daemon, args ...string) string {
	t.Helper()
	out, err := tryBerth(d, args...)
	if err != nil {
		t.Fatalf("berth %q: %v\n%s", args, err, out)
	}
	return out
}

func tryBerth(d *harness.Daemon, args ...string) (string, error) {
	cmd := operatorCommand(d, args...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func operatorCommand(d *harness.Daemon, args ...string) *exec.Cmd {
	cmd := d.Command(args...)
	cmd.Env = append(cmd.Env, "BERTH_SOCKET=unix://"+d.Socket)
	return cmd
}

// runArgs keeps the files and cgroups of `berth run` below the test's directory and cgroup.
func runArgs(d *harness.Daemon, manifest string, more ...string) []string {
	return append([]string{"run", "--run-dir", d.Dir + "/run", "--cgroup-parent", d.CgroupParent("run")}, append(more, manifest)...)
}

// writeManifest writes a pod manifest. IMAGE in it is replaced with the base image.
func writeManifest(t *testing.T, d *harness.Daemon, yaml string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pod.yaml")
	harness.Must(t, os.WriteFile(path, []byte(strings.ReplaceAll(yaml, "IMAGE", harness.BaseImage)), 0o600))
	return path
}

const examplePod = `
apiVersion: v1
kind: Pod
metadata:
  name: example
  labels: {app: example}
spec:
  terminationGracePeriodSeconds: 1
  initContainers:
  - name: prepare
    image: IMAGE
    command: [sh, -c, "echo $(GREETING) > /data/index.html"]
    env: [{name: GREETING, value: prepared}]
    volumeMounts: [{name: data, mountPath: /data}]
  containers:
  - name: web
    image: IMAGE
    command: [sh, -c, "echo web is up; exec httpd -f -p 80 -h /data"]
    ports: [{containerPort: 80, hostPort: 18090}]
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true}
    resources: {limits: {memory: 64Mi, cpu: 500m}}
  - name: client
    image: IMAGE
    command: [sh, -c, "until wget -q -O- http://127.0.0.1/; do sleep 0.1; done; exec sleep 100000"]
  volumes:
  - name: data
    emptyDir: {}
`

func TestOperatorRunDetached(t *testing.T) {
	d := harness.StartDaemon(t)
	id := strings.TrimSpace(runBerth(t, d, runArgs(d, writeManifest(t, d, examplePod), "--detach")...))
	lines := strings.Split(id, "\n")
	id = lines[len(lines)-1] // lines of progress come first
	d.Objects = append(d.Objects, id)
	ps := runBerth(t, d, "ps")
	harness.WantText(t, "output of ps", ps, "web", "client")
	harness.WantText(t, "output of ps --pods", runBerth(t, d, "ps", "--pods"), "example")
	harness.EventuallyGot(t, "the client has seen the page", func() (bool, any) {
		out := runBerth(t, d, "logs", "client")
		return strings.Contains(out, "prepared"), out
	})
	harness.Equal(t, "page through the host port", httpGet(t, "http://"+nodeAddress(t)+":18090/"), "prepared\n")
	harness.Equal(t, "exec", runBerth(t, d, "exec", "web", "cat", "/data/index.html"), "prepared\n")
	if _, err := tryBerth(d, "exec", "web", "sh", "-c", "exit 4"); err == nil || err.(*exec.ExitError).ExitCode() != 4 {
		t.Errorf("exec of a failing command: %v", err)
	}
	harness.WantText(t, "output of images", runBerth(t, d, "images"), strings.TrimSuffix(harness.BaseImage, ":latest"))
	runBerth(t, d, "rm", "--force", "--run-dir", d.Dir+"/run", id)
	harness.WantNoText(t, "pods after rm", runBerth(t, d, "ps", "--all", "--pods"), "example")
	harness.Equal(t, "files of berth run", fmt.Sprint(machine.ReadDir(d.Dir+"/run")), "[]")
}

// In the foreground `berth run` streams the output, and Ctrl-C stops and removes the pod.
func TestOperatorRunForeground(t *testing.T) {
	d := harness.StartDaemon(t)
	cmd := operatorCommand(d, runArgs(d, writeManifest(t, d, examplePod))...)
	log, err := os.Create(filepath.Join(t.TempDir(), "out"))
	harness.Must(t, err)
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	harness.Must(t, cmd.Start())
	harness.Eventually(t, "the output is streamed", func() error {
		out, err := os.ReadFile(log.Name())
		if err == nil && !(bytes.Contains(out, []byte("web is up")) && bytes.Contains(out, []byte("prepared"))) {
			err = fmt.Errorf("output so far: %s", out)
		}
		return err
	})
	harness.Must(t, cmd.Process.Signal(syscall.SIGINT))
	err = cmd.Wait()
	if err == nil || cmd.ProcessState.ExitCode() != 130 {
		t.Errorf("after Ctrl-C berth run exited with %v, want exit code 130", err)
	}
	harness.WantNoText(t, "pods after Ctrl-C", runBerth(t, d, "ps", "--all", "--pods"), "example")
}

func TestOperatorRunToCompletion(t *testing.T) {
	d := harness.StartDaemon(t)
	manifest := writeManifest(t, d, `
apiVersion: v1
kind: Pod
metadata: {name: job}
spec:
  restartPolicy: Never
  hostNetwork: true
  containers:
  - {name: fine, image: IMAGE, command: [echo, done]}
  - {name: bad, image: IMAGE, command: [sh, -c, "exit 3"]}
`)
	out, err := tryBerth(d, runArgs(d, manifest)...)
	if err == nil || err.(*exec.ExitError).ExitCode() != 3 {
		t.Errorf("berth run exited with %v, want the failed container's exit code 3:\n%s", err, out)
	}
	harness.WantText(t, "output", out, "done")
}

// A manifest with an unsupported field is refused, with the field's name, and nothing starts.
func TestOperatorRunRefuses(t *testing.T) {
	d := harness.StartDaemon(t)
	manifest := writeManifest(t, d, `
apiVersion: v1
kind: Pod
metadata: {name: refused}
spec:
  containers:
  - {name: c, image: IMAGE}
  volumes:
  - name: secret
    secret: {secretName: s}
`)
	out, err := tryBerth(d, runArgs(d, manifest)...)
	if err == nil || !strings.Contains(out, "secret") {
		t.Errorf("a secret volume: %v\n%s", err, out)
	}
	harness.WantNoText(t, "pods", runBerth(t, d, "ps", "--all", "--pods"), "refused")
}

func TestOperatorPull(t *testing.T) {
	d := harness.StartDaemon(t)
	stdout := harness.Get(operatorCommand(d, "pull", harness.BaseImage).Output())(t) // the progress is not in it
	if img := d.ImageStatus(t, harness.BaseImage); img == nil || string(stdout) != img.Id+"\n" {
		t.Errorf("the image is %v, the output is:\n%s", img, stdout)
	}
	out, err := tryBerth(d, "pull", harness.Registry.Host+"/no/such:image")
	if err == nil || !strings.Contains(out, "no/such:image") {
		t.Errorf("pull of an unknown image: %v\n%s", err, out)
	}
}

func TestOperatorContainers(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.ContainerNamed("logger"), harness.Script("seq 1 10; echo oops >&2; exec sleep 100000"))
	c.WaitOutput(t, "oops")
	harness.Equal(t, "logs --tail", strings.Count(runBerth(t, d, "logs", "--tail", "3", c.Id[:12]), "\n"), 3)
	harness.Equal(t, "exec", runBerth(t, d, "exec", c.Id[:12], "echo", "-n", "flag"), "flag")
	if out, err := tryBerth(d, "rm", c.Id); err == nil {
		t.Errorf("rm of a running container without --force succeeds:\n%s", out)
	}
	c.Stop(t, 0)
	harness.WantText(t, "output of ps --all", runBerth(t, d, "ps", "--all"), "logger")
	runBerth(t, d, "rm", c.Id)
	if out, err := tryBerth(d, "logs", "no-such-container"); err == nil || !strings.Contains(out, "no-such-container") {
		t.Errorf("logs of an unknown container: %v\n%s", err, out)
	}
}

// checkedSubjects lists the subjects of `berth check` on each node.
var checkedSubjects = []string{
	"user", "kernel", "seccomp", "overlayfs", "net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables", "kernel.pid_max",
	"cgroup driver", "cgroups", "cgroup controllers", "container root filesystems", "mount propagation", "user namespaces",
	"berth-shim", "CRI socket", "NRI socket", "veth", "bridge", "nftables", "iptables", "CNI network",
}

// `berth check` reports no failure on a node that can run pods. It fails if root is not writable. A
// missing network is only a warning, because pods on the host's network run without it.
func TestCheck(t *testing.T) {
	d := harness.StartDaemon(t, harness.StateInFile)
	flags := []string{"check", "--config", d.ConfigFile(), "--listen", d.Socket, "--root", d.Root, "--cni-conf-dir", d.ConfDir, "--cni-bin-dir", harness.PluginDir}
	out, err := d.Command(append(flags, "-v")...).Output()
	if failed(err) {
		t.Errorf("check: %v\n%s", err, out)
	}
	for _, subject := range checkedSubjects {
		if !strings.Contains(string(out), " "+subject+": ") {
			t.Errorf("check does not report %s:\n%s", subject, out)
		}
	}
	harness.WantText(t, "output of check", string(out), ", 0 failures\n")
	harness.Must(t, os.Rename(d.NetworkFile(), d.NetworkFile()+".away"))
	out, err = d.Command(append(flags, "-o", "json")...).Output()
	harness.Must(t, os.Rename(d.NetworkFile()+".away", d.NetworkFile()))
	if !onlyWarnings(err) || strings.Contains(string(out), `"failure"`) || !strings.Contains(string(out), "no CNI network configured") {
		t.Errorf("check without a network: %v\n%s", err, out)
	}
	for _, subject := range checkedSubjects {
		if !strings.Contains(string(out), fmt.Sprintf("\"subject\": %q", subject)) {
			t.Errorf("the output of check --json has no %s:\n%s", subject, out)
		}
	}
	out, err = d.Command(append(flags, "--json", "--root", "/proc/berth")...).Output()
	if !failed(err) || !strings.Contains(string(out), `"failure"`) || !strings.Contains(string(out), "container root filesystems") {
		t.Errorf("check with a root below /proc: %v\n%s", err, out)
	}
}

// onlyWarnings reports whether `berth check` found warnings but no failure.
func onlyWarnings(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() == 3
}

// failed reports whether `berth check` failed or found a failure.
func failed(err error) bool { return err != nil && !onlyWarnings(err) }

// The CRI socket of another runtime prevents berth's start, its NRI socket does not. A running
// daemon with the same configuration does not count as another runtime.
func TestCheckFindsOtherRuntimes(t *testing.T) {
	d := harness.StartDaemon(t, harness.StateInFile)
	flags := []string{"check", "--config", d.ConfigFile(), "--root", d.Root, "--listen"}
	raw, err := d.Command(append(flags, d.Socket, "-v")...).Output()
	out := string(raw)
	if failed(err) {
		t.Errorf("check while the daemon runs: %v\n%s", err, out)
	}
	harness.WantText(t, "output of check while the daemon runs", out, "ok       CRI socket: berthd (pid ", "ok       NRI socket: berthd (pid ")
	other := filepath.Join(d.Dir, "other.sock")
	listener := harness.Get(net.Listen("unix", other))(t)
	defer listener.Close()
	raw, err = d.Command(append(flags, other)...).Output()
	out = string(raw)
	for _, want := range []string{fmt.Sprintf("(pid %d) listens on %s", os.Getpid(), other), "warning  NRI socket: berthd (pid "} {
		if !failed(err) || !strings.Contains(out, want) {
			t.Errorf("check next to another runtime: %v; the output has no %q:\n%s", err, want, out)
		}
	}
}

// `berth exec` in a terminal passes on keys and sizes, and returns the exit code.
func TestOperatorTerminal(t *testing.T) {
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	const program = "tty; while read x; do stty size; [ $x = bye ] && exit 5; done"
	c := pod.Run(t)
	cmd := operatorCommand(d, "exec", "-it", c.Id, "sh", "-c", program)
	master, shown := runInTerminal(t, cmd)
	harness.Must(t, term.SetWinsize(master.Fd(), &term.Winsize{Width: 111, Height: 44}))
	harness.Eventually(t, "the size arrives", func() error {
		if _, err := master.WriteString("x\n"); err != nil {
			return err
		}
		if !strings.Contains(shown.String(), "44 111") {
			return fmt.Errorf("the terminal shows %q", shown.String())
		}
		return nil
	})
	_, err := master.WriteString("bye\n")
	harness.Must(t, err)
	_ = cmd.Wait()
	harness.Equal(t, "exit code", cmd.ProcessState.ExitCode(), 5)
}

// runInTerminal starts a command in a new pseudo-terminal.
func runInTerminal(t *testing.T, cmd *exec.Cmd) (master *os.File, shown *sessions.Screen) {
	t.Helper()
	master = harness.Get(os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0))(t)
	t.Cleanup(func() { master.Close() })
	harness.Must(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number := harness.Get(unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN))(t)
	slave := harness.Get(os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0))(t)
	defer slave.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	harness.Must(t, cmd.Start())
	shown = &sessions.Screen{}
	go func() { _, _ = io.Copy(shown, master) }() // until the terminal is closed (EIO)
	return master, shown
}

// libraryLine matches a line of klog, such as "E1123 12:00:00.000000   42 portforward.go:549] …".
var libraryLine = regexp.MustCompile(`(?m)^[IWEF]\d{4} .*$`)

// onlyOwnLines fails if an operator command has printed a library's log lines.
func onlyOwnLines(t *testing.T, printed string) {
	t.Helper()
	if line := libraryLine.FindString(printed); line != "" {
		t.Errorf("stderr has a library's log line: %s\nall: %q", line, printed)
	}
}

// operatorSession is a running operator command with its output.
type operatorSession struct {
	cmd            *exec.Cmd
	stdin          io.WriteCloser
	stdout, stderr sessions.Screen
}

func startSession(t *testing.T, d *harness.Daemon, args ...string) *operatorSession {
	t.Helper()
	s := &operatorSession{cmd: operatorCommand(d, args...)}
	s.stdin = harness.Get(s.cmd.StdinPipe())(t)
	s.cmd.Stdout, s.cmd.Stderr = &s.stdout, &s.stderr
	harness.Must(t, s.cmd.Start())
	t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() }) // it has exited, unless the test failed
	return s
}

// keepTyping sends input to the session until the command exits.
func (s *operatorSession) keepTyping(t *testing.T) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		line := []byte(strings.Repeat("x", 1<<10) + "\n")
		for {
			if _, err := s.stdin.Write(line); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { <-done })
}

// A session that loses its connection prints one line of berth's own.
func TestOperatorLostSessionPrintsOneLine(t *testing.T) {
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	s := startSession(t, d, "exec", "-i", c.Id, "sh", "-c", "echo up; exec cat")
	s.keepTyping(t)
	s.stdout.WaitFor(t, "xxx")
	for _, pid := range machine.ProcessesOf("berth-stream") {
		machine.KillProcess(t, pid)
	}
	_ = s.cmd.Wait()
	onlyOwnLines(t, s.stderr.String())
	if lines := strings.Count(s.stderr.String(), "\n"); lines > 1 || lines == 1 && !strings.HasPrefix(s.stderr.String(), "berth: exec ") {
		t.Errorf("stderr is %q", s.stderr.String())
	}
	if s.cmd.ProcessState.ExitCode() == 0 {
		t.Error("the exit code of a lost session is 0, want another")
	}
}
