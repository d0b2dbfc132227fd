// Package stats measures the resource usage of pods and containers.
//
// # Contract
//
// A Reader reads cgroup and network counters through meters. A meter opens the kernel's files once,
// when the process starts, and its owner closes it when the process exits. Any goroutine may read a
// meter at any time. A read takes no lock and calls no other process. The error for a removed
// cgroup is cgstats.ErrGone. A value that cannot be determined is marked unknown and never reported
// as zero. One container that cannot be measured does not hide its pod.
//
// A Sampler measures the size of writable layers and the open files of processes in the background,
// because a measurement per request is too expensive. It also asks runtimes for the usage of
// containers whose processes the node does not see. It measures one container at a time, on a
// thread with the lowest priority, for at most a tenth of the time. Clients get the last Sample
// from memory. Containers that no client asks for are sampled rarely. A pod that has used no CPU
// time since its last sample is sampled again only after ten minutes. The Sampler neither changes
// nor locks containers. Each container owns its SampleState.
package stats
