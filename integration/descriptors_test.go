package integration

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/remotecommand"

	"berth/integration/fixture"
	"berth/integration/harness"
	"berth/integration/machine"
	"berth/integration/sessions"
)

// hostFilesystems maps the device numbers of all filesystems of the host to their mount points.
func hostFilesystems() map[uint64]string {
	found := map[uint64]string{}
	for _, line := range machine.ReadLines("/proc/self/mountinfo") {
		fields := strings.Fields(line)
		major, minor, _ := strings.Cut(fields[2], ":")
		a, errA := strconv.ParseUint(major, 10, 32)
		b, errB := strconv.ParseUint(minor, 10, 32)
		if errA == nil && errB == nil {
			found[unix.Mkdev(uint32(a), uint32(b))] = fields[4]
		}
	}
	return found
}

// wantOwnDescriptors checks that no descriptor of a process refers to a file of the host.
func wantOwnDescriptors(t *testing.T, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	harness.Must(t, err)
	host := hostFilesystems()
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info := harness.Get(os.Stat(path))(t)
		target, _ := os.Readlink(path)
		if place, ok := host[info.Sys().(*syscall.Stat_t).Dev]; ok {
			t.Errorf("descriptor %s is %s, of the host's filesystem at %s", e.Name(), target, place)
		}
	}
}

// listDescriptors is a shell script that lists the shell's own descriptors. The redirection
// duplicates those that it replaces, so they are listed with another number.
const listDescriptors = `{ for f in /proc/$$/fd/*; do stat -L -c '%d %n' $f 2>&1 && readlink $f; done; true; } >/descriptors`

// wantListed checks the output of listDescriptors.
func wantListed(t *testing.T, c *harness.Container) {
	t.Helper()
	lines := strings.Split(c.Exec(t, "cat", "/descriptors"), "\n")
	if len(lines) < 6 {
		t.Errorf("only these descriptors were listed: %q", lines)
	}
	host := hostFilesystems()
	for i, line := range lines {
		number, _, _ := strings.Cut(line, " ")
		dev, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			continue // target of the link
		}
		if place, ok := host[dev]; ok {
			t.Errorf("descriptor %s is of the host's filesystem at %s", lines[i:min(i+2, len(lines))], place)
		}
	}
}

// openedBy lists the combinations of streams of an exec.
var openedBy = []struct {
	name    string
	options remotecommand.StreamOptions
}{
	{"stdout", remotecommand.StreamOptions{Stdout: &bytes.Buffer{}}},
	{"stdin", remotecommand.StreamOptions{Stdin: strings.NewReader("")}},
	{"stderr", remotecommand.StreamOptions{Stderr: &bytes.Buffer{}}},
	{"all", remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Stderr: &bytes.Buffer{}}},
	{"terminal", remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Tty: true}},
}

// A container's process has only its own or its container's files open. A descriptor of a device
// node allows its holder to change the node's mode and owner for all users. Such a descriptor of
// the host's /dev/null could make it unusable.
func TestContainerHasNoHostDescriptors(t *testing.T) {
	for _, handler := range []string{"", "crun"} {
		t.Run("handler "+handler, func(t *testing.T) {
			options := []harness.DaemonOption{}
			if handler != "" {
				options = append(options, harness.WithHandler(handler, harness.Crun(t)))
			}
			d := harness.StartDaemon(t, options...)
			pod := runPodWith(t, d, handler, harness.HostNetwork)
			wantOwnDescriptors(t, pod.PausePID(t))
			for name, c := range map[string]*harness.Container{
				"plain":    pod.Run(t),
				"stdin":    pod.Run(t, harness.WithStdin(false)),
				"terminal": pod.Run(t, harness.WithTerminal),
			} {
				t.Run(name, func(t *testing.T) {
					wantOwnDescriptors(t, c.Pid(t))
					c.Exec(t, "sh", "-c", listDescriptors)
					wantListed(t, c)
				})
			}
			c := pod.Run(t)
			for _, o := range openedBy {
				t.Run("exec with "+o.name, func(t *testing.T) {
					address := c.ExecURL(t, o.options, "sh", "-c", listDescriptors)
					_, err := sessions.WebSocket.Stream(t.Context(), sessions.Plain(), address, o.options)
					harness.Must(t, err)
					wantListed(t, c)
				})
			}
		})
	}
}

// attackNull removes all permissions from the files of the process's standard streams.
const attackNull = `for n in 0 1 2; do chmod 000 /proc/self/fd/$n; chown 1:1 /proc/self/fd/$n; done; true`

// wantUsableNull checks that all users can use the host's /dev/null.
func wantUsableNull(t *testing.T) {
	t.Helper()
	info := harness.Get(os.Stat(os.DevNull))(t)
	harness.Equal(t, "mode of the host's /dev/null", info.Mode().Perm(), 0o666)
	harness.Equal(t, "its owner", info.Sys().(*syscall.Stat_t).Uid, 0)
}

// Neither init nor an exec can change the host's /dev/null, with any handler. The next exec works.
func TestContainerCannotChangeHostsNull(t *testing.T) {
	if info, err := os.Stat("/run/null"); err != nil || info.Mode().Type() != os.ModeDevice|os.ModeCharDevice {
		t.Skip("NOT TESTED: /dev/null was not made by contrib/machine")
	}
	t.Cleanup(func() { // for the next tests
		harness.Must(t, errors.Join(os.Chown(os.DevNull, 0, 0), os.Chmod(os.DevNull, 0o666)))
	})
	network := strings.Replace(fixture.Conflist("test", "/run/runsc-network", fixture.Range4), `"ipMasq": true`, `"ipMasq": false`, 1)
	for _, test := range []struct {
		handler string
		path    func(*testing.T) string
		options []harness.DaemonOption
	}{
		{handler: ""},
		{handler: "crun", path: harness.Crun},
		{handler: "runsc", path: runsc, options: []harness.DaemonOption{harness.WithNetwork(network)}},
	} {
		t.Run("handler "+test.handler, func(t *testing.T) {
			options := test.options
			if test.path != nil {
				options = append(options, harness.WithHandler(test.handler, test.path(t)))
			}
			d := harness.StartDaemon(t, options...)
			pod := runPodWith(t, d, test.handler)
			c := pod.Run(t, harness.Script(attackNull+"; echo done >/done; sleep 1000"))
			harness.Eventually(t, "the attack has run", func() error {
				_, _, err := d.Cri.ExecSync(t.Context(), c.Id, []string{"cat", "/done"}, 0)
				return err
			})
			wantUsableNull(t)
			for range 2 {
				c.Exec(t, "sh", "-c", attackNull)
				wantUsableNull(t)
				o := remotecommand.StreamOptions{Stdin: strings.NewReader("")}
				_, err := sessions.WebSocket.Stream(t.Context(), sessions.Plain(), c.ExecURL(t, o, "sh", "-c", attackNull), o)
				harness.Must(t, err)
				wantUsableNull(t)
			}
			harness.Equal(t, "an exec after the attack", c.Exec(t, "sh", "-c", "cat; echo works"), "works")
		})
	}
}
