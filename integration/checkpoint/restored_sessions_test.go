package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	cri "k8s.io/cri-client/pkg"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// revive saves a pod with these containers, removes it, and restores it as another pod whose
// containers run.
func revive(t *testing.T, pod *harness.Pod, containers ...*harness.Container) (*harness.Pod, []*harness.Container) {
	t.Helper()
	s := save(t, pod, containers...)
	pod.Remove(t)
	restored, list := restorePod(t, s.d, s.identity(t))
	for _, c := range list {
		c.Start(t)
	}
	return restored, list
}

// reading waits until a container's shell reads its standard input. Then it has nothing of its
// start left to do.
func reading(t *testing.T, c *harness.Container) {
	t.Helper()
	pid := c.Pid(t)
	harness.EventuallyTrue(t, "the shell reads its input", func() bool {
		call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		number, _, _ := strings.Cut(string(call), " ")
		return number == strconv.Itoa(unix.SYS_READ) || number == strconv.Itoa(unix.SYS_PPOLL) || number == "7" // poll(2) of amd64
	})
}

// echoing answers each line of input on both streams.
const echoing = `while read x; do echo you said $x; echo and on stderr >&2; [ $x = bye ] && exit 8; done; echo end of input`

// A restored container can be attached to as often as before: with streams, with an input that ends
// after the first client, and with a terminal.
func TestRestoredAttach(t *testing.T) {
	d := startDaemon(t)
	t.Run("streams", func(t *testing.T) {
		pod := d.RunPod(t)
		c := pod.Run(t, harness.Script(echoing), harness.WithStdin(false))
		reading(t, c)
		restored, list := revive(t, pod, c)
		first := sessions.Attach(t, list[0], sessions.Spdy)
		first.Send(t, "hello\n")
		first.Stdout.WaitFor(t, "you said hello\n")
		first.Stderr.WaitFor(t, "and on stderr\n")
		first.HangUp()
		<-first.Ended
		second := sessions.Attach(t, list[0], sessions.WebSocket) // the input is still open
		second.Send(t, "bye\n")
		harness.Must(t, <-second.Ended)
		harness.Equal(t, "stdout", second.Stdout.String(), "you said bye\n")
		harness.Equal(t, "exit code", list[0].WaitExited(t).ExitCode, 8)
		harness.Equal(t, "log", list[0].Output(t), "you said hello\nand on stderr\nyou said bye\nand on stderr\n")
		restored.Remove(t)
	})
	t.Run("once", func(t *testing.T) {
		pod := d.RunPod(t)
		c := pod.Run(t, harness.Script(echoing), harness.WithStdin(true))
		reading(t, c)
		restored, list := revive(t, pod, c)
		a := sessions.Attach(t, list[0], sessions.Spdy)
		a.Send(t, "one\n")
		harness.Must(t, a.Typing.Close())
		harness.Must(t, <-a.Ended)
		harness.Equal(t, "stdout", a.Stdout.String(), "you said one\nend of input\n")
		harness.Equal(t, "exit code", list[0].WaitExited(t).ExitCode, 0)
		restored.Remove(t)
	})
	t.Run("terminal", func(t *testing.T) {
		pod := d.RunPod(t)
		c := pod.Run(t, harness.Script("while read x; do stty size; [ $x = bye ] && exit 5; done"), harness.WithTerminal)
		before, resize := attachTerminal(t, c)
		resize(remotecommand.TerminalSize{Width: 77, Height: 22})
		showsSize(t, before, "22 77")
		before.HangUp()
		<-before.Ended
		reading(t, c)
		restored, list := reviveDetached(t, pod, c)
		after, resize := attachTerminal(t, list[0])
		after.Send(t, "x\n")
		after.Stdout.WaitFor(t, "22 77\r\n") // the size from before the checkpoint
		resize(remotecommand.TerminalSize{Width: 91, Height: 33})
		showsSize(t, after, "33 91")
		after.Send(t, "bye\n")
		harness.Must(t, <-after.Ended)
		harness.Equal(t, "exit code", list[0].WaitExited(t).ExitCode, 5)
		restored.Remove(t)
	})
}

