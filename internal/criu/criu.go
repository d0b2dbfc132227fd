// Package criu finds CRIU, the program that dumps and restores processes, and knows which versions
// berth works with. Daemon, launchers and berth check use it.
package criu

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// DefaultProgram is the program that Locate looks for in PATH.
const DefaultProgram = "criu"

// ErrMissing is wrapped by the error of Locate.
var ErrMissing = errors.New("CRIU is not installed")

// Locate returns the path of CRIU. program is a path, or a name in PATH. If it is empty,
// DefaultProgram is used.
func Locate(program string) (string, error) {
	if program == "" {
		program = DefaultProgram
	}
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%w: %w; install the package criu, or set checkpoint.criu to its path", ErrMissing, err)
	}
	return path, nil
}

// Version is a version of CRIU.
type Version struct{ Major, Minor, Sub int }

// Number returns the version as CRIU's RPC gives it: 40101 is 4.1.1.
func (v Version) Number() int { return 10000*v.Major + 100*v.Minor + v.Sub }

// Minimum is the oldest version that berth uses. Older versions fail on current kernels.
var Minimum = Version{4, 1, 1}

func (v Version) String() string {
	if v.Sub == 0 {
		return fmt.Sprintf("%d.%d", v.Major, v.Minor)
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Sub)
}

// Before reports whether v is older than other.
func (v Version) Before(other Version) bool {
	return slices.Compare([]int{v.Major, v.Minor, v.Sub}, []int{other.Major, other.Minor, other.Sub}) < 0
}

// Check returns an error for a version that berth does not use.
func (v Version) Check() error {
	if v.Before(Minimum) {
		return fmt.Errorf("CRIU %s is too old: %s or later is needed", v, Minimum)
	}
	return nil
}

// ParseVersion parses the output of "criu --version".
func ParseVersion(output string) (Version, error) {
	for line := range strings.Lines(output) {
		text, found := strings.CutPrefix(strings.TrimSpace(line), "Version:")
		if !found {
			continue
		}
		var n [3]int
		parts := strings.SplitN(strings.TrimSpace(text), ".", len(n))
		for i, p := range parts {
			var err error
			if n[i], err = strconv.Atoi(p); err != nil || n[i] < 0 {
				return Version{}, fmt.Errorf("parse the version of CRIU %q", text)
			}
		}
		return Version{n[0], n[1], n[2]}, nil
	}
	return Version{}, fmt.Errorf("parse the version of CRIU from %q", output)
}

// versionTimeout bounds "criu --version".
const versionTimeout = 10 * time.Second

// VersionOf asks a CRIU for its version.
func VersionOf(ctx context.Context, path string) (Version, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return Version{}, fmt.Errorf("%s --version: %w", path, err)
	}
	return ParseVersion(string(out))
}
