package podenv

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/testutil"
	"berth/internal/userns"
	"berth/sandbox/state"
)

// shared returns the files of a pod with the node's IPC namespace, and with the node's network if
// onNode. The test's cleanup removes its tmpfs.
func shared(t *testing.T, onNode bool) files {
	t.Helper()
	namespaces := &runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}
	if onNode {
		namespaces.Network = runtimeapi.NamespaceMode_NODE
	}
	return podOf(t, namespaces)
}

// podOf returns the files of a pod with these namespaces. The test's cleanup removes its tmpfs.
func podOf(t *testing.T, namespaces *runtimeapi.NamespaceOption) files {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root mounts the tmpfs of a pod")
	}
	p := files{&state.PodSpec{ID: "p", Config: &runtimeapi.PodSandboxConfig{Hostname: "ship",
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: namespaces}}}},
		state.Dirs{Root: t.TempDir(), State: t.TempDir()}, slog.New(slog.DiscardHandler)}
	t.Cleanup(func() {
		for range 2 { // unmountTmpfs may be repeated
			if err := unmountTmpfs(p.Dirs, p.ID); err != nil {
				t.Error(err)
			}
		}
		if _, err := os.Stat(p.Dirs.PodMounts(p.ID)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("left: %v", err)
		}
	})
	return p
}

// read returns the content of a file of the pod.
func read(t *testing.T, p files, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(p.Dirs.Etc(p.ID), name))
	testutil.Must(t, err)
	return string(content)
}

func TestMakeFiles(t *testing.T) {
	t.Parallel()
	node, err := os.Hostname()
	testutil.Must(t, err)
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	testutil.Must(t, os.WriteFile(resolvConf, []byte("nameserver 192.0.2.1\n"), 0o600))
	for _, onNode := range []bool{false, true} {
		t.Run(fmt.Sprintf("node network %t", onNode), func(t *testing.T) {
			p := shared(t, onNode)
			p.Config.LogDirectory = filepath.Join(t.TempDir(), "logs/of/pod")
			testutil.Must(t, p.make(func() string { return resolvConf }))
			testutil.Must(t, p.writeHosts([]string{"10.0.0.7", "fd00::7"}))
			want := "ship"
			if onNode { // the pod shares the node's UTS namespace
				want = node
			}
			if got := strings.TrimSpace(read(t, p, "hostname")); got != want {
				t.Errorf("hostname %q, want %q", got, want)
			}
			if got := read(t, p, "resolv.conf"); !strings.Contains(got, "192.0.2.1") {
				t.Errorf("resolv.conf is %q", got)
			}
			hosts := read(t, p, "hosts")
			if has := strings.Contains(hosts, "10.0.0.7\tship") && strings.Contains(hosts, "fd00::7\tship"); has == onNode {
				t.Errorf("hosts is %q", hosts)
			}
			if info, err := os.Stat(p.Config.LogDirectory); err != nil || !info.IsDir() {
				t.Errorf("log directory: %v", err)
			}
		})
	}
}