// reviveDetached is revive after a client of the container's terminal has left. The checkpoint is
// refused until the monitor has noticed that.
func reviveDetached(t *testing.T, pod *harness.Pod, c *harness.Container) (*harness.Pod, []*harness.Container) {
	t.Helper()
	harness.Eventually(t, "the client is detached", func() error { return checkpointPod(t, pod, outputDir(t, pod.D), c) })
	return revive(t, pod, c)
}

// attachTerminal attaches to a container's terminal. resize changes the terminal's size.
func attachTerminal(t *testing.T, c *harness.Container) (a *sessions.Attachment, resize func(remotecommand.TerminalSize)) {
	t.Helper()
	sizes := sessions.Sizes{Resized: make(chan remotecommand.TerminalSize)}
	t.Cleanup(func() { close(sizes.Resized) })
	a = sessions.Attach(t, c, sessions.Spdy, func(o *remotecommand.StreamOptions) { o.Tty, o.Stderr, o.TerminalSizeQueue = true, nil, sizes })
	return a, func(s remotecommand.TerminalSize) { sizes.Resized <- s }
}

// showsSize makes a container print the size of its terminal until it is size.
func showsSize(t *testing.T, a *sessions.Attachment, size string) {
	t.Helper()
	harness.Eventually(t, "the terminal's size is "+size, func() error {
		if _, err := io.WriteString(a.Typing, "x\n"); err != nil {
			return err
		}
		if out := a.Stdout.String(); !strings.Contains(out, size+"\r\n") {
			return fmt.Errorf("the terminal shows %q", out)
		}
		return nil
	})
}

// Execs in a restored container work as in any other: probes that succeed, fail and time out,
// sessions, and terminals.
func TestRestoredExec(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t)
	c := pod.Run(t, harness.Script("touch /live; "+counting), harness.Env("FROM", "config"), func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/tmp" })
	waitCounted(t, c, 1)
	restored, list := revive(t, pod, c)
	c = list[0]
	waitCounted(t, c, 1)
	probe := func(script string) error {
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sh", "-c", script}, 10*time.Second)
		return err
	}
	t.Run("probes", func(t *testing.T) {
		for range 20 {
			harness.Must(t, probe("test -e /live"))
		}
		c.Exec(t, "rm", "/live")
		harness.Equal(t, "exit code of a failing probe", harness.ExitCode(probe("test -e /live")), 1)
		_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"sleep", "7774"}, time.Second)
		if !errors.Is(err, cri.ErrCommandTimedOut) {
			t.Errorf("a probe that hangs: %v", err)
		}
		harness.EventuallyTrue(t, "the hanging probe is killed", func() bool { return len(machine.CommandLines("sleep 7774")) == 0 })
	})
	t.Run("session", func(t *testing.T) {
		stdout, stderr := &sessions.Screen{}, &sessions.Screen{}
		o := remotecommand.StreamOptions{Stdin: strings.NewReader("typed\n"), Stdout: stdout, Stderr: stderr}
		code, err := sessions.Spdy.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "read x; echo $x $FROM $(pwd); echo err >&2; exit 7"), o)
		harness.Must(t, err)
		harness.Equal(t, "exit code", code, 7)
		harness.Equal(t, "stdout", stdout.String(), "typed config /tmp\n")
		harness.Equal(t, "stderr", stderr.String(), "err\n")
	})
	t.Run("terminal", func(t *testing.T) {
		stdout := &sessions.Screen{}
		sizes := sessions.Sizes{Resized: make(chan remotecommand.TerminalSize, 1)}
		sizes.Resized <- remotecommand.TerminalSize{Width: 91, Height: 33}
		defer close(sizes.Resized)
		o := remotecommand.StreamOptions{Stdout: stdout, Tty: true, TerminalSizeQueue: sizes}
		code, err := sessions.WebSocket.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", "until [ \"$(stty size)\" = '33 91' ]; do sleep 0.02; done; tty"), o)
		harness.Must(t, err)
		harness.Equal(t, "exit code", code, 0)
		harness.WantText(t, "terminal", stdout.String(), "/dev/pts/")
	})
	restored.Remove(t)
}

