package oci

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
	"berth/oci/users"
)

var update = flag.Bool("update", false, "write the results to testdata/*.json")

// kubeletInput returns kubelet's request for an ordinary container.
func kubeletInput() ContainerInput {
	in := testInput()
	in.Config = &runtimeapi.ContainerConfig{
		Metadata:   &runtimeapi.ContainerMetadata{Name: "web"},
		Args:       []string{"--port", "8080"},
		WorkingDir: "/srv",
		Envs:       []*runtimeapi.KeyValue{{Key: "KUBERNETES_SERVICE_HOST", Value: []byte("10.96.0.1")}},
		Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/data", HostPath: "/srv/data"},
			{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount", HostPath: "/srv/data", Readonly: true},
			{ContainerPath: "/etc/hosts", HostPath: "/srv/data"},
		},
		Annotations: map[string]string{"io.kubernetes.container.hash": "1"},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{
				CpuPeriod: 100000, CpuQuota: 50000, CpuShares: 512, MemoryLimitInBytes: 128 << 20, OomScoreAdj: 968,
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}, {PageSize: "1GB"}},
			},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
				MaskedPaths:      []string{"/proc/kcore", "/proc/keys"},
				ReadonlyPaths:    []string{"/proc/bus", "/proc/sys"},
				NoNewPrivs:       true,
				Capabilities:     &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddCapabilities: []string{"NET_BIND_SERVICE"}},
			},
		},
	}
	in.Image = &ocispec.ImageConfig{Entrypoint: []string{"/bin/web"}, Cmd: []string{"-h"}, Env: []string{"LANG=C"}, User: "app"}
	in.User = users.User{UID: 1000, GID: 100, Groups: []uint32{50, 100}, Home: "/home/app"}
	return in
}

// TestGolden compares complete specs. The golden files document the contract with libcontainer.
func TestGolden(t *testing.T) {
	t.Parallel()
	privileged := testInput()
	privileged.privilege()
	for name, build := range map[string]func() (*specs.Spec, error){
		"container":  func() (*specs.Spec, error) { return ContainerSpec(kubeletInput()) },
		"privileged": func() (*specs.Spec, error) { return ContainerSpec(privileged) },
		"sandbox":    func() (*specs.Spec, error) { return SandboxSpec(testSandbox()) },
	} {
		t.Run(name, func(t *testing.T) {
			spec, err := build()
			testutil.Must(t, err)
			got, err := json.MarshalIndent(spec, "", "  ")
			testutil.Must(t, err)
			file := filepath.Join("testdata", name+".json")
			if *update {
				testutil.Must(t, os.WriteFile(file, append(got, '\n'), 0o644))
			}
			want, err := os.ReadFile(file)
			testutil.Must(t, err)
			if string(got)+"\n" != string(want) {
				t.Errorf("differs from %s (run with -update and read the diff):\n%s", file, got)
			}
		})
	}
}