// The tmpfs limits the bytes that containers write to the pod's files, so they cannot fill the
// disk.
func TestFilesAreBounded(t *testing.T) {
	t.Parallel()
	users := []specs.LinuxIDMapping{{HostID: 65536, Size: 65536}}
	for name, c := range map[string]struct {
		namespaces *runtimeapi.NamespaceOption
		mappings   *userns.Mappings
		size       int
		owner      uint32
		shm        bool
	}{
		"usual":          {nil, nil, shmSize, 0, true},
		"node's IPC":     {&runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}, nil, etcSize, 0, false},
		"user namespace": {nil, &userns.Mappings{UIDs: users, GIDs: users}, shmSize, 65536, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := podOf(t, c.namespaces)
			p.Mappings = c.mappings
			testutil.Must(t, errors.Join(p.make(func() string { return "/none" }), p.writeHosts(nil)))
			for _, name := range []string{"hosts", "hostname", "resolv.conf"} {
				var st unix.Stat_t
				if err := unix.Stat(filepath.Join(p.Dirs.Etc(p.ID), name), &st); err != nil || st.Uid != c.owner || st.Gid != c.owner || st.Mode&0o777 != 0o644 {
					t.Errorf("%s: %v, owner %d:%d, mode %o", name, err, st.Uid, st.Gid, st.Mode)
				}
			}
			var st unix.Stat_t
			if err := unix.Stat(p.Dirs.Shm(p.ID), &st); (err == nil) != c.shm || c.shm && (st.Uid != c.owner || st.Mode&0o7777 != 0o1777) {
				t.Errorf("/dev/shm: %v, owner %d, mode %o", err, st.Uid, st.Mode)
			}
			f, err := os.OpenFile(filepath.Join(p.Dirs.Etc(p.ID), "hosts"), os.O_WRONLY|os.O_APPEND, 0)
			testutil.Must(t, err)
			defer f.Close()
			written, chunk := 0, make([]byte, 1<<20)
			for err == nil && written <= shmSize {
				var n int
				n, err = f.Write(chunk)
				written += n
			}
			if !errors.Is(err, unix.ENOSPC) || written > c.size {
				t.Errorf("%d bytes were written: %v", written, err)
			}
		})
	}
}

// The node's resolv.conf may be any kind of file. A FIFO does not block, an endless file is not
// read.
func TestUnusualResolvConfOfNode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fifo, large := filepath.Join(dir, "fifo"), filepath.Join(dir, "large")
	testutil.Must(t, unix.Mkfifo(fifo, 0o600))
	testutil.Must(t, os.WriteFile(large, make([]byte, 1<<20+1), 0o600))
	for path, want := range map[string]codes.Code{fifo: codes.FailedPrecondition, large: codes.FailedPrecondition, dir: codes.FailedPrecondition,
		filepath.Join(dir, "none"): codes.OK, os.DevNull: codes.FailedPrecondition} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			if err := shared(t, false).make(func() string { return path }); errdefs.Code(err) != want {
				t.Errorf("%v, want %v", err, want)
			}
		})
	}
}

func TestWriteHostsRefusesInvalidAddress(t *testing.T) {
	t.Parallel()
	p := shared(t, false)
	if err := p.writeHosts([]string{"10.0.0.7\n192.0.2.1 bank.example"}); err == nil {
		t.Error("it was written")
	}
}

// A bad resolv.conf of the node fails only the pods that use it.
func TestResolvConfOfPod(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fifo, good := filepath.Join(dir, "fifo"), filepath.Join(dir, "good")
	testutil.Must(t, errors.Join(unix.Mkfifo(fifo, 0o600), os.WriteFile(good, []byte("nameserver 192.0.2.1\n"), 0o600)))
	own := &runtimeapi.DNSConfig{Servers: []string{"192.0.2.2"}}
	for _, tt := range []struct {
		file string
		dns  *runtimeapi.DNSConfig
		want string
		code codes.Code
	}{
		{good, nil, "nameserver 192.0.2.1\n", codes.OK},
		{good, own, "nameserver 192.0.2.2\n", codes.OK},
		{fifo, own, "nameserver 192.0.2.2\n", codes.OK},
		{fifo, &runtimeapi.DNSConfig{}, "", codes.FailedPrecondition},
	} {
		t.Run(fmt.Sprintf("%s with %v", filepath.Base(tt.file), tt.dns), func(t *testing.T) {
			got, err := files{PodSpec: &state.PodSpec{Config: &runtimeapi.PodSandboxConfig{DnsConfig: tt.dns}}}.resolvConf(func() string { return tt.file })
			if string(got) != tt.want || errdefs.Code(err) != tt.code {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
}

func TestNodeName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"ship": "ship", "ship.sea": "ship.sea", "(none)": "localhost", "": "localhost", "a\n10.0.0.1 b": "localhost"} {
		t.Run(name, func(t *testing.T) {
			if got, err := nodeName(name, nil); got != want || err != nil {
				t.Errorf("%q, %v", got, err)
			}
		})
	}
	if _, err := nodeName("", unix.EIO); err != unix.EIO {
		t.Errorf("error %v", err)
	}
}
