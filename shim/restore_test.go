package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/pidfd"
	"berth/shim/proto"
)

// restoreLimit bounds each restore of a test.
const restoreLimit = 30 * time.Second

// criuProgram returns the CRIU to test, or skips the test.
func criuProgram(t *testing.T) string {
	t.Helper()
	path := os.Getenv("BERTH_TEST_CRIU")
	if path == "" {
		t.Skip("NOT TESTED: no CRIU (BERTH_TEST_CRIU)")
	}
	if os.Getenv(runtimeEnv) != "" {
		t.Skip("libcontainer restores containers")
	}
	return path
}

// nullKey names the null device of a container's streams in a checkpoint. libcontainer passes
// streams with the names of pipes to a restored container.
const nullKey = "pipe:[berth-null]"

// checkpoint dumps a running container into a new directory and ends it.
func (c *container) checkpoint(criu string) (images string) {
	c.Helper()
	images = filepath.Join(c.dir, c.ID+"-images")
	bin := filepath.Join(c.dir, c.ID+"-bin")
	if err := os.MkdirAll(bin, 0o700); err != nil {
		c.Fatal(err)
	}
	if err := os.Symlink(criu, filepath.Join(bin, "criu")); err != nil {
		c.Fatal(err)
	}
	// In another process, because libcontainer keeps files open.
	dump := exec.Command("/proc/self/exe", dumpCommand, c.withLabel("org.criu.config="+c.dumpOptions()), c.ID, images)
	dump.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
	if out, err := dump.CombinedOutput(); err != nil {
		log, _ := os.ReadFile(filepath.Join(images, "dump.log"))
		c.Fatalf("checkpoint: %v\n%s\n%s", err, out, log)
	}
	c.wait()
	descriptors := filepath.Join(images, "descriptors.json")
	data, err := os.ReadFile(descriptors)
	if err != nil {
		c.Fatal(err)
	}
	if err := os.WriteFile(descriptors, bytes.ReplaceAll(data, []byte("/dev/null"), []byte(nullKey)), 0o600); err != nil {
		c.Fatal(err)
	}
	return images
}

// dumpCommand makes the test binary dump a container.
const dumpCommand = "dump-container"

func init() {
	if len(os.Args) != 5 || os.Args[1] != dumpCommand {
		return
	}
	loaded, err := libcontainer.Load(os.Args[2], os.Args[3])
	if err == nil {
		err = loaded.Checkpoint(&libcontainer.CriuOpts{ImagesDirectory: os.Args[4], StatusFd: -1})
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// dumpOptions writes a configuration file for CRIU and returns its path. It names the null device
// of the streams, which is on a mount that the container does not see.
func (c *container) dumpOptions() string {
	c.Helper()
	path := filepath.Join(c.dir, c.ID+"-criu.conf")
	var options strings.Builder
	for fd := range 3 {
		file := fmt.Sprintf("/proc/%d/fd/%d", c.InitPID, fd)
		var st unix.Stat_t
		if err := unix.Stat(file, &st); err != nil {
			c.Fatal(err)
		}
		if target, err := os.Readlink(file); err != nil || target != "/dev/null" {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", c.InitPID, fd))
		if err != nil {
			c.Fatal(err)
		}
		_, rest, _ := strings.Cut(string(info), "mnt_id:")
		mount, err := strconv.Atoi(strings.Fields(rest)[0])
		if err != nil {
			c.Fatal(err)
		}
		fmt.Fprintf(&options, "external file[%x:%x]:%s\n", mount, st.Ino, nullKey)
		break
	}
	if err := os.WriteFile(path, []byte(options.String()), 0o600); err != nil {
		c.Fatal(err)
	}
	return path
}

// withLabel returns a state directory with a copy of the container's state that has one more label.
func (c *container) withLabel(label string) (root string) {
	c.Helper()
	data, err := os.ReadFile(filepath.Join(c.cfg.StateRoot, c.ID, "state.json"))
	if err != nil {
		c.Fatal(err)
	}
	var state map[string]any
	if err := json.Unmarshal(data, &state); err != nil {
		c.Fatal(err)
	}
	state["config"].(map[string]any)["labels"] = []string{label}
	if data, err = json.Marshal(state); err != nil {
		c.Fatal(err)
	}
	root = filepath.Join(c.dir, c.ID+"-state")
	if err := os.MkdirAll(filepath.Join(root, c.ID), 0o700); err != nil {
		c.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, c.ID, "state.json"), data, 0o600); err != nil {
		c.Fatal(err)
	}
	return root
}

// restoring makes a launch continue a checkpoint.
func restoring(criu, images string) func(*proto.Launch) {
	return func(req *proto.Launch) {
		req.Restore = &proto.Restore{CRIU: criu, Images: images, Timeout: restoreLimit}
	}
}

func (c *container) lines() []string { return strings.Fields(c.output("stdout")) }

// on returns the environment for a subtest.
func on(t *testing.T, e *env) *env {
	sub := *e
	sub.T = t
	return &sub
}

func TestRestore(t *testing.T) {
	program := criuProgram(t)
	e := newEnv(t)
	for _, test := range []struct {
		name   string
		change func(*proto.Launch)
	}{
		{"pipes", func(*proto.Launch) {}},
		{"stdin", func(req *proto.Launch) { req.Stdin = true }},
		{"terminal", func(req *proto.Launch) { req.Terminal, req.Spec.Process.Terminal = true, true }},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := on(t, e).run("before-"+test.name, counting, test.change)
			e.until("it counts", func() bool { return len(c.lines()) > 3 })
			images := c.checkpoint(program)
			before := c.lines()
			for _, id := range []string{"first-", "second-"} {
				r := on(t, e).run(id+test.name, "never executed", test.change, restoring(program, images))
				e.until("it continues", func() bool { return len(r.lines()) > 3 })
				for _, s := range r.Steps {
					t.Logf("%-30s %v", s.Name, time.Duration(s.Ended-s.Began))
				}
				if after := r.lines(); after[0] != strconv.Itoa(len(before)+1) {
					t.Errorf("it continues with %s after %d numbers", after[0], len(before))
				}
			}
		})
	}
}

