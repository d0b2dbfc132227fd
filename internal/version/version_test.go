package version

import (
	"runtime/debug"
	"testing"
)

func TestSemver(t *testing.T) {
	t.Parallel()
	for want, info := range map[string]debug.BuildInfo{
		"1.2.3":              {Main: debug.Module{Version: "v1.2.3"}},
		"0.0.0-0123456789ab": {Main: debug.Module{Version: "(devel)"}, Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef"}}},
		"0.0.0-devel":        {Main: debug.Module{Version: "(devel)"}},
	} {
		t.Run(want, func(t *testing.T) {
			if got := semver(&info); got != want {
				t.Errorf("%+v: %s, want %s", info, got, want)
			}
		})
	}
}

func TestFull(t *testing.T) {
	t.Parallel()
	for want, parts := range map[string][3]string{
		"1.2.3": {"1.2.3"},
		"1.2.3 (revision 0123456789ab, 2026-01-02T15:04:05Z)": {"1.2.3", "0123456789abcdef", "2026-01-02T15:04:05Z"},
		"1.2.3 (2026-01-02T15:04:05Z)":                        {"1.2.3", "", "2026-01-02T15:04:05Z"},
	} {
		t.Run(want, func(t *testing.T) {
			if got := full(parts[0], parts[1], parts[2]); got != want {
				t.Errorf("got %q", got)
			}
		})
	}
}