// kubelet's exec probes go on during a checkpoint. They wait for its end, so none of them fails,
// and they do not prevent it.
func TestProbesDuringCheckpoint(t *testing.T) {
	d := startDaemon(t)
	pod, list := run(t, d, "one", "two")
	done, probes := make(chan struct{}), make(chan error, len(list))
	var ran [2]int
	for i, c := range list {
		go func() {
			for {
				select {
				case <-done:
					probes <- nil
					return
				default:
				}
				if _, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"test", "-e", "/counter"}, time.Minute); err != nil {
					probes <- err
					return
				}
				ran[i]++
			}
		}()
	}
	for range 5 {
		harness.Must(t, checkpointPod(t, pod, outputDir(t, d), list...))
	}
	close(done)
	for range list {
		if err := <-probes; err != nil {
			t.Errorf("a probe failed: %v", err)
		}
	}
	if ran[0] == 0 || ran[1] == 0 {
		t.Errorf("probes that ran: %v", ran)
	}
}

// Ports of a restored pod can be forwarded, with the pod's network and with that of the node.
func TestRestoredPortForward(t *testing.T) {
	d := startDaemon(t)
	const port = 8391
	for name, option := range map[string]harness.PodOption{"own network": func(*runtimeapi.PodSandboxConfig) {}, "host network": harness.HostNetwork} {
		t.Run(name, func(t *testing.T) {
			pod := d.RunPod(t, option)
			c := pod.Run(t, harness.Script(fmt.Sprintf("mkdir -p /srv && echo the page >/srv/index.html && exec httpd -f -p 127.0.0.1:%d -h /srv", port)))
			page := []string{"wget", "-q", "-O-", fmt.Sprintf("http://127.0.0.1:%d/", port)}
			harness.Eventually(t, "the server listens", func() error {
				_, _, err := d.Cri.ExecSync(t.Context(), c.Id, page, 0)
				return err
			})
			restored, list := revive(t, pod, c)
			harness.Equal(t, "page inside", list[0].Exec(t, page...), "the page")
			response, err := http.Get("http://" + sessions.ForwardPort(t, restored, port) + "/")
			harness.Must(t, err)
			defer response.Body.Close()
			harness.Equal(t, "page", string(harness.Get(io.ReadAll(response.Body))(t)), "the page\n")
			if name == "own network" && restored.Ip(t) == "" {
				t.Error("the restored pod has no address")
			}
			restored.Remove(t)
		})
	}
}

// A container that listens on the node's network cannot be restored beside one that has the port.
// The error names the cause, and the pod that has the port is not disturbed.
func TestRestoreOfUsedPortOfNode(t *testing.T) {
	d := startDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t, harness.Script("echo hello >/page && exec httpd -f -p 127.0.0.1:8392 -h /"))
	page := func() (string, error) {
		out, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"wget", "-q", "-O-", "http://127.0.0.1:8392/page"}, 0)
		return string(out), err
	}
	harness.Eventually(t, "it listens", func() error { _, err := page(); return err })
	s := save(t, pod, c)
	restored, list := restorePod(t, d, s.identity(t))
	harness.WantCode(t, d.Cri.StartContainer(t.Context(), list[0].Id), codes.FailedPrecondition, "Address already in use")
	restored.Remove(t)
	harness.Equal(t, "the first pod's answer", harness.Get(page())(t), "hello\n")
	pod.Remove(t)
}
