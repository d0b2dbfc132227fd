package cli

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

// ParseDuration parses a duration such as "1m30s". A number without a unit counts seconds, as in
// crictl, docker and podman.
func ParseDuration(text string) (time.Duration, error) {
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		if n = n * float64(time.Second); math.Abs(n) < math.MaxInt64 {
			return time.Duration(n), nil
		}
		return 0, fmt.Errorf("%s seconds are too many", text)
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return 0, fmt.Errorf("%q is neither a number of seconds nor a duration like 1m30s", text)
	}
	return d, nil
}

// DurationVarP adds a flag whose value ParseDuration reads. It must not be negative.
func DurationVarP(flags *pflag.FlagSet, p *time.Duration, name, shorthand string, value time.Duration, usage string) {
	*p = value
	flags.VarP((*duration)(p), name, shorthand, usage)
}

// DurationVar is DurationVarP without a short form.
func DurationVar(flags *pflag.FlagSet, p *time.Duration, name string, value time.Duration, usage string) {
	DurationVarP(flags, p, name, "", value, usage)
}

type duration time.Duration

// Set implements pflag.Value.
func (d *duration) Set(text string) error {
	v, err := ParseDuration(text)
	if err == nil && v < 0 {
		err = fmt.Errorf("%s is negative", text)
	}
	*d = duration(v)
	return err
}

// String implements pflag.Value.
func (d *duration) String() string { return time.Duration(*d).String() }

// Type implements pflag.Value.
func (*duration) Type() string { return "duration" }
