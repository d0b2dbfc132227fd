package crash

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/vishvananda/netlink"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/image/erofs"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// variants lists operations on unusual state.
var variants = []operation{
	{name: "StopContainer_frozen", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started, freezeMonitor), request: stopContainer(0), more: true},
	{name: "UpdateContainerResources", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: limit, more: true},
	{name: "CreateContainer_hostPath", prepare: with(podRuns(harness.HostNetwork), withContainer(), withHostPath), request: createContainer, again: anotherContainer, more: true},

	{name: "CreateContainer_volumes", prepare: with(podRuns(podInUserNamespace), withContainer(containerInUserNamespace), withVolumes), request: createContainer,
		again: anotherContainer, more: true},
	{name: "RemoveContainer_volumes", prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), withVolumes, started), request: removeContainer, more: true},

	{name: "RunPodSandbox_builtInNetwork", daemon: builtInNetwork, prepare: with(networkLost, withPod(hostPort)), request: runPod, again: anotherPod, more: true},
	{name: "RunPodSandbox_builtInNetwork_found", daemon: builtInNetwork, prepare: with(networkLost, makeBridge, withPod(hostPort)), request: runPod, again: anotherPod, more: true},
	{name: "StopPodSandbox_builtInNetwork", daemon: builtInNetwork, prepare: with(podRuns(hostPort), withContainer(exitsOnTerm), started), request: stopPod, more: true},
	{name: "RunPodSandbox_builtInNetwork_bandwidth", daemon: builtInNetwork, prepare: withPod(udpHostPort, bandwidth), request: runPod, again: anotherPod, more: true},
	{name: "StopPodSandbox_builtInNetwork_bandwidth", daemon: builtInNetwork, prepare: with(podRuns(udpHostPort, bandwidth), sendDatagram), request: stopPod, more: true},

	{name: "RunPodSandbox_crun", daemon: withCrun, prepare: with(byCrun, withPod(hostPort)), request: runPod, again: anotherPod, more: true},
	{name: "StartContainer_crun", daemon: withCrun, prepare: with(byCrun, podRuns(harness.HostNetwork), withContainer(), created), request: startContainer,
		again: startAnother, more: true},
	{name: "RemovePodSandbox_crun", daemon: withCrun, prepare: with(byCrun, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removePod, more: true},

	{name: "RunPodSandbox_shim", daemon: withShim, prepare: with(byShim, withPod(hostPort)), request: runPod, again: anotherPod, more: true},
	{name: "StartContainer_shim", daemon: withShim, prepare: with(byShim, podRuns(harness.HostNetwork), withContainer(), created), request: startContainer,
		again: startAnother, more: true},
	{name: "RemovePodSandbox_shim", daemon: withShim, prepare: with(byShim, podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: removePod, more: true},

	{name: "RunPodSandbox_plugin", daemon: withPlugin, prepare: withPod(harness.HostNetwork), request: runPod, again: anotherPod, more: true},
	{name: "CreateContainer_plugin", daemon: withPlugin, prepare: with(podRuns(harness.HostNetwork), withContainer()), request: createContainer, again: anotherContainer, more: true},
	{name: "StopPodSandbox_plugin", daemon: withPlugin, prepare: with(podRuns(harness.HostNetwork), withContainer(exitsOnTerm), started), request: stopPod, more: true},
}

// freezeMonitor stops the container's monitor.
func freezeMonitor(t *testing.T, w *world) {
	c := &harness.Container{Pod: &harness.Pod{D: w.d, Id: w.podID, Config: w.pod}, Id: w.id, Config: w.container}
	harness.Must(t, syscall.Kill(harness.MonitorOf(t, w.d, c), syscall.SIGSTOP))
}

// withHostPath mounts a missing host directory into the container. Its parent is emptied after each
// case.
func withHostPath(_ *testing.T, w *world) {
	w.container.Mounts = append(w.container.Mounts, &runtimeapi.Mount{HostPath: filepath.Join(w.d.LogDir, "host/path"), ContainerPath: "/host"})
}

// declaringImage pushes an image with VOLUMEs once: one with content, an empty one, and a missing
// one.
var declaringImage = sync.OnceValues(func() (string, error) {
	layer, err := fixture.Tree{
		fixture.Dir("data", 0o750).Owned(7, 8), fixture.File("data/file", 0o644, "content"), fixture.Dir("empty", 0o755),
	}.Layer(fixture.Gzip)
	if err != nil {
		return "", err
	}
	img, err := fixture.Image(v1.Config{Volumes: map[string]struct{}{"/data": {}, "/empty": {}, "/missing": {}}}, layer)
	if err != nil {
		return "", err
	}
	return harness.Registry.Push("crash/declaring:1", img)
})

// withVolumes gives the container an image with VOLUMEs.
func withVolumes(t *testing.T, w *world) {
	name := harness.Get(declaringImage())(t)
	w.d.EnsureImage(t, name)
	harness.Image(name)(w.container)
}

// limit updates the limits of a running container.
func limit(t *testing.T, w *world) error {
	return w.d.Cri.UpdateContainerResources(t.Context(), w.id, &runtimeapi.ContainerResources{
		Linux: &runtimeapi.LinuxContainerResources{CpuShares: 512, CpuPeriod: 100_000, CpuQuota: 50_000, MemoryLimitInBytes: 256 << 20}})
}

// builtInNetwork enables the built-in network, so that the daemon can be killed during ADD and DEL.
// IPv6 is off because its addresses differ from case to case.
func builtInNetwork(*testing.T) harness.DaemonOption {
	return harness.WithBuiltInNetwork(`network.subnets = ["10.83.0.0/16"]`)
}

// networkLost removes the network, as if the pod were the first after a boot.
func networkLost(t *testing.T, w *world) { w.d.LoseNetwork(t) }

// makeBridge creates the bridge before the daemon does, as an administrator may. Results of ADD
// contain its hardware address.
func makeBridge(t *testing.T, _ *world) {
	harness.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "berth0", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}}))
}

