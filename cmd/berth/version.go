package main

import (
	"runtime/debug"
	"strings"
)

// version returns what the Go toolchain recorded about this build, as a semantic
// version: of a release "1.2.3", of a checkout a pseudo-version with the commit.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "0.0.0-unknown"
	}
	return semver(info)
}

func semver(info *debug.BuildInfo) string {
	if v, ok := strings.CutPrefix(info.Main.Version, "v"); ok {
		return v
	}
	for _, s := range info.Settings { // "(devel)": built without -buildvcs or a test
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return "0.0.0-" + s.Value[:12]
		}
	}
	return "0.0.0-devel"
}
