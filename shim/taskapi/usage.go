package taskapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"time"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	task "github.com/containerd/containerd/api/runtime/task/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"berth/internal/cgstats"
)

// usage prints the resource usage of a task.
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
	return json.NewEncoder(os.Stdout).Encode(used)
}

// usageOf converts what a shim has measured, in the form of one of the two versions of cgroups.
func usageOf(stats *anypb.Any) (u cgstats.Sample, err error) {
	var v1 cgroup1.Metrics
	var v2 cgroup2.Metrics
	u = cgstats.Sample{At: time.Now(), CPU: cgstats.CPU{Known: true, TimesKnown: true},
		Memory: cgstats.Memory{Known: true, SwapLimit: cgstats.Unlimited}, TasksKnown: true}
	switch {
	case stats.MessageIs(&v1):
		err = stats.UnmarshalTo(&v1)
		used, m := v1.GetCPU().GetUsage(), v1.GetMemory()
		u.CPU.Usage, u.CPU.System, u.CPU.User = used.GetTotal(), used.GetKernel(), used.GetUser()
		u.Memory.Usage, u.Memory.Limit = m.GetUsage().GetUsage(), m.GetUsage().GetLimit()
		u.Memory.InactiveFile, u.Memory.RSS = m.GetTotalInactiveFile(), m.GetTotalRSS()
		u.Memory.PageFaults, u.Memory.MajorPageFaults = m.GetTotalPgFault(), m.GetTotalPgMajFault()
		u.Tasks = v1.GetPids().GetCurrent()
	case stats.MessageIs(&v2):
		err = stats.UnmarshalTo(&v2)
		used, m := v2.GetCPU(), v2.GetMemory()
		u.CPU.Usage = 1000 * used.GetUsageUsec()
		u.CPU.System, u.CPU.User = 1000*used.GetSystemUsec(), 1000*used.GetUserUsec()
		u.Memory.Usage, u.Memory.Limit = m.GetUsage(), m.GetUsageLimit()
		u.Memory.InactiveFile, u.Memory.RSS = m.GetInactiveFile(), m.GetAnon()
		u.Memory.PageFaults, u.Memory.MajorPageFaults = m.GetPgfault(), m.GetPgmajfault()
		u.Tasks = v2.GetPids().GetCurrent()
	default:
		err = fmt.Errorf("statistics of the unknown type %q", stats.GetTypeUrl())
	}
	// The kernel's largest numbers of pages.
	if u.Memory.Limit == 0 || u.Memory.Limit > math.MaxInt64/2 {
		u.Memory.Limit = cgstats.Unlimited
	}
	return u, err
}
