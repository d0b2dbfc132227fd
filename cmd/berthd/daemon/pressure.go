package daemon

import (
	"berth/image/governor"
	"berth/internal/cgroup"
)

// unifiedRoot is where cgroup v2 is mounted. A v1 cgroup has no pressure files.
const unifiedRoot = "/sys/fs/cgroup"

// pressureResources are the resources of pods that pulls may take. The pressure of processor time
// is not used, because it also rises if a pod reaches its own limit.
var pressureResources = []string{"io", "memory"}

// podPressure returns the pressure of the cgroups that contain all pods, such as kubepods.slice.
func (a *assembly) podPressure() map[string]governor.Pressure {
	pods := a.pods.Load()
	if pods == nil {
		return nil
	}
	tops := map[string]bool{}
	for _, p := range pods.Pods() {
		if top := cgroup.Top(p.Config.GetLinux().GetCgroupParent()); top != "" {
			tops[top] = true
		}
	}
	found := map[string]governor.Pressure{}
	for top := range tops {
		for _, resource := range pressureResources {
			p, ok, err := cgroup.ReadPressure(unifiedRoot, top, resource)
			if err != nil {
				a.log.Debug("the pressure of pods is unknown", "cgroup", top, "error", err)
			}
			if ok {
				found[top+" "+resource] = governor.Pressure(p)
			}
		}
	}
	return found
}
