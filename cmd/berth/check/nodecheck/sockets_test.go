package nodecheck

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// listening adds a listening process to the machine.
func (n *Node) listening(t *testing.T, pid int, name, path string) {
	t.Helper()
	dir := n.path(fmt.Sprintf("/proc/%d", pid))
	inode := 1000 + pid
	steps := []error{
		os.MkdirAll(filepath.Join(dir, "fd"), 0o755),
		os.WriteFile(filepath.Join(dir, "comm"), []byte(name+"\n"), 0o644),
		os.Symlink("/dev/null", filepath.Join(dir, "fd", "0")),
		os.Symlink(fmt.Sprintf("socket:[%d]", inode), filepath.Join(dir, "fd", fmt.Sprint(pid+len(path)))),
		os.MkdirAll(n.path("/proc/net"), 0o755),
		os.MkdirAll(n.path(filepath.Dir(path)), 0o755),
	}
	table, err := os.OpenFile(n.path("/proc/net/unix"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = fmt.Fprintf(table, "0000000000000000: 00000002 00000000 00010000 0001 01 %5d %s\n", inode, path)
		steps = append(steps, table.Close())
	}
	for _, err := range append(steps, err) {
		if err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
}

func TestSockets(t *testing.T) {
	type listens struct {
		pid        int
		name, path string
	}
	const cri, nri = "/run/berth/berth.sock", "/var/run/nri/nri.sock"
	for _, tc := range []struct {
		name    string
		who     []listens
		subject string
		level   Level
		found   string
	}{
		{"nobody", nil, "CRI socket", OK, "free"},
		{"NRI socket is free", nil, "NRI socket", OK, "free"},
		{"a daemon", []listens{{7, "berthd", cri}, {7, "berthd", nri}}, "NRI socket", OK, "berthd (pid 7)"},
		{"a daemon serves", []listens{{7, "berthd", cri}}, "CRI socket", OK, "berthd (pid 7)"},
		{"a daemon of release 0.2", []listens{{7, "berth", cri}}, "CRI socket", OK, "berth (pid 7)"},
		{"systemd for a daemon", []listens{{1, "systemd", cri}}, "CRI socket", OK, "systemd"},
		{"another runtime has the CRI socket", []listens{{7, "crio", cri}}, "CRI socket", Failure, "crio (pid 7)"},
		{"another runtime has NRI", []listens{{7, "berthd", cri}, {8, "containerd", nri}}, "NRI socket", Warning, "containerd (pid 8)"},
		{"by another name", []listens{{8, "containerd", "/run/nri/nri.sock"}}, "NRI socket", Warning, "containerd (pid 8)"},
		{"another berth has NRI", []listens{{7, "berthd", cri}, {8, "berthd", nri}}, "NRI socket", Warning, "berthd (pid 8)"},
		{"containerd", []listens{{8, "containerd", "/run/containerd/containerd.sock"}}, "other runtime", Warning, "containerd (pid 8) listens on /run/containerd/containerd.sock"},
		{"CRI-O", []listens{{8, "crio", "/var/run/crio/crio.sock"}}, "other runtime", Warning, "crio (pid 8)"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := machine(t, kernel(6, 12), map[string]string{"/proc/net/unix": "Num       RefCount Protocol Flags    Type St Inode Path\n0000000000000000: 00000003 00000000 00000000 0001 03 1 " + nri + "\n",
				"/run/x": "", "/var/x": ""})
			if err := os.Symlink("../run", n.path("/var/run")); err != nil {
				t.Fatal(err)
			}
			n.Config.Listen, n.Config.NRISocket = cri, nri
			for _, w := range tc.who {
				n.listening(t, w.pid, w.name, w.path)
			}
			findings := checkSockets(t.Context(), n)
			if f := find(t, findings, tc.subject, tc.found); f.Level != tc.level {
				t.Errorf("%s is %s, want %s: %s", f.Subject, f.Level, tc.level, f.Found)
			}
		})
	}
}

// kubelet's cAdvisor uses containerd's own socket path.
func TestSocketForCadvisor(t *testing.T) {
	const cri, containerd = "/run/berth/berth.sock", "/run/containerd/containerd.sock"
	type listens struct {
		pid        int
		name, path string
	}
	for _, tc := range []struct {
		name   string
		wanted string
		who    []listens
		level  Level
		found  string
		others bool // expect a warning about another runtime
	}{
		{"nobody", containerd, nil, OK, "free", false},
		{"the daemon", containerd, []listens{{7, "berthd", cri}, {7, "berthd", containerd}}, OK, "berthd (pid 7)", false},
		{"containerd", containerd, []listens{{8, "containerd", containerd}}, Failure, "containerd (pid 8)", false},
		{"another berth", containerd, []listens{{7, "berthd", cri}, {8, "berthd", containerd}}, Failure, "berthd (pid 8)", false},
		{"containerd elsewhere", "/run/berth/cadvisor.sock", []listens{{8, "containerd", containerd}}, OK, "free", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := machine(t, kernel(6, 12), map[string]string{"/proc/net/unix": "", "/run/x": ""})
			n.Config.Listen, n.Config.NRI, n.Config.CadvisorSocket = cri, false, tc.wanted
			for _, w := range tc.who {
				n.listening(t, w.pid, w.name, w.path)
			}
			findings := checkSockets(t.Context(), n)
			if f := find(t, findings, "cAdvisor socket", tc.found); f.Level != tc.level {
				t.Errorf("%s is %s, want %s: %s", f.Subject, f.Level, tc.level, f.Found)
			}
			if warned := slices.ContainsFunc(findings, func(f Finding) bool { return f.Subject == "other runtime" }); warned != tc.others {
				t.Errorf("warned of another runtime: %v; %+v", warned, findings)
			}
		})
	}
}

func TestSocketsWithoutNRI(t *testing.T) {
	n := machine(t, kernel(6, 12), map[string]string{"/proc/net/unix": ""})
	n.Config.NRI = false
	for _, f := range checkSockets(t.Context(), n) {
		if strings.Contains(f.Subject, "NRI") {
			t.Errorf("%+v", f)
		}
	}
}
