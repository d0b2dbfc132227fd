package exporter

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"berth/image"
	"berth/image/lazy"
	"berth/internal/task"
	"berth/sandbox/state"
	"berth/shim"
)

// Sandboxes is the part of the sandbox manager whose state is exported. *sandbox.Manager
// implements it. All methods but OOMKills answer from memory.
type Sandboxes interface {
	Pods() []*state.Pod
	Containers() []*state.Container
	Launchers() shim.Counts
	OOMKills() uint64
	RuntimeStatus() error
	NetworkStatus(ctx context.Context) error
	Unreleased() int
}

// Images is the part of the image store whose state is exported. *image.Store implements it. All
// methods answer from memory.
type Images interface {
	List() []*image.Image
	Usage(ctx context.Context) (image.Usage, error)
	LazyStats() lazy.Stats
}

// state reads the daemon's state during a scrape.
type stateCollector struct {
	pods   Sandboxes
	images Images
	waits  *task.Waits

	podCount, containerCount, ready, unreleased         *prometheus.Desc
	imageCount, storeBytes, storeInodes                 *prometheus.Desc
	lazyLayers, lazyMissing, lazyReads                  *prometheus.Desc
	lazyWaited, lazyFailed                              *prometheus.Desc
	oomKills                                            *prometheus.Desc
	launchers, launchersStarted, launchersLost          *prometheus.Desc
	waiting, waitingPastLimit, waitsPastLimit, longWait *prometheus.Desc

	root                                               string
	diskBytes, diskAvailable, diskInodes, diskFreeNode *prometheus.Desc
}

// desc describes a metric that is computed during a scrape.
func (e *Exporter) desc(kind, name, help string, labels ...string) *prometheus.Desc {
	e.describe(kind, name, help, labels)
	return prometheus.NewDesc(name, help, labels, nil)
}

// Watch adds the state of the daemon to the metrics, with the free space of the filesystem of the
// directory root. It may be called once.
func (e *Exporter) Watch(pods Sandboxes, images Images, waits *task.Waits, root string) {
	const gauge, counter = "gauge", "counter"
	e.registry.MustRegister(&stateCollector{
		pods: pods, images: images, waits: waits, root: root,
		podCount: e.desc(gauge, "berth_pods", "Pods by state: ready or notready.", "state"),
		unreleased: e.desc(gauge, "berth_pods_unreleased",
			"Pods of failed starts whose CNI DEL fails, too. Berth retries it. No client sees these pods; berth check --state lists them."),
		containerCount: e.desc(gauge, "berth_containers", "Containers by state: created, running or exited.", "state"),
		ready: e.desc(gauge, "berth_ready", "1 if the condition is met: runtime (berth can start containers) or network "+
			"(pods can get a network).", "condition"),
		imageCount: e.desc(gauge, "berth_images", "Images in the store."),
		storeBytes: e.desc(gauge, "berth_image_store_bytes", "Disk space of image layers and records."),
		storeInodes: e.desc(gauge, "berth_image_store_inodes",
			"Inodes of image layers and records."),
		lazyLayers: e.desc(gauge, "berth_incomplete_layers",
			"Image layers that containers can use and that are not fetched completely. See lazy.policy."),
		lazyMissing: e.desc(gauge, "berth_incomplete_layers_missing_bytes",
			"Content of incomplete image layers that is not fetched yet."),
		lazyReads: e.desc(gauge, "berth_incomplete_layers_waiting_reads",
			"Reads of incomplete image layers that wait for content at present."),
		lazyWaited: e.desc(counter, "berth_incomplete_layers_waited_reads_total",
			"Reads of incomplete image layers that had to wait for content."),
		lazyFailed: e.desc(counter, "berth_incomplete_layers_failed_reads_total",
			"Reads of incomplete image layers that failed with EIO, mostly because the registry did not answer in time."),
		oomKills: e.desc(counter, "berth_oom_kills_total",
			"Processes in containers that the kernel killed for lack of memory, also in containers that continue to run."),
		launchers: e.desc(gauge, "berth_launchers",
			"Processes that start containers, by state: idle, or serving a launch or an exec.", "state"),
		launchersStarted: e.desc(counter, "berth_launchers_started_total", "Started launchers."),
		launchersLost: e.desc(counter, "berth_launchers_lost_total",
			"Launchers that exited unexpectedly while idle or during a launch."),
		waiting: e.desc(gauge, "berth_waits", "Operations that wait at present, for a disk or a plugin for example."),
		waitingPastLimit: e.desc(gauge, "berth_waits_past_limit",
			"Operations that wait at present for longer than the limit of the wait."),
		waitsPastLimit: e.desc(counter, "berth_waits_past_limit_total",
			"Waits that exceeded their limit. The log names each."),
		longWait:      e.desc(gauge, "berth_longest_wait_seconds", "Age of the oldest present wait that has a limit."),
		diskBytes:     e.desc(gauge, "berth_disk_size_bytes", "Size of the filesystem of root."),
		diskAvailable: e.desc(gauge, "berth_disk_available_bytes", "Free space of the filesystem of root."),
		diskInodes:    e.desc(gauge, "berth_disk_inodes", "Inodes of the filesystem of root. 0: it has no fixed number."),
		diskFreeNode:  e.desc(gauge, "berth_disk_available_inodes", "Free inodes of the filesystem of root."),
	})
}

