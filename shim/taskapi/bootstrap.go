package taskapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"berth/internal/failpoint"
)

// socketDir contains the sockets of shims that accept a directory. The path of a socket has at most
// 107 bytes, and a shim's name has 64.
const socketDir = "/run/berth/s"

// program is a shim's program.
type program struct {
	path    string
	options *anypb.Any // nil: none
}

// command returns a call of the program in a bundle, without a receiver of the shim's events.
func (p *program) command(ctx context.Context, id, bundle string, args ...string) *exec.Cmd {
	all := append([]string{"-namespace", namespace, "-address", "", "-publish-binary", "/bin/true", "-id", id}, args...)
	cmd := exec.CommandContext(ctx, p.path, all...)
	cmd.Dir = bundle
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "GOMAXPROCS=2", "MAX_SHIM_VERSION=3", "NAMESPACE=" + namespace,
		"TTRPC_ADDRESS=", "GRPC_ADDRESS=",
	}
	cmd.WaitDelay = callTimeout
	return cmd
}

// start starts the shim of a sandbox. It returns the address of its socket and the version of its
// task service. The shim inherits this process's cgroup and mount namespace. It sends its events to
// the socket events; empty: to nobody.
func (p *program) start(ctx context.Context, id, bundle, events string) (address string, version int32, err error) {
	dir := socketDir
	params := &bootapi.BootstrapParams{
		InstanceID: id, Namespace: namespace, ContainerdVersion: "2.4.0", ContainerdBinary: "/bin/true",
		SocketDir: &dir, ContainerdTtrpcAddress: events,
	}
	if p.options != nil {
		params.Extensions = []*bootapi.Extension{{Value: p.options}}
	}
	input, err := proto.Marshal(params)
	if err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, createTimeout)
	defer cancel()
	cmd := p.command(ctx, id, bundle, "start")
	cmd.Env = append(cmd.Env, "TTRPC_ADDRESS="+events)
	cmd.Stdin = bytes.NewReader(input)
	var said bytes.Buffer
	cmd.Stderr = &said
	failpoint.Reach("task.start-shim")
	answer, err := cmd.Output()
	failpoint.Reach("task.shim-started")
	if err != nil {
		return "", 0, p.failure("start", said.String(), err)
	}
	return parseAnswer(answer)
}

// parseAnswer reads what a shim answers to start: a protobuf message, JSON, or a bare address,
// which is that of a version 2.
func parseAnswer(answer []byte) (address string, version int32, err error) {
	var result bootapi.BootstrapResult
	if proto.Unmarshal(answer, &result) != nil || !isAddress(result.Address) {
		result.Reset()
		if json.Unmarshal(answer, &result) != nil {
			result.Version, result.Address = 2, strings.TrimSpace(string(answer))
		}
	}
	switch {
	case !isAddress(result.Address):
		return "", 0, fmt.Errorf("the shim's answer to start has no address: %.200q", answer)
	case result.Protocol != "ttrpc" && result.Protocol != "":
		return "", 0, fmt.Errorf("the shim speaks %q; only ttrpc is supported", result.Protocol)
	case result.Version != 2 && result.Version != 3:
		return "", 0, fmt.Errorf("the shim has version %d of the task service; 2 and 3 are supported", result.Version)
	}
	return result.Address, result.Version, nil
}

// isAddress refuses abstract sockets, to which pods on the host's network can connect.
func isAddress(text string) bool {
	return strings.HasPrefix(text, "unix:///") || strings.HasPrefix(text, "/")
}

// delete calls the shim's own command delete, which removes what a dead shim has left.
func (p *program) delete(ctx context.Context, id, bundle string) error {
	ctx, cancel := context.WithTimeout(ctx, deleteTimeout)
	defer cancel()
	cmd := p.command(ctx, id, bundle, "-bundle", bundle, "delete")
	var said bytes.Buffer
	cmd.Stderr = &said
	failpoint.Reach("task.run-delete")
	err := cmd.Run()
	failpoint.Reach("task.delete-ran")
	if err != nil {
		return p.failure("delete", said.String(), err)
	}
	return nil
}

// info asks the program for its version and features. An old program has no such option.
func (p *program) info(ctx context.Context) (*types.RuntimeInfo, error) {
	cmd := exec.CommandContext(ctx, p.path, "-info")
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "NAMESPACE=" + namespace}
	if p.options != nil {
		input, err := proto.Marshal(p.options)
		if err != nil {
			return nil, err
		}
		cmd.Stdin = bytes.NewReader(input)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	answer, err := cmd.Output()
	if err != nil {
		return nil, p.failure("-info", said.String(), err)
	}
	var info types.RuntimeInfo
	if err := proto.Unmarshal(answer, &info); err != nil {
		return nil, p.failure("-info", "its answer is no message RuntimeInfo", err)
	}
	return &info, nil
}

// maxMessage bounds what a shim said in an error, in bytes.
const maxMessage = 4 << 10

func (p *program) failure(what, said string, err error) error {
	said = strings.TrimSpace(said)
	if len(said) > maxMessage {
		said = "… " + strings.ToValidUTF8(said[len(said)-maxMessage:], "")
	}
	if said == "" {
		return fmt.Errorf("%s %s: %w", filepath.Base(p.path), what, err)
	}
	return fmt.Errorf("%s %s: %s: %w", filepath.Base(p.path), what, said, err)
}

// removeSocket removes the socket at path. Anything else there is not removed.
func removeSocket(path string) error {
	if info, err := os.Lstat(path); err != nil || info.Mode().Type() != os.ModeSocket {
		return nil
	}
	failpoint.Reach("task.remove-socket")
	err := unix.Unlink(path)
	failpoint.Reach("task.socket-removed")
	if err != nil && err != unix.ENOENT {
		return &os.PathError{Op: "remove socket", Path: path, Err: err}
	}
	return nil
}

// shimLog is the FIFO in a bundle to which a shim writes its log. A shim waits until somebody
// reads it. After create nobody does, and the shim drops its messages.
type shimLog struct {
	file    *os.File
	reading sync.WaitGroup
	last    []byte // at most maxMessage bytes; valid when reading has ended
}

const shimLogFile = "log"

func openShimLog(bundle string) (*shimLog, error) {
	path := filepath.Join(bundle, shimLogFile)
	if err := makeFIFO(path); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	l := &shimLog{file: f}
	l.reading.Go(l.read)
	return l, nil
}

// read keeps the end of the log, so that the shim can always write.
func (l *shimLog) read() {
	text := make([]byte, 4<<10)
	for {
		n, err := l.file.Read(text)
		if l.last = append(l.last, text[:n]...); len(l.last) > maxMessage {
			l.last = l.last[len(l.last)-maxMessage:]
		}
		if err != nil { // closed
			return
		}
	}
}

// explain adds the last messages of the shim to an error, and closes the log.
func (l *shimLog) explain(err *error) {
	closeErr := l.file.Close()
	l.reading.Wait()
	if text := strings.TrimSpace(strings.ToValidUTF8(string(l.last), "")); *err != nil && text != "" {
		*err = fmt.Errorf("%w; the shim's log: %s", *err, text)
	}
	*err = errors.Join(*err, closeErr)
}

func makeFIFO(path string) error {
	if err := unix.Mkfifo(path, 0o600); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkfifo", Path: path, Err: err}
	}
	return nil
}
