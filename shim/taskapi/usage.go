package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	task "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"berth/shim/ociruntime"
)

// usage prints the resource usage of a task like runc's command events --stats.
func (c *command) usage(ctx context.Context, id string) (err error) {
	shim, _, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, shim.close()) }()
	var answer task.StatsResponse
	if err := shim.call(ctx, callTimeout, "Stats", &task.StatsRequest{ID: id}, &answer); err != nil {
		return err
	}
	used, err := usageOf(answer.Stats)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"type": "stats", "id": id, "data": used})
}

// usageOf converts what a shim has measured, in the form of one of the two versions of cgroups.
func usageOf(stats *anypb.Any) (u ociruntime.Usage, err error) {
	var v1 cgroup1.Metrics
	var v2 cgroup2.Metrics
	cpu, memory := &u.CPU.Usage, &u.Memory.Usage
	switch {
	case stats.MessageIs(&v1):
		err = stats.UnmarshalTo(&v1)
		from, m := v1.GetCPU().GetUsage(), v1.GetMemory()
		cpu.Total, cpu.Kernel, cpu.User = from.GetTotal(), from.GetKernel(), from.GetUser()
		memory.Usage, memory.Limit = m.GetUsage().GetUsage(), m.GetUsage().GetLimit()
		u.Memory.Raw = map[string]uint64{"inactive_file": m.GetTotalInactiveFile(), "anon": m.GetTotalRSS(),
			"pgfault": m.GetTotalPgFault(), "pgmajfault": m.GetTotalPgMajFault()}
		u.Pids.Current = v1.GetPids().GetCurrent()
	case stats.MessageIs(&v2):
		err = stats.UnmarshalTo(&v2)
		from, m := v2.GetCPU(), v2.GetMemory()
		cpu.Total, cpu.Kernel, cpu.User = 1000*from.GetUsageUsec(), 1000*from.GetSystemUsec(), 1000*from.GetUserUsec()
		memory.Usage, memory.Limit = m.GetUsage(), m.GetUsageLimit()
		u.Memory.Raw = map[string]uint64{"inactive_file": m.GetInactiveFile(), "anon": m.GetAnon(),
			"pgfault": m.GetPgfault(), "pgmajfault": m.GetPgmajfault()}
		u.Pids.Current = v2.GetPids().GetCurrent()
	default:
		err = fmt.Errorf("statistics of the unknown type %q", stats.GetTypeUrl())
	}
	return u, err
}
