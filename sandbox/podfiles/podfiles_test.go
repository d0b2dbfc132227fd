package podfiles

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/sandbox/layout"
)

// shared is a pod with the node's IPC, so that no shm is mounted; it has the node's network too, if onNode.
func shared(t *testing.T, onNode bool) Pod {
	t.Helper()
	namespaces := &runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}
	if onNode {
		namespaces.Network = runtimeapi.NamespaceMode_NODE
	}
	return Pod{Dirs: layout.Dirs{Root: t.TempDir()}, ID: "p", Config: &runtimeapi.PodSandboxConfig{Hostname: "ship",
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: namespaces}}}}
}

// read returns what a file of the pod has.
func read(t *testing.T, p Pod, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(p.Dirs.PodFiles(p.ID), name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

func TestMake(t *testing.T) {
	node, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(resolvConf, []byte("nameserver 192.0.2.1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, onNode := range []bool{false, true} {
		p := shared(t, onNode)
		p.Config.LogDirectory = filepath.Join(t.TempDir(), "logs/of/pod")
		for range 2 { // an interrupted one is not in the way
			if err := p.Make(resolvConf); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.WriteHosts([]string{"10.0.0.7", "fd00::7"}); err != nil {
			t.Fatal(err)
		}
		want := "ship"
		if onNode { // it is in the node's UTS namespace
			want = node
		}
		if got := strings.TrimSpace(read(t, p, "hostname")); got != want {
			t.Errorf("on the node's network %t: hostname %q, want %q", onNode, got, want)
		}
		if got := read(t, p, "resolv.conf"); !strings.Contains(got, "192.0.2.1") {
			t.Errorf("on the node's network %t: resolv.conf is %q", onNode, got)
		}
		hosts := read(t, p, "hosts")
		if has := strings.Contains(hosts, "10.0.0.7\tship") && strings.Contains(hosts, "fd00::7\tship"); has == onNode {
			t.Errorf("on the node's network %t: hosts is %q", onNode, hosts)
		}
		if info, err := os.Stat(p.Config.LogDirectory); err != nil || !info.IsDir() {
			t.Errorf("no place for logs: %v", err)
		}
	}
}

// The node's resolv.conf may be anything: nobody waits for a FIFO, and what has no end is not read.
func TestNodesFiles(t *testing.T) {
	dir := t.TempDir()
	fifo, large := filepath.Join(dir, "fifo"), filepath.Join(dir, "large")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(large, make([]byte, 1<<20+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]codes.Code{fifo: codes.FailedPrecondition, large: codes.FailedPrecondition, dir: codes.FailedPrecondition,
		filepath.Join(dir, "none"): codes.OK, os.DevNull: codes.FailedPrecondition} {
		if err := shared(t, false).Make(path); errdefs.Code(err) != want {
			t.Errorf("%s: %v, want %v", path, err, want)
		}
	}
}

func TestWriteHostsRefusesWhatIsNoAddress(t *testing.T) {
	p := shared(t, false)
	if err := p.WriteHosts([]string{"10.0.0.7\n192.0.2.1 bank.example"}); err == nil {
		t.Error("it was written")
	}
}

// The node's resolv.conf is of interest to the pods that get it, and to no others.
func TestResolvConf(t *testing.T) {
	dir := t.TempDir()
	fifo, good := filepath.Join(dir, "fifo"), filepath.Join(dir, "good")
	if err := errors.Join(unix.Mkfifo(fifo, 0o600), os.WriteFile(good, []byte("nameserver 192.0.2.1\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
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
		got, err := Pod{Config: &runtimeapi.PodSandboxConfig{DnsConfig: tt.dns}}.resolvConf(tt.file)
		if string(got) != tt.want || errdefs.Code(err) != tt.code {
			t.Errorf("%s with %v: %q, %v", filepath.Base(tt.file), tt.dns, got, err)
		}
	}
}

func TestNodeName(t *testing.T) {
	for name, want := range map[string]string{"ship": "ship", "ship.sea": "ship.sea", "(none)": "localhost", "": "localhost", "a\n10.0.0.1 b": "localhost"} {
		if got, err := nodeName(name, nil); got != want || err != nil {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	if _, err := nodeName("", unix.EIO); err != unix.EIO {
		t.Errorf("error %v", err)
	}
}
