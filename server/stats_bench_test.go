package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/host"
	"berth/internal/testutil"
	"berth/sandbox/state"
	"berth/sandbox/stats"
)

// measuredPods holds containers with statistics of real cgroups.
type measuredPods struct {
	*fakePods
	meters map[string]*stats.ContainerMeter
}

func (m measuredPods) ContainerStats(c *state.Container) (stats stats.ContainerUsage, err error) {
	stats.Info, stats.Running = c, true
	return stats, m.meters[c.ID].Read(&stats.Usage)
}

// newMeasuredPods makes the cgroups of running containers.
func newMeasuredPods(b *testing.B, count int) measuredPods {
	machine := os.Getenv("BERTH_MACHINE")
	if os.Geteuid() != 0 || machine == "" {
		b.Skip("needs contrib/machine to make cgroups")
	}
	var st unix.Statfs_t
	testutil.Must(b, unix.Statfs("/sys/fs/cgroup", &st))
	cgroups := stats.Cgroups{Node: state.Node{Host: host.Facts{CgroupV2: st.Type == unix.CGROUP2_SUPER_MAGIC}}}
	pods := measuredPods{&fakePods{}, map[string]*stats.ContainerMeter{}}
	for i := range count {
		config := &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "main"}, Labels: map[string]string{
			"io.kubernetes.container.name": "main", "io.kubernetes.pod.name": fmt.Sprintf("pod-%d", i), "io.kubernetes.pod.namespace": "default"}}
		info := testContainer{ID: fmt.Sprintf("bench%d", i), Config: config, State: runtimeapi.ContainerState_CONTAINER_RUNNING}.snapshot()
		path := "/" + machine + "/" + info.ID
		makeCgroups(b, path)
		measured := cgroups.ContainerMeter(path, false)
		b.Cleanup(func() {
			if err := measured.Close(); err != nil {
				b.Error(err)
			}
		})
		pods.containers, pods.meters[info.ID] = append(pods.containers, info), measured
	}
	return pods
}

// BenchmarkContainerStats500 measures 500 running containers in real cgroups with limits, and lists
// them over the socket to a client like kubelet. The CPU time of the list includes the client,
// which runs in this process.
func BenchmarkContainerStats500(b *testing.B) {
	const count = 500
	pods := newMeasuredPods(b, count)
	h := start(b, testConfig, pods, &fakeImages{})
	b.Run("measure", func(b *testing.B) {
		measureCPU(b, func() {
			for _, info := range pods.Containers() {
				if _, err := pods.ContainerStats(info); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
	var answer []byte
	b.Run("list", func(b *testing.B) {
		measureCPU(b, func() {
			list, err := h.runtime.ListContainerStats(b.Context(), &runtimeapi.ListContainerStatsRequest{})
			if err != nil || len(list.Stats) != count || list.Stats[0].GetMemory().GetUsageBytes() == nil {
				b.Fatalf("%d statistics, %v", len(list.GetStats()), err)
			}
			if answer == nil {
				answer, err = proto.Marshal(list)
				testutil.Must(b, err)
			}
		})
	})
	b.Run("client", func(b *testing.B) { // the client's part of list
		measureCPU(b, func() {
			testutil.Must(b, proto.Unmarshal(answer, &runtimeapi.ListContainerStatsResponse{}))
		})
	})
}

// measureCPU runs do b.N times and reports CPU time, because on a busy machine elapsed time
// includes other processes' work.
func measureCPU(b *testing.B, do func()) {
	b.Helper()
	do() // opens the files
	b.ReportAllocs()
	before := cpuTime(b)
	for b.Loop() {
		do()
	}
	b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/float64(b.N)/1000, "cpu-ms/op")
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage unix.Rusage
	testutil.Must(b, unix.Getrusage(unix.RUSAGE_SELF, &usage))
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// makeCgroups makes a cgroup with a memory limit in every hierarchy that has statistics.
func makeCgroups(b *testing.B, path string) {
	b.Helper()
	group, err := cgroup.Open(path, false)
	testutil.Must(b, err)
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		dir := group.Dir(controller)
		testutil.Must(b, os.MkdirAll(dir, 0o755))
		b.Cleanup(func() {
			if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
				b.Error(err)
			}
		})
		for _, name := range []string{"memory.limit_in_bytes", "memory.max"} {
			err := os.WriteFile(filepath.Join(dir, name), []byte("67108864"), 0)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
				b.Fatal(err)
			}
		}
	}
}
