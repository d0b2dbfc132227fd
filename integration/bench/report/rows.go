// Package report renders measurements as tables and drawings. It measures nothing.
package report

import "slices"

// Row is one line of the table.
type Row struct {
	Key   string // matched by the option -rows
	Title string
	Unit  string
	// Goal is the limit of berth's median, Goal99 of its 99th percentile. 0 means no limit.
	Goal, Goal99 float64
	Optional     bool // the row is left out if it has no value
}

// Cgroup1Rows are the lines that depend on the version of cgroups: processes start and end, and
// kubelet sets limits.
var Cgroup1Rows = []Row{
	{Key: "start-host", Title: "host network, to Running", Unit: "ms", Goal: 15},
	{Key: "start-cni", Title: "CNI bridge + portmap plugins, to Running", Unit: "ms", Goal: 45},
	{Key: "start-own", Title: "built-in network, to Running", Unit: "ms", Goal: 20},
	{Key: "cpu-host", Title: "CPU of a pod's whole life, host network", Unit: "ms", Goal: 25},
	{Key: "instructions-host", Title: "instructions of a pod's whole life, host network", Unit: "million", Optional: true},
	{Key: "cpu-cni", Title: "CPU of a pod's whole life, CNI", Unit: "ms", Goal: 70},
	{Key: "instructions-cni", Title: "instructions of a pod's whole life, CNI", Unit: "million", Optional: true},
	{Key: "cpu-own", Title: "CPU of a pod's whole life, built-in network", Unit: "ms", Goal: 35},
	{Key: "instructions-own", Title: "instructions of a pod's whole life, built-in network", Unit: "million", Optional: true},
	{Key: "burst-cni", Title: "64 pods, 8 at a time, CNI, to Running", Unit: "ms", Goal: 130, Goal99: 250},
	{Key: "burst-own", Title: "64 pods, 8 at a time, built-in network, to Running", Unit: "ms", Goal: 80, Goal99: 150},
	{Key: "burst-host", Title: "64 pods, 8 at a time, host network, to Running", Unit: "ms", Goal: 50, Goal99: 100},
	{Key: "stop-container", Title: "StopContainer of a process that exits on TERM", Unit: "ms", Goal: 3},
	{Key: "stop-sandbox-cni", Title: "StopPodSandbox, CNI", Unit: "ms", Goal: 45},
	{Key: "stop-sandbox-host", Title: "StopPodSandbox, host network", Unit: "ms", Goal: 1},
	{Key: "stop-sandbox-own", Title: "StopPodSandbox, built-in network", Unit: "ms", Goal: 8},
	{Key: "exec", Title: "ExecSync `true`", Unit: "ms", Goal: 5},
	{Key: "exec-cpu", Title: "CPU of ExecSync `true`", Unit: "ms", Goal: 5},
	{Key: "status", Title: "ContainerStatus", Unit: "ms", Goal: 0.3},
	{Key: "kubelet-110", Title: "110 pods at once through a real kubelet, all Ready", Unit: "s", Goal: 8, Optional: true},
}

// Rows are all lines in the order of the table.
var Rows = slices.Concat(Cgroup1Rows, []Row{
	{Key: "pss-pod", Title: "PSS per one-container pod", Unit: "MiB", Goal: 0.40},
	{Key: "pss-daemon-idle", Title: "PSS of the daemon, no pods", Unit: "MiB", Goal: 20},
	{Key: "pss-all-idle", Title: "PSS of daemon and idle helpers, no pods", Unit: "MiB"},
	{Key: "pss-daemon-20", Title: "PSS of the daemon, 20 pods", Unit: "MiB", Goal: 25},
	{Key: "pss-all-20", Title: "PSS of daemon and idle helpers, 20 pods", Unit: "MiB"},
	{Key: "cpu-idle-100", Title: "CPU of a daemon with 100 idle pods", Unit: "% of a core", Goal: 0.1},
	{Key: "pull-gzip", Title: "pull of 8 gzip layers", Unit: "s", Goal: 1.5},
	{Key: "pull-gzip-cpu", Title: "CPU of a pull of 8 gzip layers", Unit: "s", Goal: 2.2},
	{Key: "pull-zstd", Title: "pull of 8 zstd layers", Unit: "s", Goal: 1.1},
	{Key: "pull-zstd-cpu", Title: "CPU of a pull of 8 zstd layers", Unit: "s", Goal: 1.6},
	{Key: "disk", Title: "disk used by 8 gzip layers", Unit: "× unpacked", Goal: 1},
	{Key: "remove-image", Title: "RemoveImage of 8 gzip layers", Unit: "ms", Goal: 50},
	{Key: "list-1000", Title: "ListContainers with 1,000 containers", Unit: "ms", Goal: 2},
	{Key: "restart-500", Title: "daemon start with 500 recorded pods", Unit: "s", Goal: 0.5},
})
