package nodecheck

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"berth/cmd/node"
	"berth/sandbox/handler"
	"berth/shim/ociruntime"
)

// handlerTimeout bounds how long a runtime's program may take to describe its features.
const handlerTimeout = 20 * time.Second

// checkHandlers queries the programs of the configured runtime handlers, as the daemon does.
func checkHandlers(ctx context.Context, n *Node) []Finding {
	var findings []Finding
	for _, name := range slices.Sorted(maps.Keys(n.Config.Handlers)) {
		if n.Config.Handlers[name].Path != "" {
			findings = append(findings, n.checkHandler(ctx, name))
		}
	}
	return findings
}

func (n *Node) checkHandler(ctx context.Context, name string) Finding {
	configured, subject := n.Config.Handlers[name], "handler "+name
	level, whose := Warning, "pods that request it"
	if name == n.Config.DefaultHandler {
		level, whose = Failure, "pods without a runtime class"
	}
	can, err := probeHandler(ctx, node.Handlers(n.Config)[name])
	if err != nil {
		return lacking(level, subject, err.Error(),
			fmt.Sprintf("install the program, or fix handlers.%s.path: %s are refused until then", name, whose))
	}
	if mixed := n.hybridControllers(); mixed != "" && strings.HasPrefix(can.Version, "crun ") {
		return lacking(
			level,
			subject,
			"crun refuses mixed cgroup versions: version 2 has "+mixed,
			fmt.Sprintf(
				"boot with systemd.unified_cgroup_hierarchy=1, or have all controllers on version 1: %s fail until then",
				whose,
			),
		)
	}
	if missing := missingFeatures(can); missing != "" {
		return lacking(Warning, subject, fmt.Sprintf("%s (%s) has no %s", configured.Path, can.Version, missing),
			"a newer version may have it: pods that need it are refused")
	}
	return ok(subject, "%s (%s)", configured.Path, can.Version)
}

func probeHandler(ctx context.Context, config handler.Config) (ociruntime.Capabilities, error) {
	if _, err := ociruntime.Executable(config.Path); err != nil {
		return ociruntime.Capabilities{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, handlerTimeout)
	defer cancel()
	path, args := config.Program()
	return ociruntime.Probe(ctx, path, args)
}

func missingFeatures(can ociruntime.Capabilities) string {
	var missing []string
	for _, f := range []struct {
		name  string
		there bool
	}{{"recursive read-only mounts", can.RecursiveReadOnly}, {"user namespaces", can.UserNamespaces}} {
		if !f.there {
			missing = append(missing, f.name)
		}
	}
	return strings.Join(missing, ", no ")
}

// hybridControllers returns the controllers that version 2 has on a machine that uses version 1.
func (n *Node) hybridControllers() string {
	if n.Facts.CgroupV2 {
		return ""
	}
	controllers, err := n.value("/sys/fs/cgroup/unified/cgroup.controllers")
	if err != nil { // not mounted there
		return ""
	}
	return controllers
}
