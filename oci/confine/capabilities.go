package confine

import (
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
	"berth/internal/host"
)

// defaultCapabilities are the defaults of Docker and containerd.
var defaultCapabilities = []string{
	"CAP_CHOWN",
	"CAP_DAC_OVERRIDE",
	"CAP_FSETID",
	"CAP_FOWNER",
	"CAP_MKNOD",
	"CAP_NET_RAW",
	"CAP_SETGID",
	"CAP_SETUID",
	"CAP_SETFCAP",
	"CAP_SETPCAP",
	"CAP_NET_BIND_SERVICE",
	"CAP_SYS_CHROOT",
	"CAP_KILL",
	"CAP_AUDIT_WRITE",
}

// capabilityNumbers maps the names of all capabilities to their numbers.
var capabilityNumbers = func() map[string]int {
	m := make(map[string]int)
	for _, c := range capability.ListKnown() {
		m["CAP_"+strings.ToUpper(c.String())] = int(c)
	}
	return m
}()

const allCapabilities = "ALL"

// normalizeCapability returns a name in the form CAP_NET_RAW, or ALL.
func normalizeCapability(name string) (string, error) {
	n := strings.ToUpper(name)
	if n == allCapabilities {
		return n, nil
	}
	if !strings.HasPrefix(n, "CAP_") {
		n = "CAP_" + n
	}
	if _, ok := capabilityNumbers[n]; !ok {
		return "", errdefs.InvalidArgument("unknown capability %q", name)
	}
	return n, nil
}

func normalizeCapabilities(names []string) ([]string, error) {
	var out []string
	for _, name := range names {
		n, err := normalizeCapability(name)
		if err != nil {
			return nil, err
		}
		out = append(out, n)
	}
	return out, nil
}

// Capabilities returns the capability sets of a process. It begins with the default capabilities,
// or with all for a privileged container, and applies the CRI config's additions and drops. A
// dropped capability is in no set, even if it is also added.
//
// Only ambient capabilities are inheritable (CVE-2022-24769), because the kernel raises no other
// capabilities to ambient (capabilities(7)).
func Capabilities(c *runtimeapi.Capability, privileged bool, facts host.Facts) (*specs.LinuxCapabilities, error) {
	if privileged {
		return capabilitySets(facts.Capabilities, nil), nil
	}
	add, err := normalizeCapabilities(slices.Concat(c.GetAddCapabilities(), c.GetAddAmbientCapabilities()))
	if err != nil {
		return nil, err
	}
	drop, err := normalizeCapabilities(c.GetDropCapabilities())
	if err != nil {
		return nil, err
	}
	ambient, err := normalizeCapabilities(c.GetAddAmbientCapabilities())
	if err != nil {
		return nil, err
	}
	granted, err := grantedCapabilities(add, drop, facts)
	if err != nil {
		return nil, err
	}
	raised := slices.DeleteFunc(slices.Clone(granted), func(n string) bool {
		return !slices.Contains(ambient, n) && !slices.Contains(ambient, allCapabilities)
	})
	return capabilitySets(granted, raised), nil
}

// grantedCapabilities applies ALL first and single names after it, and additions before drops.
// "drop ALL, add NET_RAW" leaves one capability. "add ALL, drop NET_RAW" leaves all except one.
func grantedCapabilities(add, drop []string, facts host.Facts) ([]string, error) {
	set := make(map[string]bool)
	start := defaultCapabilities
	switch {
	case slices.Contains(drop, allCapabilities): // as in containerd, even if ALL is added
		start = nil
	case slices.Contains(add, allCapabilities):
		start = facts.Capabilities
	}
	for _, n := range start {
		set[n] = slices.Contains(facts.Capabilities, n)
	}
	for _, n := range add {
		if n == allCapabilities {
			continue
		}
		if !slices.Contains(facts.Capabilities, n) {
			return nil, errdefs.FailedPrecondition("capability %s: berth does not hold it itself on this node", n)
		}
		set[n] = true
	}
	for _, n := range drop {
		delete(set, n)
	}
	var granted []string
	for n, ok := range set {
		if ok {
			granted = append(granted, n)
		}
	}
	return granted, nil
}

func capabilitySets(granted, ambient []string) *specs.LinuxCapabilities {
	byNumber := func(names []string) []string {
		s := slices.Clone(names)
		slices.SortFunc(s, func(a, b string) int { return capabilityNumbers[a] - capabilityNumbers[b] })
		return s
	}
	return &specs.LinuxCapabilities{
		Bounding:    byNumber(granted),
		Effective:   byNumber(granted),
		Permitted:   byNumber(granted),
		Inheritable: byNumber(ambient),
		Ambient:     byNumber(ambient),
	}
}
