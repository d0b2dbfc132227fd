// Package kata is the other side of Kata's shim in tests: a remote hypervisor and its agents. It
// starts no virtual machine. An agent runs containers with runc, on the node, in the shim's mounts,
// which a virtual machine would get by virtio-fs, and in the pod's network namespace.
//
// The protocols are Kata's hypervisor.Hypervisor, grpc.AgentService and grpc.Health. Methods that
// tests do not need answer Unimplemented.
package kata

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// HypervisorSocket is the name of the hypervisor's socket in its directory.
const HypervisorSocket = "h"

// MemoryFile is the file in the hypervisor's directory with the memory that a shim has requested
// for the newest virtual machine, in MiB.
const MemoryFile = "memory"

// HangSignal makes all agents of a hypervisor hang: they accept requests, and never answer again.
const HangSignal = syscall.SIGUSR1

// hypervisor makes virtual machines, each with one agent.
type hypervisor struct {
	dir, runc string
	hung      atomic.Bool

	mu  sync.Mutex // guards vms
	vms map[string]*vm
}

// Serve serves a hypervisor in dir, whose path is short, until SIGTERM. It becomes the parent of
// all containers.
func Serve(dir, runc string) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("become subreaper", err)
	}
	h := &hypervisor{dir: dir, runc: runc, vms: map[string]*vm{}}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, HangSignal, syscall.SIGTERM)
	go func() {
		for s := <-signals; s != syscall.SIGTERM; s = <-signals {
			h.hung.Store(true)
		}
		h.stopAll()
		os.Exit(0)
	}()
	if err := serveSyslog(); err != nil {
		return err
	}
	listener, err := net.Listen("unix", filepath.Join(dir, HypervisorSocket))
	if err != nil {
		return err
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return err
	}
	server.Register("hypervisor.Hypervisor", map[string]ttrpc.Method{
		"CreateVM": method(vmFields, h.createVM),
		"StartVM":  method(vmFields, nothing),
		"StopVM":   method(vmFields, h.stopVM),
	})
	return server.Serve(context.Background(), listener)
}

// serveSyslog prints the errors that shims log to the system. Kata's shim does not start without
// syslog.
func serveSyslog() error {
	const path = "/var/run/log"
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return err
	}
	go func() {
		message := make([]byte, 64<<10)
		for {
			n, err := conn.Read(message)
			if err != nil {
				return
			}
			if bytes.Contains(message[:n], []byte("level=error")) || os.Getenv("BERTH_KATA_DEBUG") != "" {
				fmt.Fprintf(os.Stderr, "%s\n", message[:n])
			}
		}
	}()
	return nil
}

// serving answers a health check.
func serving(context.Context, *request) ([]byte, error) { return appendNumber(nil, 1, 1), nil }

func nothing(context.Context, *request) ([]byte, error) { return nil, nil }

func (h *hypervisor) createVM(_ context.Context, r *request) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := &vm{hypervisor: h, id: r.ID, dir: filepath.Join(h.dir, r.ID[:8]), netns: r.NetNS}
	v.processes = map[string]*process{}
	if err := os.Mkdir(v.dir, 0o700); err != nil {
		return nil, err
	}
	size := r.Annotations["io.katacontainers.config.hypervisor.default_memory"]
	if err := os.WriteFile(filepath.Join(h.dir, MemoryFile), []byte(size), 0o600); err != nil {
		return nil, err
	}
	socket := filepath.Join(v.dir, "agent")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	if v.server, err = ttrpc.NewServer(ttrpc.WithServerHandshaker(v)); err != nil {
		return nil, err
	}
	v.server.Register("grpc.Health", map[string]ttrpc.Method{"Check": v.method(fields{}, serving)})
	v.server.Register("grpc.AgentService", v.methods())
	go v.server.Serve(context.Background(), listener) // until stop
	h.vms[r.ID] = v
	return appendBytes(nil, 1, []byte(socket)), nil
}

func (h *hypervisor) stopVM(_ context.Context, r *request) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.vms[r.ID]
	if v == nil {
		return nil, nil
	}
	delete(h.vms, r.ID)
	err := v.stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "stop virtual machine", r.ID, err)
	}
	return nil, err
}

func (h *hypervisor) stopAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, v := range h.vms {
		if err := v.stop(); err != nil {
			fmt.Fprintln(os.Stderr, "stop virtual machine", id, err)
		}
	}
}

// vm stands for a virtual machine and its agent.
type vm struct {
	*hypervisor
	id, dir, netns string
	server         *ttrpc.Server
	shim           atomic.Int64 // the process that has called the agent first
	hostname       string       // after CreateSandbox

	mu        sync.Mutex          // guards processes
	processes map[string]*process // by container and exec ID
}

