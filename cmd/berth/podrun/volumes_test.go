package podrun

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"berth/cmd/berth/client/clienttest"
	"berth/cmd/berth/podyaml"
	"berth/internal/testutil"
)

// inMountNamespace runs the rest of a test in a process with its own mount namespace, so that its
// mounts are invisible to the machine. It returns true in that process.
func inMountNamespace(t *testing.T) bool {
	t.Helper()
	const mark = "BERTH_TEST_MOUNT_NAMESPACE"
	if os.Getenv(mark) == t.Name() {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Fatal(err)
		}
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), mark+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Errorf("in a mount namespace: %v\n%s", err, out)
	}
	return false
}

// makePod creates the files of a pod with the given spec.
func makePod(t *testing.T, dir, spec string) *files {
	t.Helper()
	m, err := podyaml.Parse([]byte(manifest(spec)))
	if err != nil {
		t.Fatal(err)
	}
	pod := m.Pods[0]
	f, err := makeFiles(dir, newUID(), pod)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.makeVolumes(); err != nil {
		t.Fatal(err)
	}
	return f
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEmptyDirs(t *testing.T) {
	testutil.NeedRoot(t)
	if !inMountNamespace(t) {
		return
	}
	parent := t.TempDir()
	f := makePod(t, parent, `
securityContext: {fsGroup: 1234}
volumes:
- {name: plain, emptyDir: {}}
- {name: memory, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
containers: [`+container("main")+`]`)
	for name, mode := range map[string]uint32{"plain": 0o2777, "memory": 0o2777} {
		var st unix.Stat_t
		if err := unix.Stat(f.volumeDir(name), &st); err != nil {
			t.Fatal(err)
		}
		if st.Mode&0o7777 != mode || st.Gid != 1234 {
			t.Errorf("%s: mode %#o, group %d", name, st.Mode&0o7777, st.Gid)
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(f.volumeDir("memory"), &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type != unix.TMPFS_MAGIC || int64(fs.Blocks)*fs.Bsize != 1<<20 {
		t.Errorf("memory: filesystem %#x of %d bytes", fs.Type, int64(fs.Blocks)*fs.Bsize)
	}
	write(t, filepath.Join(f.volumeDir("memory"), "file"), "x")
	checkRemoved(t, f, parent)
}

// checkRemoved removes the files and checks that nothing is left.
func checkRemoved(t *testing.T, f *files, parent string) {
	t.Helper()
	if err := f.remove(); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(parent); err != nil || len(entries) > 0 {
		t.Errorf("left: %v, %v", entries, err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(parent))
	if err != nil || len(mounts) > 0 {
		t.Errorf("mounts left: %v, %v", mounts, err)
	}
}

// show lists a directory or reads a file.
func show(t *testing.T, path string) string {
	t.Helper()
	entries, err := os.ReadDir(path)
	if err != nil {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return strings.Join(names, " ")
}

// A foreign mount in a volume, for example of a Bidirectional container, must be unmounted and not
// emptied.
func TestRemoveDoesNotEnterMounts(t *testing.T) {
	testutil.NeedRoot(t)
	if !inMountNamespace(t) {
		return
	}
	parent, precious := t.TempDir(), t.TempDir()
	write(t, filepath.Join(precious, "file"), "x")
	f := makePod(t, parent, "volumes: [{name: v, emptyDir: {}}]\ncontainers: ["+container("main")+"]")
	at := filepath.Join(f.volumeDir("v"), "mounted")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 { // stacked
		if err := unix.Mount(precious, at, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
	}
	checkRemoved(t, f, parent)
	if _, err := os.Stat(filepath.Join(precious, "file")); err != nil {
		t.Error(err)
	}
}

func TestHostPaths(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, "")
	tests := []struct{ path, kind, err string }{
		{dir, "", ""}, {dir, "Directory", ""}, {file, "File", ""}, {"/dev/null", "CharDevice", ""},
		{filepath.Join(dir, "a/b"), "DirectoryOrCreate", ""}, {filepath.Join(dir, "a/b"), "DirectoryOrCreate", ""},
		{filepath.Join(dir, "new"), "FileOrCreate", ""}, {filepath.Join(dir, "new"), "FileOrCreate", ""},
		{filepath.Join(dir, "none"), "", "does not exist"}, {filepath.Join(dir, "none"), "Directory", "does not exist"},
		{filepath.Join(dir, "none/new"), "FileOrCreate", "create hostPath"},
		{file, "Directory", "not of type Directory"}, {file, "DirectoryOrCreate", "not of type"}, {dir, "File", "not of type"},
		{dir, "FileOrCreate", "not of type"}, {file, "Socket", "not of type"}, {"/dev/null", "BlockDevice", "not of type"},
	}
	for i, test := range tests {
		t.Run(strconv.Itoa(i)+test.kind, func(t *testing.T) {
			m, err := podyaml.Parse([]byte(manifest("volumes: [{name: v, hostPath: {path: '" + test.path + "', type: '" + test.kind + "'}}]\n" +
				"containers: [" + container("main") + "]")))
			if err != nil {
				t.Fatal(err)
			}
			err = ensureHostPath(m.Pods[0].Spec.Volumes[0].HostPath)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("%s %s: %v, want %q", test.path, test.kind, err, test.err)
			}
		})
	}
}

func TestRunHandsOverHostsAndVolumes(t *testing.T) {
	testutil.NeedRoot(t)
	if !inMountNamespace(t) {
		return
	}
	b := newBench(t, &clienttest.Server{Programs: map[string]clienttest.Program{"main": {Exits: []int32{0}}}})
	b.config.Host = podyaml.Host{}
	var hosts string
	b.Hook = func(_ context.Context, call string) error {
		if call == "StartContainer main/0" {
			for _, m := range b.Configs()[0].GetMounts() {
				hosts += m.GetContainerPath() + ":" + show(t, m.GetHostPath()) + ";"
			}
		}
		return nil
	}
	_, err := b.run(t.Context(), t.Context(), "restartPolicy: Never\n"+
		"volumes: [{name: v, emptyDir: {medium: Memory}}]\ncontainers: [{name: main, image: '"+image+"', volumeMounts: [{name: v, mountPath: /v}]}]")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(hosts, "/v:;/etc/hosts:") || !strings.Contains(hosts, "10.0.0.2\tweb\nfd00::2\tweb\n") {
		t.Errorf("mounts show %q", hosts)
	}
	b.checkNothingLeft()
}
