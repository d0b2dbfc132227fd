package launcher

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// holder starts a shell in a mount namespace of its own, with a new /proc and a tmpfs at dir.
// script runs in it, with outside as descriptor 3. The test continues when it has run.
func holder(t *testing.T, dir string, outside *os.File, script string) (pid int) {
	t.Helper()
	const inherited = `for f in /proc/self/fd/*; do f=${f##*/}; [ $f -le 3 ] || eval "exec $f<&-"; done; `
	cmd := exec.Command("bash", "-c", inherited+"mount -t tmpfs tmpfs "+dir+" && mount -t proc proc /proc && cd "+dir+
		" && cp /bin/sleep . && "+script+" && echo ready && read end")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	cmd.ExtraFiles = []*os.File{outside}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	testutil.Must(t, err)
	out, err := cmd.StdoutPipe()
	testutil.Must(t, err)
	testutil.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait()
	})
	line := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, line); err != nil {
		t.Fatalf("the holder of files: %v", err)
	}
	return cmd.Process.Pid
}

// A restored process may hold the files of its mount namespace and the kernel's files without paths
// only.
func TestFileGate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it needs root")
	}
	null, err := newNull()
	testutil.Must(t, err)
	defer func() { testutil.Must(t, null.Close()) }()
	file, err := os.Create(filepath.Join(t.TempDir(), "of-the-node"))
	testutil.Must(t, err)
	defer func() { testutil.Must(t, file.Close()) }()
	proc, err := os.Open("/proc")
	testutil.Must(t, err)
	defer func() { testutil.Must(t, proc.Close()) }()
	ns, err := os.Open("/proc/self/ns/mnt")
	testutil.Must(t, err)
	defer func() { testutil.Must(t, ns.Close()) }()
	memory, err := unix.MemfdCreate("of-the-node", 0)
	testutil.Must(t, err)
	memfd := os.NewFile(uintptr(memory), "memfd")
	defer func() { testutil.Must(t, memfd.Close()) }()
	for name, tc := range map[string]struct {
		file    *os.File
		script  string
		refused string // part of the error; empty: accepted
	}{
		"files of its namespace":             {memfd, "exec 4<>x 5</proc/self/stat 6</dev/null", ""},
		"its own namespaces":                 {memfd, "exec 4</proc/self/ns/mnt 5</proc/self/ns/net", ""},
		"its own namespace, deleted":         {memfd, "exec 4<>x && rm x", ""},
		"root in its namespace":              {memfd, "true", ""},
		"null device as a stream":            {null, "exec 2<&3 3<&-", ""},
		"null device elsewhere":              {null, "exec 4<&3", "fd/3 is outside its container"},
		"file":                               {file, "true", "fd/3 is outside its container"},
		"file as a stream":                   {file, "exec 2>&3 3>&-", "fd/2 is outside its container"},
		"the node's /proc":                   {proc, "true", "fd/3 is outside its container"},
		"the node's namespace":               {ns, "true", "fd/3 is outside its container"},
		"working directory in /proc":         {proc, "cd /proc/self/fd/3 && exec 3<&-", "cwd is outside its container"},
		"file behind a link to /proc":        {proc, "ln -s /proc/self/fd/3/1/root l && exec 4<l/etc/passwd 3<&-", "fd/4 is outside its container"},
		"directory behind such a link":       {proc, "ln -s /proc/self/fd/3/1/root/etc l && cd -P l && exec 3<&-", "cwd is outside its container"},
		"program behind such a link":         {proc, `exec /proc/self/fd/3/1/root/bin/bash -c "exec 3<&-; echo ready; read end"`, "exe is outside its container"},
		"the node's null device as a stream": {proc, "exec 2>/proc/self/fd/3/1/root/dev/null 3<&-", "fd/2 is outside its container"},
	} {
		t.Run(name, func(t *testing.T) {
			pid := holder(t, t.TempDir(), tc.file, tc.script)
			gate, err := newFileGate([]int{pid}, os.Getpid(), []*os.File{null})
			testutil.Must(t, err)
			err = gate.check(pid)
			if tc.refused == "" && err != nil || tc.refused != "" && (err == nil || !strings.Contains(err.Error(), tc.refused)) {
				t.Errorf("%v; want %q", err, tc.refused)
			}
		})
	}
	t.Run("process in the node's namespace", func(t *testing.T) {
		gate, err := newFileGate([]int{os.Getpid()}, os.Getpid(), nil)
		testutil.Must(t, err)
		if err := gate.check(os.Getpid()); err == nil || !strings.Contains(err.Error(), "the node's mount namespace") {
			t.Error(err)
		}
	})
}

// The kernel's mounts include those of huge pages and of io_setup(2).
func TestFileGateKnowsRareMounts(t *testing.T) {
	ids, err := kernelMounts()
	testutil.Must(t, err)
	g := &fileGate{kernel: ids}
	before := len(ids)
	testutil.Must(t, g.addRare())
	if len(g.kernel) <= before {
		t.Errorf("%d mounts, before %d", len(g.kernel), before)
	}
}
