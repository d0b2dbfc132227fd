package oci_test

import (
	"fmt"
	"log"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/oci"
	"berth/oci/users"
)

// The spec of a container depends on its pod, the CRI config, the image's config and the node.
func ExampleContainerSpec() {
	node, err := host.Detect("/")
	if err != nil {
		log.Fatal(err)
	}
	node.OOMScoreAdjMin = -1000 // as for a daemon with CAP_SYS_RESOURCE

	image := &ocispec.ImageConfig{
		User:       "web",
		Env:        []string{"PATH=/usr/bin:/bin", "MODE=test"},
		Entrypoint: []string{"/usr/bin/server"},
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "server"},
		Args:     []string{"--port=8080"},
		Envs:     []*runtimeapi.KeyValue{{Key: "MODE", Value: []byte("production")}},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 256 << 20, OomScoreAdj: 978},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{ReadonlyRootfs: true},
		},
	}
	// The file is part of the image. Package safefs reads it.
	passwd := []byte("root:x:0:0::/root:/bin/sh\nweb:x:101:102::/srv:/bin/sh\n")
	user, err := users.Resolve(passwd, nil, users.ContainerRequest(config.Linux.SecurityContext, image.User))
	if err != nil {
		log.Fatal(err)
	}

	spec, err := oci.ContainerSpec(oci.ContainerInput{
		ID: "c1",
		Pod: oci.Pod{
			ID:           "p1",
			Config:       &runtimeapi.PodSandboxConfig{Hostname: "web-0"},
			CgroupParent: "/kubepods/pod1",
			NetNS:        "/run/berth/netns/p1",
			PausePID:     4242,
			Shm:          "/run/berth/pods/shm/p1",
		},
		Config: config,
		Image:  image,
		User:   user,
		Host:   node,
		Files:  host.Files{},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("args:  ", spec.Process.Args)
	fmt.Println("user:  ", spec.Process.User.UID, spec.Process.User.GID)
	fmt.Println("env:   ", spec.Process.Env)
	fmt.Println("cgroup:", spec.Linux.CgroupsPath)
	fmt.Println("memory:", *spec.Linux.Resources.Memory.Limit)
	// Output:
	// args:   [/usr/bin/server --port=8080]
	// user:   101 102
	// env:    [PATH=/usr/bin:/bin HOSTNAME=web-0 MODE=production HOME=/srv]
	// cgroup: /kubepods/pod1/c1
	// memory: 268435456
}

// The parent has another form with each cgroup driver.
func ExampleCgroupsPath() {
	path, err := oci.CgroupsPath("/kubepods/besteffort/pod1", "c1", false)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(path)
	path, err = oci.CgroupsPath("/kubepods.slice/kubepods-besteffort.slice", "c1", true)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(path)
	// Output:
	// /kubepods/besteffort/pod1/c1
	// kubepods-besteffort.slice:berth:c1
}
