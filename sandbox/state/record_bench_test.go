package state

import (
	"fmt"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/testutil"
)

// recorded returns a typical container of kubelet after its creation.
func recorded(b *testing.B, id string) (*ContainerSpec, *ContainerStatus) {
	b.Helper()
	config := &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Labels: map[string]string{
		"io.kubernetes.container.name": "main", "io.kubernetes.pod.name": "pod", "io.kubernetes.pod.namespace": "default"}}
	process := &specs.Process{Args: []string{"/bin/main"}, Cwd: "/", Capabilities: &specs.LinuxCapabilities{}}
	described := &specs.Spec{Version: specs.Version, Root: &specs.Root{Path: "rootfs"}, Linux: &specs.Linux{CgroupsPath: "/kubepods/" + id}}
	for i := range 30 { // environment of a typical service
		variable := fmt.Sprintf("SERVICE_%d_PORT=tcp://10.0.0.1:%d", i, i)
		process.Env = append(process.Env, variable)
		config.Envs = append(config.Envs, &runtimeapi.KeyValue{Key: fmt.Sprintf("SERVICE_%d_PORT", i), Value: []byte("tcp://10.0.0.1:80")})
	}
	for i := range 14 {
		process.Capabilities.Bounding = append(process.Capabilities.Bounding, fmt.Sprintf("CAP_%d", i))
		described.Mounts = append(described.Mounts, specs.Mount{Destination: fmt.Sprintf("/mnt/%d", i), Source: "/var/lib/kubelet/pods/x", Options: []string{"rbind", "rprivate", "ro"}})
	}
	status := NewContainerStatus(ContainerCreated)
	status.Process, status.Described = process, described
	return &ContainerSpec{ID: id, PodID: "pod", BootID: "boot", CreatedAt: time.Now(), Config: config,
		Image: Image{ID: "sha256:" + id, Layers: []digest.Digest{digest.FromString("layer")}}, CgroupsPath: "/kubepods/" + id}, &status
}

// BenchmarkWrite writes one record. The lifecycle of a container has five writes.
func BenchmarkWrite(b *testing.B) {
	records, err := OpenRecords(b.TempDir(), noWait)
	testutil.Must(b, err)
	spec, status := recorded(b, "c")
	b.ReportAllocs()
	for b.Loop() {
		testutil.Must(b, records.WriteContainer(spec, status))
	}
}

// BenchmarkLoad500 reads the records of 500 containers, as at the start of a daemon.
func BenchmarkLoad500(b *testing.B) {
	const count = 500
	records, err := OpenRecords(b.TempDir(), noWait)
	testutil.Must(b, err)
	for i := range count {
		spec, status := recorded(b, fmt.Sprintf("%064x", i))
		testutil.Must(b, records.WriteContainer(spec, status))
	}
	b.ReportAllocs()
	for b.Loop() {
		loaded := 0
		damaged, err := records.LoadContainers(func(*ContainerSpec, ContainerStatus) { loaded++ })
		if err != nil || len(damaged) > 0 || loaded != count {
			b.Fatalf("%d loaded, damaged %v, %v", loaded, damaged, err)
		}
	}
}

func noWait(string, string) func() { return func() {} }
