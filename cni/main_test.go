package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

const insideVar = "BERTH_CNI_TEST_INSIDE"

// TestMain runs the tests in new network and mount namespaces, so that their bridges, iptables
// rules and mounts vanish with the process.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == skelPlugin {
		skel.PluginMainFuncs(skelFuncs, version.All, "test plugin")
		return
	}
	if os.Getenv(hugeEnvironmentVar) != "" {
		fmt.Fprintln(os.Stderr, "process with a huge environment exited:", haveHugeEnvironment())
		os.Exit(1)
	}
	if os.Getenv(insideVar) != "" {
		if err := enterTestNamespaces(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if dir := os.Getenv(daemonVar); dir != "" {
			fmt.Fprintln(os.Stderr, "ADD returned:", addForever(dir))
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	if os.Geteuid() != 0 {
		if os.Getenv(daemonVar) != "" { // never run the tests in a process that a test started
			fmt.Fprintln(os.Stderr, "the test daemon needs root")
			os.Exit(1)
		}
		os.Exit(m.Run()) // tests that need root skip themselves
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVar+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = inheritedFiles() // fuzzing workers use them to talk to their coordinator
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run tests of package cni in namespaces:", err)
		os.Exit(1)
	}
}

// daemonVar makes the test binary a daemon that adds a pod in a bed's directory and can be killed.
const daemonVar = "BERTH_CNI_TEST_DAEMON"

func addForever(dir string) error {
	n, err := New(Config{ConfDir: dir + "/net.d", BinDirs: []string{dir + "/bin"}, CacheDir: dir + "/cache", RunDir: dir + "/runs"}, slog.Default())
	if err != nil {
		return err
	}
	att, err := n.Plan()
	if err != nil {
		return err
	}
	_, err = n.Add(context.Background(), att, testPod("p1"))
	return err
}

func enterTestNamespaces() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

func inheritedFiles() []*os.File {
	var files []*os.File
	for fd := 3; fd < 6; fd++ {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC != 0 {
			break
		}
		files = append(files, os.NewFile(uintptr(fd), "inherited"))
	}
	return files
}

// skelPlugin is the file name that makes the test binary a plugin with the CNI project's skeleton,
// which most plugins use. The skeleton supports neither STATUS nor GC.
const skelPlugin = "skel"

var skelFuncs = skel.CNIFuncs{
	Add: func(args *skel.CmdArgs) error {
		conf := types.PluginConf{}
		if err := json.Unmarshal(args.StdinData, &conf); err != nil {
			return err
		}
		return types.PrintResult(&types100.Result{}, conf.CNIVersion)
	},
	Del: func(*skel.CmdArgs) error { return nil },
}

// bed is a Network with its own directories and fake plugins.
type bed struct {
	t             *testing.T
	conf, bin     string
	cache, record string // record: input of the fake plugins
	runs          string
	n             *Network
}

func newBed(t *testing.T) *bed {
	t.Helper()
	dir := t.TempDir()
	b := &bed{t: t, conf: dir + "/net.d", bin: dir + "/bin", cache: dir + "/cache", record: dir + "/record", runs: dir + "/runs"}
	for _, d := range []string{b.conf, b.bin, b.record} {
		testutil.Must(t, os.Mkdir(d, 0o755))
	}
	if os.Geteuid() != 0 {
		b.runs = "" // no cgroups
	}
	return b
}

// start opens the Network. New reads the current directories; the watch detects later changes.
func (b *bed) start(extraBinDirs ...string) *Network {
	b.t.Helper()
	n, err := New(Config{ConfDir: b.conf, BinDirs: append([]string{b.bin}, extraBinDirs...), CacheDir: b.cache, RunDir: b.runs}, testutil.Logger(b.t))
	testutil.Must(b.t, err)
	b.t.Cleanup(n.Close)
	b.n = n
	return n
}

// plugin installs a shell script that records CNI_COMMAND, environment and stdin, and then runs
// body. In body $record is the directory of records. The answer to VERSION is the file
// NAME.versions there; without it the plugin does not know the verb.
func (b *bed) plugin(name, body string) {
	b.t.Helper()
	b.write(b.bin+"/"+name, fmt.Sprintf(`#!/bin/sh
export record=%[1]s; me=%[2]s
[ "$CNI_COMMAND" = VERSION ] && { cat >/dev/null; cat $record/$me.versions 2>/dev/null; exit; }
cat >$record/.stdin.$$; mv $record/.stdin.$$ $record/$me.$CNI_COMMAND.stdin
env >$record/.env.$$; mv $record/.env.$$ $record/$me.$CNI_COMMAND.env
echo "$me $CNI_COMMAND $CNI_CONTAINERID" >>$record/calls
%[3]s
`, b.record, name, body))
}

// okResult makes a plugin succeed with the documentation address 192.0.2.5.
const okResult = `[ "$CNI_COMMAND" = ADD ] && echo '{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.5/24"}]}'; exit 0`

// write creates an executable file by rename.
func (b *bed) write(path, content string) {
	b.t.Helper()
	testutil.Must(b.t, os.WriteFile(path+".tmp", []byte(content), 0o755))
	testutil.Must(b.t, os.Rename(path+".tmp", path))
}

func (b *bed) writeConf(name, content string) { b.t.Helper(); b.write(b.conf+"/"+name, content) }

// calls returns the calls of fake plugins in order.
func (b *bed) calls() []string {
	data, err := os.ReadFile(b.record + "/calls")
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	testutil.Must(b.t, err)
	return strings.Split(strings.TrimSuffix(string(data), "\n"), "\n")
}

func (b *bed) forget() { testutil.Must(b.t, os.RemoveAll(b.record+"/calls")) }

// saw returns a record, "<plugin>.<verb>.stdin" or ".env".
func (b *bed) saw(name string) string {
	b.t.Helper()
	data, err := os.ReadFile(filepath.Join(b.record, name))
	testutil.Must(b.t, err)
	return string(data)
}

func (b *bed) plan() Attachment {
	b.t.Helper()
	att, err := b.n.Plan()
	testutil.Must(b.t, err)
	return att
}

func (b *bed) add(pod Pod) Attachment {
	b.t.Helper()
	att := b.plan()
	_, err := b.n.Add(context.Background(), att, pod)
	testutil.Must(b.t, err)
	return att
}

// conflist returns a list of plugins without further keys.
func conflist(version, name string, plugins ...string) string {
	parts := make([]string, len(plugins))
	for i, p := range plugins {
		parts[i] = fmt.Sprintf(`{"type":%q}`, p)
	}
	return fmt.Sprintf(`{"cniVersion":%q,"name":%q,"plugins":[%s]}`, version, name, strings.Join(parts, ","))
}

func testPod(id string) Pod {
	return Pod{ID: id, Name: "web", Namespace: "shop", UID: "uid-1", NetNS: "/proc/self/ns/net"}
}

// readPID waits until a fake plugin has written its pid.
func (b *bed) readPID(file string) int {
	b.t.Helper()
	var pid int
	testutil.Eventually(b.t, "pid in "+file, func() bool {
		data, err := os.ReadFile(filepath.Join(b.record, file))
		if err != nil {
			return false
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(data)))
		return err == nil
	})
	return pid
}

// isGone reports whether a process has exited. A zombie has exited.
func isGone(pid int) bool {
	if _, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil {
		return true // exit_mm ran: the process executes no more instructions and becomes a zombie
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z")
}
