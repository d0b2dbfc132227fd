package confine

import (
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/host"
	"berth/internal/testutil"
)

// allNames returns all capabilities, ordered by number.
func allNames() []string {
	names := make([]string, len(capabilityNumbers))
	for name, n := range capabilityNumbers {
		names[n] = name
	}
	return names
}

func TestCapabilities(t *testing.T) {
	t.Parallel()
	type s = []string
	without := func(all []string, drop ...string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(n string) bool { return slices.Contains(drop, n) })
	}
	byNumber := capabilitySets(defaultCapabilities, nil).Bounding
	for _, test := range []struct {
		name               string
		add, drop, ambient s
		privileged         bool
		want, wantAmbient  s
	}{
		{name: "default", want: byNumber},
		{name: "add", add: s{"SYS_TIME"}, want: capabilitySets(append(s{"CAP_SYS_TIME"}, byNumber...), nil).Bounding},
		{name: "spellings", drop: s{"ALL"}, add: s{"cap_net_admin", "Sys_Time", "CAP_BPF", "BPF"},
			want: s{"CAP_NET_ADMIN", "CAP_SYS_TIME", "CAP_BPF"}},
		{name: "drop", drop: s{"CAP_MKNOD", "net_raw"}, want: without(byNumber, "CAP_MKNOD", "CAP_NET_RAW")},
		{name: "drop a missing one", drop: s{"SYS_ADMIN"}, want: byNumber},
		{name: "drop all", drop: s{"all"}},
		{name: "drop all, add one", drop: s{"ALL"}, add: s{"NET_RAW"}, want: s{"CAP_NET_RAW"}},
		{name: "add all", add: s{"ALL"}, want: allNames()},
		{name: "add all but one", add: s{"ALL"}, drop: s{"SYS_ADMIN"}, want: without(allNames(), "CAP_SYS_ADMIN")},
		{name: "add all, drop all", add: s{"ALL"}, drop: s{"ALL"}},
		{name: "added and dropped", add: s{"SYS_TIME"}, drop: s{"SYS_TIME"}, want: byNumber},
		{name: "ambient", drop: s{"ALL"}, ambient: s{"NET_BIND_SERVICE"},
			want: s{"CAP_NET_BIND_SERVICE"}, wantAmbient: s{"CAP_NET_BIND_SERVICE"}},
		{name: "ambient dropped", ambient: s{"NET_RAW"}, drop: s{"NET_RAW"}, want: without(byNumber, "CAP_NET_RAW")},
		{name: "ambient all", ambient: s{"ALL"}, want: allNames(), wantAmbient: allNames()},
		{name: "privileged", privileged: true, drop: s{"ALL"}, want: allNames()},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := &runtimeapi.Capability{AddCapabilities: test.add, DropCapabilities: test.drop, AddAmbientCapabilities: test.ambient}
			got, err := Capabilities(c, test.privileged, host.Facts{Capabilities: allNames()})
			testutil.Must(t, err)
			for name, set := range map[string][2]s{
				"bounding": {got.Bounding, test.want}, "effective": {got.Effective, test.want}, "permitted": {got.Permitted, test.want},
				"ambient": {got.Ambient, test.wantAmbient}, "inheritable": {got.Inheritable, test.wantAmbient},
			} {
				if !slices.Equal(set[0], set[1]) {
					t.Errorf("%s: got %v, want %v", name, set[0], set[1])
				}
			}
		})
	}
}

func TestMissingCapabilitiesAreRefused(t *testing.T) {
	t.Parallel()
	facts := host.Facts{Capabilities: []string{"CAP_CHOWN", "CAP_KILL", "CAP_SYS_ADMIN"}}
	for _, test := range []struct {
		name string
		c    *runtimeapi.Capability
		priv bool
		want []string
	}{
		{"default", nil, false, []string{"CAP_CHOWN", "CAP_KILL"}},
		{"all", &runtimeapi.Capability{AddCapabilities: []string{"ALL"}}, false, facts.Capabilities},
		{"privileged", nil, true, facts.Capabilities},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Capabilities(test.c, test.priv, facts)
			if err != nil || !slices.Equal(got.Bounding, test.want) {
				t.Errorf("%s: got %v, %v, want %v", test.name, got, err, test.want)
			}
		})
	}
	_, err := Capabilities(&runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}}, false, facts)
	testutil.WantError(t, err, codes.FailedPrecondition, "CAP_NET_ADMIN")
}

func TestUnknownCapabilitiesAreRefused(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"", "CAP_", "CAP_ALL", "FLY", "NET_ADMIN "} {
		for _, c := range []*runtimeapi.Capability{
			{AddCapabilities: []string{name}}, {DropCapabilities: []string{name}}, {AddAmbientCapabilities: []string{name}},
		} {
			_, err := Capabilities(c, false, host.Facts{Capabilities: allNames()})
			testutil.WantError(t, err, codes.InvalidArgument, "unknown capability")
		}
	}
}