// Handshake finds the shim, whose mounts the containers use.
func (v *vm) Handshake(_ context.Context, conn net.Conn) (net.Conn, any, error) {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var peer *unix.Ucred
	var callErr error
	err = raw.Control(func(fd uintptr) {
		peer, callErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err := errors.Join(err, callErr); err != nil {
		return nil, nil, err
	}
	v.shim.CompareAndSwap(0, int64(peer.Pid))
	return conn, nil, nil
}

// method is a method of the agent. It does not answer if the agent hangs.
func (v *vm) method(f fields, do func(context.Context, *request) ([]byte, error)) ttrpc.Method {
	return method(f, func(ctx context.Context, r *request) ([]byte, error) {
		if v.hung.Load() {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		answer, err := do(ctx, r)
		if v.hung.Load() {
			<-ctx.Done()
		}
		if _, isStatus := status.FromError(err); !isStatus {
			err = status.Error(codes.Internal, err.Error())
		}
		return answer, err
	})
}

func (v *vm) methods() map[string]ttrpc.Method {
	return map[string]ttrpc.Method{
		"CreateSandbox":    v.method(sandboxFields, v.createSandbox),
		"DestroySandbox":   v.method(fields{}, nothing),
		"GetGuestDetails":  v.method(fields{}, nothing),
		"SetGuestDateTime": v.method(fields{}, nothing),
		"OnlineCPUMem":     v.method(fields{}, nothing),
		"CopyFile":         v.method(copyFields, copyFile),
		"CreateContainer":  v.method(createFields, v.createContainer),
		"StartContainer":   v.method(processIDs, v.startContainer),
		"RemoveContainer":  v.method(processIDs, v.removeContainer),
		"UpdateContainer":  v.method(updateFields, v.updateContainer),
		"StatsContainer":   v.method(processIDs, v.stats),
		"GetOOMEvent":      v.method(fields{}, v.awaitOOM),
		"ExecProcess":      v.method(execFields, v.execProcess),
		"SignalProcess":    v.method(signalFields, v.signalProcess),
		"WaitProcess":      v.method(processIDs, v.waitProcess),
		"WriteStdin":       v.method(writeFields, v.writeStdin),
		"CloseStdin":       v.method(processIDs, v.closeStdin),
		"ReadStdout":       v.method(readFields, v.readStdout),
		"ReadStderr":       v.method(readFields, v.readStderr),
		"TtyWinResize":     v.method(winsizeFields, v.resizeTerminal),
	}
}

func (v *vm) createSandbox(_ context.Context, r *request) ([]byte, error) {
	v.hostname = r.Hostname
	return nil, nil
}

// stop kills the containers, as the end of a virtual machine does.
func (v *vm) stop() error {
	v.mu.Lock()
	var ids []string
	for key, p := range v.processes {
		if key == p.container+"/"+p.container {
			ids = append(ids, p.container)
		}
	}
	v.mu.Unlock()
	err := v.server.Close()
	for _, id := range ids {
		_, removeErr := v.removeContainer(context.Background(), &request{ContainerID: id})
		err = errors.Join(err, removeErr)
	}
	// A container that was half made has no process.
	left, globErr := filepath.Glob(filepath.Join(v.dir, "runc", "*"))
	err = errors.Join(err, globErr)
	for _, dir := range left {
		err = errors.Join(err, v.call(nil, "delete", "--force", filepath.Base(dir)))
	}
	return errors.Join(err, os.RemoveAll(v.dir))
}

// copyFile makes a file, a directory or a symbolic link of the guest, or continues a file.
func copyFile(_ context.Context, r *request) ([]byte, error) {
	if err := os.MkdirAll(filepath.Dir(r.Path), 0o755); err != nil {
		return nil, err
	}
	switch r.FileMode & unix.S_IFMT {
	case unix.S_IFDIR:
		return nil, os.MkdirAll(r.Path, os.FileMode(r.FileMode&0o777))
	case unix.S_IFLNK:
		return nil, os.Symlink(string(r.Data), r.Path)
	}
	f, err := os.OpenFile(r.Path, os.O_WRONLY|os.O_CREATE, os.FileMode(r.FileMode&0o777))
	if err != nil {
		return nil, err
	}
	_, err = f.WriteAt(r.Data, r.Offset)
	return nil, errors.Join(err, f.Chown(r.UID, r.GID), f.Close())
}

func writeJSON(path string, content any) error {
	document, err := json.Marshal(content)
	if err != nil {
		return err
	}
	return os.WriteFile(path, document, 0o600)
}