const udpPort = 18053

var udpHostPort = harness.HostPort(udpPort, 53, runtimeapi.Protocol_UDP)

// bandwidth limits the pod's network traffic.
func bandwidth(c *runtimeapi.PodSandboxConfig) {
	c.Annotations["kubernetes.io/ingress-bandwidth"], c.Annotations["kubernetes.io/egress-bandwidth"] = "1G", "1G"
}

// sendDatagram sends a datagram to the host port, so that the kernel tracks a connection.
func sendDatagram(t *testing.T, _ *world) {
	conn := harness.Get(net.Dial("udp4", fmt.Sprintf("127.0.0.1:%d", udpPort)))(t)
	harness.Get(conn.Write([]byte("?")))(t)
	harness.Must(t, conn.Close())
}

// withCrun configures crun as a handler.
func withCrun(t *testing.T) harness.DaemonOption { return harness.WithHandler(crun, harness.Crun(t)) }

// withShim configures containerd's shim for runc as a handler.
func withShim(t *testing.T) harness.DaemonOption { return harness.WithRuncShim(t, shim) }

// withPlugin configures an NRI plugin that each daemon starts.
func withPlugin(*testing.T) harness.DaemonOption {
	return func(t *testing.T, d *harness.Daemon) {
		dir := filepath.Join(d.Dir, "plugins")
		harness.Must(t, os.Mkdir(dir, 0o755))
		harness.Must(t, os.Symlink(harness.Get(os.Executable())(t), filepath.Join(dir, "10-crash")))
	}
}

// isPlugin reports whether a daemon has started this process as an NRI plugin.
func isPlugin() bool { return os.Getenv(api.PluginSocketEnvVar) != "" }

// runPlugin runs the NRI plugin.
func runPlugin() error {
	s, err := stub.New(plugin{})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}

// plugin adds a variable to each container and requests limits for others.
type plugin struct{}

func (plugin) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	a.AddEnv("FROM_PLUGIN", "yes")
	a.SetLinuxCPUShares(300)
	return a, nil, nil
}

func (plugin) RunPodSandbox(context.Context, *api.PodSandbox) error  { return nil }
func (plugin) StopPodSandbox(context.Context, *api.PodSandbox) error { return nil }

// otherForm are pulls of an image that must be stored as directories, although two of its layers
// are already stored for EROFS. The daemon downloads these two again. A node does so if the merge
// of an image's layers shows that the image is too large for EROFS.
var otherForm = []operation{
	{name: "PullImage_otherForm", daemon: onDisk, prepare: packed, request: pull(second), more: true},
	{name: "Recovery_of_PullImage_otherForm", daemon: onDisk, first: &point{"layer.marked-opaque", 1}, prepare: packed, request: pull(second), more: true},
}

const (
	asDirectories = `image.layer_driver = "directory"`
	asEROFS       = `image.layer_driver = "erofs"`
)

// onDisk starts the daemon with the EROFS driver, so that the driver's files exist before the
// operation.
func onDisk(t *testing.T) harness.DaemonOption {
	if err := erofs.Probe("/var/tmp"); errors.Is(err, errors.ErrUnsupported) {
		t.Skip("NOT TESTED: ", err)
	}
	return harness.WithLayerDriver("erofs")
}

// packed pulls an image with the EROFS driver, and restarts the daemon with the directory driver.
func packed(t *testing.T, w *world) {
	if slices.Contains(w.d.Extra, asDirectories) { // set by the previous case
		w.d.SetConfig(t, asDirectories, asEROFS)
		w.d.Restart(t)
	}
	has(first)(t, w)
	w.d.SetConfig(t, asEROFS, asDirectories)
	w.d.Restart(t)
}
