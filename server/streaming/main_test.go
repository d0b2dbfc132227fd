package streaming

import (
	"os"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/klog/v2"

	"berth/server/sessions/wire"
)

// TestMain discards the log of the Kubernetes libraries: they log each connection that fails.
func TestMain(m *testing.M) {
	klog.SetLogger(klog.Logger{})
	os.Exit(m.Run())
}

// Exec, Attach and PortForward offer the sessions of requests.
func (s *Server) Exec(r *runtimeapi.ExecRequest) (string, error) {
	return s.Offer(wire.Session{Kind: wire.Exec, Command: r.Cmd, TTY: r.Tty, Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr})
}

func (s *Server) Attach(r *runtimeapi.AttachRequest) (string, error) {
	return s.Offer(wire.Session{Kind: wire.Attach, TTY: r.Tty, Stdin: r.Stdin, Stdout: r.Stdout, Stderr: r.Stderr})
}

func (s *Server) PortForward(r *runtimeapi.PortForwardRequest) (string, error) {
	return s.Offer(wire.Session{Kind: wire.PortForward, ID: r.PodSandboxId, Ports: r.Port})
}