// Zombies and child processes are restored.
func TestRestoreProcesses(t *testing.T) {
	program := criuProgram(t)
	e := newEnv(t)
	const script = `(sleep 0 & echo child $!; exec sleep 1000) & while :; do echo tick; sleep 0.02; done`
	c := e.run("before", script)
	e.until("there is a zombie", func() bool {
		for _, pid := range c.members() {
			stat, _ := os.ReadFile("/proc/" + itoa(pid) + "/stat")
			if strings.Contains(string(stat), ") Z ") {
				return true
			}
		}
		return false
	})
	images := c.checkpoint(program)
	r := e.run("after", "never executed", restoring(program, images))
	e.until("it continues", func() bool { return strings.Contains(r.output("stdout"), "tick\n") })
	if strings.Contains(r.output("stdout"), "child") {
		t.Errorf("it started anew: %q", r.output("stdout"))
	}
}

// members returns the container's processes, including zombies.
func (c *container) members() []int {
	c.Helper()
	below, err := pidfd.Below(c.InitPID)
	if err != nil {
		c.Fatal(err)
	}
	return append(below, c.InitPID)
}

// A launch from a directory without images fails, and leaves nothing.
func TestRestoreWithoutImages(t *testing.T) {
	program := criuProgram(t)
	e := newEnv(t)
	images := t.TempDir()
	if err := os.WriteFile(filepath.Join(images, "descriptors.json"), []byte(`["/dev/null","/dev/null","/dev/null"]`), 0o600); err != nil {
		t.Fatal(err)
	}
	req := e.request("empty", "never executed")
	restoring(program, images)(req)
	_, err := e.Launch(e.ctx, req)
	if errdefs.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "pstree.img") {
		t.Errorf("Launch: %v", err)
	}
}

// A CRIU that hangs is killed at the limit, or when the daemon cancels the launch.
func TestRestoreEndsHungCRIU(t *testing.T) {
	working := criuProgram(t)
	e := newEnv(t)
	c := e.run("before", counting)
	e.until("it counts", func() bool { return len(c.lines()) > 3 })
	images := c.checkpoint(working)
	program := filepath.Join(e.dir, "hung")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nsleep 1000 & wait\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name         string
		limit, after time.Duration
		code         codes.Code
	}{
		{"limit", time.Second, time.Hour, codes.FailedPrecondition},
		{"cancel", time.Hour, time.Second, codes.DeadlineExceeded},
	} {
		t.Run(test.name, func(t *testing.T) {
			req := on(t, e).request(test.name, "never executed")
			restoring(program, images)(req)
			req.Restore.Timeout = test.limit
			ctx, cancel := context.WithTimeout(e.ctx, test.after)
			defer cancel()
			_, err := e.Launch(ctx, req)
			if code := errdefs.Code(err); code != test.code {
				t.Errorf("Launch: %v (%v), want %v", err, code, test.code)
			}
		})
	}
}
