package shim

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/pidfd"
	"berth/internal/testutil"
	"berth/shim/proto"
)

// memoryFiles returns two files with known names and content.
func memoryFiles(t *testing.T) (files []*os.File) {
	t.Helper()
	for i := range proto.KeptFDs {
		name := fmt.Sprintf("kept-file-%d", i)
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
		testutil.Must(t, err)
		f := os.NewFile(uintptr(fd), name)
		t.Cleanup(func() { testutil.Must(t, f.Close()) })
		_, err = f.WriteString(name)
		testutil.Must(t, err)
		files = append(files, f)
	}
	return files
}

func isMemoryFile(f *os.File) bool {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return err == nil && strings.Contains(name, "kept-file")
}

// openNames returns what the descriptors of a process lead to.
func openNames(t *testing.T, pid int) (names []string) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	testutil.Must(t, err)
	for _, e := range entries {
		name, err := os.Readlink(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) { // the process has closed it meanwhile
			continue
		}
		testutil.Must(t, err)
		names = append(names, e.Name()+" "+name)
	}
	return names
}

func hasKept(names []string) bool { return strings.Contains(strings.Join(names, "\n"), "kept-file") }

// The monitor of a container keeps the files open at fixed numbers. A later daemon gets them. The
// container's processes do not inherit them, neither its init nor an exec.
func TestKeptFiles(t *testing.T) {
	e := newEnv(t)
	files := memoryFiles(t)
	if got, err := KeptFiles(e.dir, isMemoryFile); got != nil || err != nil {
		t.Errorf("without a container: %v, %v", got, err)
	}
	other := e.run("other", "sleep 1000")
	c := e.run("kept", "ls -l /proc/self/fd; exec sleep 1000", func(req *proto.Launch) { req.Rootfs.Keep = files })
	for _, pid := range []int{c.InitPID, other.InitPID, other.MonitorPID} {
		if names := openNames(t, pid); hasKept(names) {
			t.Errorf("process %d has %q", pid, names)
		}
	}
	testutil.Eventually(t, "the container lists its descriptors", func() bool { return strings.Contains(c.log(), "->") })
	if strings.Contains(c.log(), "kept-file") {
		t.Errorf("the container has the files: %s", c.log())
	}
	if pid := c.execWithKept(files); pid != 0 {
		t.Errorf("the exec has the files")
	}
	got, err := KeptFiles(e.dir, isMemoryFile)
	testutil.Must(t, err)
	if len(got) != proto.KeptFDs {
		t.Fatalf("%d files", len(got))
	}
	for i, f := range got {
		content, err := io.ReadAll(io.NewSectionReader(f, 0, 100))
		testutil.Must(t, err)
		if want := fmt.Sprintf("kept-file-%d", i); string(content) != want {
			t.Errorf("file %d has %q", i, content)
		}
		testutil.Must(t, f.Close())
	}
	if got, err := KeptFiles(e.dir, func(*os.File) bool { return false }); got != nil || err != nil {
		t.Errorf("other files: %v, %v", got, err)
	}
	testutil.Must(t, pidfd.Signal(c.Init, unix.SIGKILL))
	c.wait()
	if got, err := KeptFiles(e.dir, isMemoryFile); got != nil || err != nil {
		t.Errorf("after the container's end: %v, %v", got, err)
	}
}

// execWithKept runs an exec with the files and returns its process ID if it has them.
func (c *container) execWithKept(files []*os.File) (pid int) {
	c.Helper()
	x, err := c.Exec(c.ctx, &proto.Exec{ID: c.ID, ExecID: "x", Process: testProcess("sleep", "1000"), Keep: files})
	if err != nil {
		c.Fatal(err)
	}
	if hasKept(openNames(c.T, x.PID())) {
		pid = x.PID()
	}
	launcher := openNames(c.T, x.p.pid)
	if !hasKept(launcher) {
		c.Errorf("the launcher of the exec has not kept the files: %q", launcher)
	}
	if err := x.Kill(); err != nil {
		c.Error(err)
	}
	if _, err := x.Wait(c.ctx); err != nil {
		c.Error(err)
	}
	testutil.Eventually(c.T, "the launcher closes the files", func() bool { return !hasKept(openNames(c.T, x.p.pid)) })
	if err := x.Close(); err != nil {
		c.Error(err)
	}
	return pid
}

// A launch that fails leaves no process with the files.
func TestKeptFilesOfFailedLaunch(t *testing.T) {
	e := newEnv(t)
	req := e.request("bad", "true")
	req.Spec.Process.Args = []string{"/no/such/program"}
	req.Rootfs.Keep = memoryFiles(t)
	if _, err := e.Launch(e.ctx, req); err == nil {
		t.Fatal("it was launched")
	}
	if got, err := KeptFiles(e.dir, isMemoryFile); got != nil || err != nil {
		t.Errorf("%v, %v", got, err)
	}
}
