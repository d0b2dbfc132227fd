package crash

import (
	"path/filepath"
	"sync"
	"testing"

	"github.com/opencontainers/go-digest"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/checkpoint/record"
	"berth/integration/fixture"
	"berth/integration/harness"
)

// profiles lists operations on security profiles. A crash leaves the profile whole or not at all.
var profiles = []operation{
	{name: "PullSecurityProfile", prepare: nothing, request: pullProfile("first"), restarted: wholeOrAbsent},
	{name: "PullSecurityProfile_reference", prepare: do(pullProfile("first")), request: pullProfile("second"), restarted: wholeOrAbsent, more: true},
	{name: "RemoveSecurityProfile", prepare: do(pullProfile("first")), request: removeProfile, restarted: wholeOrAbsent},
	{name: "Recovery_of_PullSecurityProfile", first: &point{"record.written", 1}, prepare: nothing, request: pullProfile("first"), restarted: wholeOrAbsent, more: true},
	{name: "Recovery_of_RemoveSecurityProfile", first: &point{"record.removed", 1}, prepare: do(pullProfile("first")), request: removeProfile, restarted: wholeOrAbsent, more: true},
	{name: "Start_damaged_security_profile", named: record.SetAsideDir, spoil: damageProfiles, prepare: do(pullProfile("first")), request: pullProfile("first"), more: true},
}

// profileJSON is the profile, as it is stored.
const profileJSON = `{"defaultAction":"SCMP_ACT_ERRNO"}`

// profileNames are references to one profile in two repositories, which are pushed once.
var profileNames = sync.OnceValue(func() map[string]string {
	artifact, err := fixture.SecurityProfile(profileJSON)
	if err != nil {
		panic(err)
	}
	top, err := artifact.Digest()
	if err != nil {
		panic(err)
	}
	names := map[string]string{}
	for _, name := range []string{"first", "second"} {
		if _, err := harness.Registry.Push("crash/"+name+"-profile:1", artifact); err != nil {
			panic(err)
		}
		names[name] = harness.Registry.Host + "/crash/" + name + "-profile@" + top.String()
	}
	return names
})

func pullProfile(which string) func(*testing.T, *world) error {
	return func(t *testing.T, w *world) error {
		spec := &runtimeapi.ImageSpec{Image: profileNames()[which]}
		_, err := w.d.Images.PullSecurityProfile(t.Context(), spec, nil, nil, runtimeapi.SecurityProfileKind_Seccomp)
		return err
	}
}

func removeProfile(t *testing.T, w *world) error {
	return w.d.Images.RemoveSecurityProfile(t.Context(), digest.FromString(profileJSON).String())
}

// wholeOrAbsent checks that a listed profile is complete.
func wholeOrAbsent(t *testing.T, w *world) {
	t.Helper()
	for _, p := range listProfiles(t, w) {
		if p.GetDigest() != digest.FromString(profileJSON).String() || p.GetSize() != uint64(len(profileJSON)) || len(p.GetRefs()) == 0 {
			t.Errorf("after the crash there is the profile %v", p)
		}
	}
}

func listProfiles(t *testing.T, w *world) []*runtimeapi.SecurityProfileInfo {
	t.Helper()
	return harness.Get(w.d.Images.ListSecurityProfiles(t.Context()))(t)
}

// removeProfiles removes all security profiles.
func (w *world) removeProfiles(t *testing.T) {
	t.Helper()
	for _, p := range listProfiles(t, w) {
		harness.Must(t, w.d.Images.RemoveSecurityProfile(t.Context(), p.GetDigest()))
	}
}

// damageProfiles truncates the records of all profiles.
func damageProfiles(t *testing.T, w *world) {
	records := harness.Get(filepath.Glob(filepath.Join(w.d.Root, "images/profiles/*.record")))(t)
	if len(records) != 1 {
		t.Fatalf("there are %d records of profiles", len(records))
	}
	cutShort(t, records[0])
}