// Describe implements prometheus.Collector.
func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.podCount, c.containerCount, c.ready, c.unreleased, c.imageCount, c.storeBytes, c.storeInodes,
		c.lazyLayers, c.lazyMissing, c.lazyReads, c.lazyWaited, c.lazyFailed, c.oomKills, c.launchers, c.launchersStarted, c.launchersLost, c.waiting, c.waitingPastLimit, c.waitsPastLimit, c.longWait,
		c.diskBytes, c.diskAvailable, c.diskInodes, c.diskFreeNode} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	c.collectPods(gauge)
	gauge(c.unreleased, float64(c.pods.Unreleased()))
	gauge(c.ready, truth(c.pods.RuntimeStatus() == nil), "runtime")
	gauge(c.ready, truth(c.pods.NetworkStatus(context.Background()) == nil), "network")
	gauge(c.imageCount, float64(len(c.images.List())))
	if usage, err := c.images.Usage(context.Background()); err == nil {
		gauge(c.storeBytes, float64(usage.Bytes))
		gauge(c.storeInodes, float64(usage.Inodes))
	}
	lazy := c.images.LazyStats()
	gauge(c.lazyLayers, float64(lazy.Layers))
	gauge(c.lazyMissing, float64(lazy.Missing))
	gauge(c.lazyReads, float64(lazy.Waiting))
	counter(c.lazyWaited, lazy.Waited)
	counter(c.lazyFailed, lazy.Failed)
	counter(c.oomKills, c.pods.OOMKills())
	l := c.pods.Launchers()
	gauge(c.launchers, float64(l.Idle), "idle")
	gauge(c.launchers, float64(l.Serving), "serving")
	counter(c.launchersStarted, l.Started)
	counter(c.launchersLost, l.Lost)
	c.collectWaits(gauge)
	counter(c.waitsPastLimit, c.waits.PassedLimit())
	c.collectDisk(gauge)
}

// collectDisk reads the free space, which the kernel has in memory for local filesystems.
func (c *stateCollector) collectDisk(gauge func(*prometheus.Desc, float64, ...string)) {
	var st unix.Statfs_t
	if unix.Statfs(c.root, &st) != nil { // berth_ready tells
		return
	}
	gauge(c.diskBytes, float64(st.Blocks)*float64(st.Bsize))
	gauge(c.diskAvailable, float64(st.Bavail)*float64(st.Bsize))
	gauge(c.diskInodes, float64(st.Files))
	gauge(c.diskFreeNode, float64(st.Ffree))
}

// collectPods counts pods and containers by state.
func (c *stateCollector) collectPods(gauge func(*prometheus.Desc, float64, ...string)) {
	pods, ready := c.pods.Pods(), 0
	for _, p := range pods {
		if p.Ready() {
			ready++
		}
	}
	gauge(c.podCount, float64(ready), "ready")
	gauge(c.podCount, float64(len(pods)-ready), "notready")
	var counts [4]int // by runtimeapi.ContainerState
	for _, container := range c.pods.Containers() {
		counts[container.State()]++
	}
	for i, name := range []string{"created", "running", "exited"} {
		gauge(c.containerCount, float64(counts[i]), name)
	}
}

// collectWaits counts present waits.
func (c *stateCollector) collectWaits(gauge func(*prometheus.Desc, float64, ...string)) {
	now := time.Now()
	waits, late, longest := c.waits.List(), 0, time.Duration(0)
	for _, w := range waits {
		if w.Overdue(now) {
			late++
		}
		if w.Limit > 0 {
			longest = max(longest, now.Sub(w.Since))
		}
	}
	gauge(c.waiting, float64(len(waits)))
	gauge(c.waitingPastLimit, float64(late))
	gauge(c.longWait, longest.Seconds())
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
