// Package report renders measurements as tables and drawings. It measures nothing.
package report

// Row is one line of the table.
type Row struct {
	Key   string // what -rows matches
	Title string
	Unit  string
	// Goal is what berth's median must not exceed, Goal99 what its 99th percentile must not; 0:
	// none.
	Goal, Goal99 float64
}

// Rows are all lines, in the table's order.
var Rows = []Row{
	{Key: "start-host", Title: "host network, to Running", Unit: "ms", Goal: 15},
	{Key: "start-cni", Title: "CNI bridge + portmap plugins, to Running", Unit: "ms", Goal: 45},
	{Key: "start-own", Title: "berth's own network, to Running", Unit: "ms", Goal: 20},
	{Key: "cpu-host", Title: "CPU of a pod's whole life, host network", Unit: "ms", Goal: 25},
	{Key: "cpu-cni", Title: "CPU of a pod's whole life, CNI", Unit: "ms", Goal: 70},
	{Key: "cpu-own", Title: "CPU of a pod's whole life, own network", Unit: "ms", Goal: 35},
	{Key: "burst-cni", Title: "64 pods, 8 at a time, CNI, to Running", Unit: "ms", Goal: 130, Goal99: 250},
	{Key: "burst-own", Title: "64 pods, 8 at a time, own network, to Running", Unit: "ms", Goal: 80, Goal99: 150},
	{Key: "burst-host", Title: "64 pods, 8 at a time, host network, to Running", Unit: "ms", Goal: 50, Goal99: 100},
	{Key: "stop-container", Title: "StopContainer of a process that exits on TERM", Unit: "ms", Goal: 3},
	{Key: "stop-sandbox-cni", Title: "StopPodSandbox, CNI", Unit: "ms", Goal: 45},
	{Key: "stop-sandbox-host", Title: "StopPodSandbox, host network", Unit: "ms", Goal: 1},
	{Key: "stop-sandbox-own", Title: "StopPodSandbox, own network", Unit: "ms", Goal: 8},
	{Key: "exec", Title: "ExecSync `true`", Unit: "ms", Goal: 5},
	{Key: "exec-cpu", Title: "CPU of ExecSync `true`", Unit: "ms", Goal: 5},
	{Key: "status", Title: "ContainerStatus", Unit: "ms", Goal: 0.3},
	{Key: "pss-pod", Title: "PSS per one-container pod", Unit: "MiB", Goal: 0.40},
	{Key: "pss-daemon-idle", Title: "PSS of the daemon, idle", Unit: "MiB", Goal: 20},
	{Key: "pss-all-idle", Title: "the same with what it keeps ready", Unit: "MiB"},
	{Key: "pss-daemon-20", Title: "PSS of the daemon, 20 pods", Unit: "MiB", Goal: 25},
	{Key: "pss-all-20", Title: "the same with what it keeps ready", Unit: "MiB"},
	{Key: "cpu-idle-100", Title: "CPU of a daemon with 100 idle pods", Unit: "% of a core", Goal: 0.1},
	{Key: "pull-gzip", Title: "pull of 8 gzip layers", Unit: "s", Goal: 1.5},
	{Key: "pull-gzip-cpu", Title: "CPU of that pull", Unit: "s", Goal: 2.2},
	{Key: "pull-zstd", Title: "the same in zstd", Unit: "s", Goal: 1.1},
	{Key: "pull-zstd-cpu", Title: "CPU of that pull", Unit: "s", Goal: 1.6},
	{Key: "disk", Title: "disk kept for it", Unit: "× unpacked", Goal: 1},
	{Key: "remove-image", Title: "RemoveImage of it", Unit: "ms", Goal: 50},
	{Key: "remove-image-disk", Title: "RemoveImage of it, until the disk is free", Unit: "ms"},
	{Key: "list-1000", Title: "ListContainers with 1,000 containers", Unit: "ms", Goal: 2},
	{Key: "restart-500", Title: "daemon start with 500 recorded pods", Unit: "s", Goal: 0.5},
	{Key: "kubelet-110", Title: "110 pods at once through a real kubelet, all Ready", Unit: "s", Goal: 8},
}
