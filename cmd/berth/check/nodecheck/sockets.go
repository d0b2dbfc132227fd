package nodecheck

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"berth/cmd/node"
)

// otherRuntimes are the CRI sockets of other runtimes.
var otherRuntimes = []string{
	"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/cri-dockerd.sock", "/run/k3s/containerd/containerd.sock",
}

// process is a process that listens on a socket.
type process struct {
	pid  int
	name string // at most 15 bytes, as the kernel stores it
}

func (p process) String() string { return fmt.Sprintf("%s (pid %d)", p.name, p.pid) }

// checkSockets finds the processes that listen on the daemon's sockets and on other runtimes'
// sockets. It reads /proc and does not connect, because a runtime would
// mistake a connection to its NRI socket for a plugin.
func checkSockets(_ context.Context, n *Node) []Finding {
	listening, err := n.listeners()
	if err != nil {
		return []Finding{lacking(Warning, "sockets", err.Error(), "mount /proc, and run berth check as root")}
	}
	own := n.listenersAt(listening, n.Config.Listen)
	findings := []Finding{checkSocket(n.Config.Listen, own)}
	if n.Config.NRI && n.Config.NRISocket != "" {
		const fix = "set nri.socket to another path, or restart berth when the other runtime has stopped: until then no NRI plugin can connect"
		nri := n.Config.NRISocket
		findings = append(findings, checkOwnSocket("NRI socket", nri, Warning, fix, n.listenersAt(listening, nri), own))
	}
	cadvisor := n.Config.CadvisorSocket
	if cadvisor != "" {
		const fix = "stop it, or remove cadvisor_socket: berth does not start while another process serves there"
		findings = append(findings,
			checkOwnSocket("cAdvisor socket", cadvisor, Failure, fix, n.listenersAt(listening, cadvisor), own))
	}
	for _, path := range otherRuntimes {
		others := n.listenersAt(listening, path)
		if len(others) > 0 && path != n.Config.Listen && (cadvisor == "" || n.resolved(path) != n.resolved(cadvisor)) {
			findings = append(findings, lacking(
				Warning,
				"other runtime",
				fmt.Sprintf("%s listens on %s", others[0], path),
				fmt.Sprintf(
					"have kubelet use one: containerRuntimeEndpoint: unix://%s; stop the other unless something needs it, because neither sees the other's pods",
					n.Config.Listen,
				),
			))
		}
	}
	return findings
}

// checkSocket judges the owner of the CRI socket. systemd may own it for the daemon.
func checkSocket(path string, listeners []process) Finding {
	const subject = "CRI socket"
	if len(listeners) == 0 {
		return ok(subject, "%s is free", path)
	}
	if i := slices.IndexFunc(listeners, func(p process) bool { return node.IsDaemon(p.name) }); i >= 0 {
		return ok(subject, "%s serves on %s", listeners[i], path)
	}
	if listeners[0].pid == 1 {
		return ok(subject, "%s has %s for the daemon", listeners[0], path)
	}
	return lacking(Failure, subject, fmt.Sprintf("%s listens on %s", listeners[0], path),
		"stop it, or set listen to another path, and containerRuntimeEndpoint for kubelet")
}

// checkOwnSocket judges the owner of another socket of the daemon. Only the daemon with the CRI
// socket may own it. level and fix are for a finding about another owner.
func checkOwnSocket(subject, path string, level Level, fix string, listeners, daemon []process) Finding {
	if len(listeners) == 0 {
		return ok(subject, "%s is free", path)
	}
	if slices.ContainsFunc(listeners, func(p process) bool { return slices.Contains(daemon, p) }) {
		return ok(subject, "%s has %s", listeners[0], path)
	}
	return lacking(level, subject, fmt.Sprintf("%s listens on %s", listeners[0], path), fix)
}

// listener is a listening unix socket with a path.
type listener struct{ path, inode string }

// listeners lists the listening sockets of this network namespace.
func (n *Node) listeners() ([]listener, error) {
	f, err := os.Open(n.path("/proc/net/unix"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const (
		flags, inode, path = 3, 6, 7
		listens            = "00010000" // __SO_ACCEPTCON
	)
	var all []listener
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) > path && fields[flags] == listens {
			all = append(all, listener{path: strings.Join(fields[path:], " "), inode: fields[inode]})
		}
	}
	return all, lines.Err()
}

// listenersAt returns the processes that listen at a path. It resolves links in the sockets' paths.
func (n *Node) listenersAt(all []listener, path string) []process {
	var found []process
	for _, l := range all {
		if n.resolved(l.path) == n.resolved(path) {
			found = append(found, n.owners(l.inode)...)
		}
	}
	return found
}

func (n *Node) resolved(path string) string {
	dir, err := filepath.EvalSymlinks(n.path(filepath.Dir(path)))
	if err != nil { // the directory does not exist
		return path
	}
	return filepath.Join(dir, filepath.Base(path))
}

// owners returns the processes that have a socket open.
func (n *Node) owners(inode string) []process {
	var found []process
	forEachName(n.path("/proc"), func(name string) bool {
		pid, err := strconv.Atoi(name)
		if err != nil || !n.holds(pid, "socket:["+inode+"]") {
			return true
		}
		comm, err := os.ReadFile(n.path(fmt.Sprintf("/proc/%d/comm", pid))) // at most 64 bytes
		if p := (process{pid: pid, name: strings.TrimSpace(string(comm))}); err == nil {
			found = append(found, p)
		}
		return true
	})
	return found
}

// holds reports whether a process has a file open whose link in /proc reads file.
func (n *Node) holds(pid int, file string) (held bool) {
	dir := n.path(fmt.Sprintf("/proc/%d/fd", pid))
	forEachName(dir, func(name string) bool {
		target, err := os.Readlink(filepath.Join(dir, name))
		held = err == nil && target == file
		return !held
	})
	return held
}

// forEachName calls do with each name in a directory until do returns false. It reads few names at
// a time, because a process may have a million descriptors.
func forEachName(dir string, do func(name string) bool) {
	f, err := os.Open(dir)
	if err != nil {
		return // the process is gone
	}
	defer f.Close()
	for {
		names, err := f.Readdirnames(256)
		for _, name := range names {
			if !do(name) {
				return
			}
		}
		if err != nil { // the end, or the process is gone
			return
		}
	}
}
