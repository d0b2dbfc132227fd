package config

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// checkDefaults checks the options about all containers.
func (c *Config) checkDefaults(where func(key string) string) (all []error) {
	for _, kv := range c.DefaultEnv {
		if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
			all = append(all, fmt.Errorf("%s: %q is not NAME=VALUE", where("container.default_env"), kv))
		}
	}
	if _, err := c.Rlimits(); err != nil {
		all = append(all, fmt.Errorf("%s: %w", where("container.default_ulimits"), err))
	}
	if err := checkCPUs(c.PauseCPUs); err != nil {
		all = append(all, fmt.Errorf("%s: %w", where("container.pause_cpus"), err))
	}
	return all
}

// ulimits are the names that docker, podman and CRI-O use.
var ulimits = map[string]string{
	"core": "RLIMIT_CORE", "cpu": "RLIMIT_CPU", "data": "RLIMIT_DATA", "fsize": "RLIMIT_FSIZE", "locks": "RLIMIT_LOCKS",
	"memlock": "RLIMIT_MEMLOCK", "msgqueue": "RLIMIT_MSGQUEUE", "nice": "RLIMIT_NICE", "nofile": "RLIMIT_NOFILE",
	"nproc": "RLIMIT_NPROC", "rss": "RLIMIT_RSS", "rtprio": "RLIMIT_RTPRIO", "rttime": "RLIMIT_RTTIME",
	"sigpending": "RLIMIT_SIGPENDING", "stack": "RLIMIT_STACK",
}

// Rlimits returns container.default_ulimits, in the order of their names.
func (c *Config) Rlimits() ([]specs.POSIXRlimit, error) {
	found := map[string]specs.POSIXRlimit{}
	for _, text := range c.DefaultUlimits {
		limit, err := parseUlimit(text)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", text, err)
		}
		if _, twice := found[limit.Type]; twice {
			return nil, fmt.Errorf("%q: the limit is set twice", text)
		}
		found[limit.Type] = limit
	}
	var all []specs.POSIXRlimit
	for _, kind := range slices.Sorted(maps.Keys(found)) {
		all = append(all, found[kind])
	}
	return all, nil
}

// parseUlimit parses NAME=SOFT:HARD, or NAME=LIMIT for both.
func parseUlimit(text string) (limit specs.POSIXRlimit, err error) {
	name, values, ok := strings.Cut(text, "=")
	if !ok {
		return limit, errors.New("the form is NAME=SOFT:HARD")
	}
	if limit.Type, ok = ulimits[name]; !ok {
		return limit, fmt.Errorf("%q is not one of %s", name, strings.Join(slices.Sorted(maps.Keys(ulimits)), ", "))
	}
	soft, hard, two := strings.Cut(values, ":")
	if !two {
		hard = soft
	}
	var hardErr error
	limit.Soft, err = parseLimit(soft)
	limit.Hard, hardErr = parseLimit(hard)
	if err = errors.Join(err, hardErr); err != nil {
		return limit, err
	}
	if limit.Soft > limit.Hard {
		return limit, errors.New("the soft limit exceeds the hard limit")
	}
	return limit, nil
}

// parseLimit parses a limit; -1 is unlimited.
func parseLimit(text string) (uint64, error) {
	if text == "-1" {
		return math.MaxUint64, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", text)
	}
	return n, nil
}

// maxCPU is above the number of CPUs of any kernel (CONFIG_NR_CPUS).
const maxCPU = 1 << 16

// checkCPUs accepts a list of CPUs as in cpuset(7), or an empty string.
func checkCPUs(list string) error {
	if list == "" {
		return nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 32)
		to, toErr := strconv.ParseUint(last, 10, 32)
		if err != nil || toErr != nil || from > to || to >= maxCPU {
			return fmt.Errorf("%q is not a list of CPUs, such as 0-1,4", list)
		}
	}
	return nil
}
