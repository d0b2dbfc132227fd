package cni

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// FuzzFailure checks that the error of a failed plugin is one bounded line with a known code.
func FuzzFailure(f *testing.F) {
	failed := exec.Command("false").Run() // a real *exec.ExitError
	f.Add("ADD", []byte(`{"cniVersion":"1.0.0","code":11,"msg":"no address\nleft","details":"`+strings.Repeat("é", 600)+`"}`), []byte("oops\x1b[2J"))
	f.Add("DEL", []byte(`{"code":3,"msg":"unknown"}`), []byte{})
	f.Add("GC", []byte(`{"code":4,"msg":"unknown CNI_COMMAND: GC"}`), []byte{})
	f.Add("ADD", []byte(`{"code":-1}`), []byte("\xff\xfe"))
	f.Fuzz(func(t *testing.T, verb string, stdout, stderr []byte) {
		run := &pluginRun{path: "/opt/cni/bin/plugin", verb: verb, stdout: stdout, printed: len(stdout), stderr: stderr}
		out, err := run.outcome(context.Background(), failed)
		if err == nil {
			if verb != "DEL" || out != nil {
				t.Fatalf("%s failed but is reported as a success: %q", verb, out)
			}
			return
		}
		if text := err.Error(); len(text) > 4*maxExcerpt+4*maxExcerpt+500 || strings.ContainsAny(text, "\n\r\x00\x1b") || !strings.Contains(text, "plugin") {
			t.Fatalf("%d bytes: %q", len(text), text)
		}
		if errors.Is(err, errVerbUnknown) {
			return
		}
		switch errdefs.Code(err) {
		case codes.Unavailable, codes.FailedPrecondition, codes.Internal:
		default:
			t.Fatalf("code %v: %v", errdefs.Code(err), err)
		}
		if _, ok := errors.AsType[*types.Error](err); !ok {
			t.Fatalf("no CNI error in %v", err)
		}
	})
}

// FuzzPod checks that a translated pod adds no CNI argument, and that ports and rates are in
// bounds.
func FuzzPod(f *testing.F) {
	f.Add("web", "default", "uid", int32(80), int32(8080), int32(0), "127.0.0.1", "10M")
	f.Add("a;K8S_POD_UID=b", "n\n", "", int32(2), int32(0), int32(99), "::1%eth0", "1e400")
	f.Fuzz(func(t *testing.T, name, namespace, uid string, containerPort, hostPort, protocol int32, ip, rate string) {
		pod, err := NewPod("pod1", "/run/netns/x", &runtimeapi.PodSandboxConfig{
			Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: namespace, Uid: uid},
			PortMappings: []*runtimeapi.PortMapping{{ContainerPort: containerPort, HostPort: hostPort, Protocol: runtimeapi.Protocol(protocol), HostIp: ip}},
			Annotations:  map[string]string{ingressAnnotation: rate},
		})
		if err != nil {
			if errdefs.Code(err) != codes.InvalidArgument {
				t.Fatalf("code of %v", err)
			}
			return
		}
		var args []string
		for _, kv := range pod.args() {
			args = append(args, kv[0]+"="+kv[1])
		}
		if joined := strings.Join(args, ";"); strings.Count(joined, ";") != len(args)-1 || strings.Count(joined, "=") != len(args) || strings.ContainsAny(joined, "\n\x00") {
			t.Fatalf("CNI_ARGS %q", joined)
		}
		for _, m := range pod.PortMappings {
			if !isPort(m.HostPort) || !isPort(m.ContainerPort) || m.Protocol != "tcp" && m.Protocol != "udp" && m.Protocol != "sctp" {
				t.Fatalf("port mapping %+v", m)
			}
		}
		if b := pod.Bandwidth; b != nil && (b.IngressRate < 1000 || b.IngressRate > 1e15) {
			t.Fatalf("bandwidth %+v", b)
		}
	})
}
