package upgrade

import (
	"context"
	"io"
	"testing"

	"k8s.io/client-go/tools/remotecommand"

	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// withoutStream is the last commit whose daemon had the sessions itself.
const withoutStream = "7d3a06bf6366e8e42249dff21772b2ea029f8f4c"

// repeat is a command that repeats each line.
const repeat = `while read line; do echo "$line"; done; exit 7`

// commands returns the number of running commands of sessions.
func commands() int { return len(machine.ProcessesOf("sh -c " + repeat)) }

// shell is a session that runs repeat.
type shell struct {
	typing *io.PipeWriter
	screen sessions.Screen
	hangUp context.CancelFunc
	ended  chan error
}

func openShell(t *testing.T, c *harness.Container, p sessions.Protocol) *shell {
	t.Helper()
	ctx, hangUp := context.WithCancel(t.Context())
	input, typing := io.Pipe()
	s := &shell{typing: typing, hangUp: hangUp, ended: make(chan error, 1)}
	o := remotecommand.StreamOptions{Stdin: input, Stdout: &s.screen}
	address := c.ExecURL(t, o, "sh", "-c", repeat)
	go func() {
		code, err := p.Stream(ctx, sessions.Plain(), address, o)
		input.Close()
		if err == nil && code != 7 {
			err = harness.Unexpected("exit code", code, 7)
		}
		s.ended <- err
	}()
	s.answers(t, "begun")
	return s
}

// answers expects that the session repeats a line.
func (s *shell) answers(t *testing.T, line string) {
	t.Helper()
	harness.Get(io.WriteString(s.typing, line+"\n"))(t)
	s.screen.WaitFor(t, line+"\n")
}

// exit ends the session and expects the command's exit code.
func (s *shell) exit(t *testing.T) {
	t.Helper()
	s.typing.Close()
	harness.Must(t, <-s.ended)
}

// Sessions survive a downgrade to a version that knows nothing of berth-stream, and the upgrade
// back. If their client goes while that version runs, nothing is left of them.
func TestSessionsOutliveDowngrade(t *testing.T) {
	older := programs(t, withoutStream)
	d := harness.StartDaemon(t)
	pod := d.RunPod(t, harness.HostNetwork)
	c := pod.Run(t)
	pid := c.Pid(t)
	var stay []*shell
	for _, p := range sessions.Protocols {
		stay = append(stay, openShell(t, c, p))
	}
	leaves := openShell(t, c, sessions.Spdy)
	attached := sessions.Attach(t, pod.Run(t, harness.Script("exec cat"), harness.WithStdin(false)), sessions.Spdy)
	answers := func(line string) {
		for _, s := range stay {
			s.answers(t, line)
		}
		attached.Send(t, line+"\n")
		attached.Stdout.WaitFor(t, line+"\n")
	}
	use := func(bin string) {
		d.Stop(t)
		d.UseVersion(t, bin, d.Extra...)
		d.Start(t)
	}

	answers("before")
	use(older)
	answers("older")
	leaves.hangUp()
	<-leaves.ended
	harness.EventuallyTrue(t, "the command of the client that has gone is killed", func() bool { return commands() == len(stay) })
	ofOlder := openShell(t, c, sessions.Spdy)
	ofOlder.exit(t)

	use("")
	answers("newer")
	harness.Equal(t, "process of the container", c.Pid(t), pid)
	for _, s := range stay {
		s.exit(t)
	}
	attached.HangUp()
	<-attached.Ended
	harness.EventuallyTrue(t, "the commands have ended", func() bool { return commands() == 0 })
	harness.EventuallyTrue(t, "berth-stream has ended", func() bool { return len(machine.ProcessesOf("berth-stream")) == 0 })
	openShell(t, c, sessions.Spdy).exit(t)
}

// If the version without berth-stream stays, the process ends with its last session.
func TestProcessOfSessionsEndsAfterDowngrade(t *testing.T) {
	older := programs(t, withoutStream)
	d := harness.StartDaemon(t)
	c := d.RunPod(t, harness.HostNetwork).Run(t)
	s := openShell(t, c, sessions.Spdy)
	d.Stop(t)
	d.UseVersion(t, older, d.Extra...)
	d.Start(t)
	s.exit(t)
	harness.EventuallyTrue(t, "berth-stream has ended", func() bool { return len(machine.ProcessesOf("berth-stream")) == 0 })
	harness.Equal(t, "exec", c.Exec(t, "echo", "hello"), "hello")
	d.Stop(t)
	d.UseVersion(t, "")
	d.Start(t)
}
