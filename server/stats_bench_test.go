package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/cgroup"
	"berth/internal/host"
	"berth/internal/index"
)

// 500 running containers, of real cgroups with limits, are measured as
// ListContainerStats does it.
func BenchmarkContainerStats500(b *testing.B) {
	machine := os.Getenv("BERTH_MACHINE")
	if os.Geteuid() != 0 || machine == "" {
		b.Skip("needs contrib/machine to make cgroups")
	}
	var st unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &st); err != nil {
		b.Fatal(err)
	}
	m := &Manager{cfg: Config{Host: &host.Facts{CgroupV2: st.Type == unix.CGROUP2_SUPER_MAGIC}}, containers: index.New[*container]("container"), pods: index.New[*pod]("pod")}
	for i := range 500 {
		c := &container{id: fmt.Sprintf("bench%d", i)}
		c.rec.CgroupsPath = "/" + machine + "/" + c.id
		makeCgroups(b, c.rec.CgroupsPath)
		run := &running{meter: m.containerMeter(c)}
		b.Cleanup(func() {
			if err := run.meter.Close(); err != nil {
				b.Error(err)
			}
		})
		c.running.Store(run)
		c.info.Store(&ContainerInfo{ID: c.id, State: runtimeapi.ContainerState_CONTAINER_RUNNING})
		m.containers.Put(c.id, c)
	}
	list := func() {
		for _, info := range m.Containers() {
			if stats, err := m.ContainerStats(info); err != nil || !stats.Running {
				b.Fatalf("%+v, %v", stats, err)
			}
		}
	}
	list() // opens the files
	b.ReportAllocs()
	before := cpuTime(b)
	for b.Loop() {
		list()
	}
	// On a busy machine the clock tells of the others' work too.
	b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/float64(b.N)/1000, "cpu-ms/op")
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// makeCgroups makes a group with a memory limit in every hierarchy that statistics are read from.
func makeCgroups(b *testing.B, path string) {
	b.Helper()
	group, err := cgroup.Open(path, false)
	if err != nil {
		b.Fatal(err)
	}
	for _, controller := range []string{"cpu", "cpuacct", "memory", "pids"} {
		dir := group.Dir(controller)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			b.Fatal(err)
		}
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
