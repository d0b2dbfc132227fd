// Package version reports the version of this berth program. contrib/build sets the variables with
// -ldflags "-X berth/internal/version.Version=…". Otherwise the package reports the data that the
// Go toolchain recorded.
package version

import (
	"runtime/debug"
	"strings"
)

// Set by the linker.
var (
	Version  string // semantic version without a leading "v", for example "1.2.3"
	Revision string // git commit, full or abbreviated
	Date     string // date of the commit, RFC 3339
)

// Get returns the semantic version that the build has set. If it has set none, Get returns a
// release's version, or a pseudo-version with the commit.
func Get() string {
	if Version != "" {
		return Version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "0.0.0-unknown"
	}
	return semver(info)
}

// Full returns the version with the revision and the date of the build, as `berth --version` prints
// it: "1.2.3 (revision 0123456789ab, 2026-01-02T15:04:05Z)".
func Full() string {
	revision, date := Revision, Date
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && revision == "":
				revision = s.Value
			case s.Key == "vcs.time" && date == "":
				date = s.Value
			}
		}
	}
	return full(Get(), revision, date)
}

func full(version, revision, date string) string {
	var details []string
	if revision != "" {
		details = append(details, "revision "+abbreviated(revision))
	}
	if date != "" {
		details = append(details, date)
	}
	if len(details) == 0 {
		return version
	}
	return version + " (" + strings.Join(details, ", ") + ")"
}

func semver(info *debug.BuildInfo) string {
	if v, ok := strings.CutPrefix(info.Main.Version, "v"); ok {
		return v
	}
	for _, s := range info.Settings { // "(devel)": a test, or a build without -buildvcs
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "0.0.0-" + abbreviated(s.Value)
		}
	}
	return "0.0.0-devel"
}

func abbreviated(revision string) string { return revision[:min(len(revision), 12)] }
