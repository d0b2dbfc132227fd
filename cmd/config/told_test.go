package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// LoadReported must read a daemon's reported configuration unchanged, except for given flags.
func TestReportedConfigurationIsReadUnchanged(t *testing.T) {
	running, err := Parse("f.toml", []byte("root = '/r'\nmax_layer_bytes = 3000000\nstall_timeout = '7s'\nnri_reject = ['hooks']\n[handlers.crun]\npath = '/usr/bin/crun'\n"))
	if err != nil {
		t.Fatal(err)
	}
	told, err := json.Marshal(running)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		told  string
		args  []string
		want  func(*Config)
		error string
	}{
		"as it was":                       {told: string(told), want: func(*Config) {}},
		"flags win":                       {told: string(told), args: []string{"--root=/other"}, want: func(c *Config) { c.Root = "/other" }},
		"an option that is not told":      {told: `{"Root":"/r"}`, want: func(c *Config) { *c = *Default(); c.Root = "/r" }},
		"an option that is not known":     {told: `{"Root":"/r","Later":{"a":1}}`, want: func(c *Config) { *c = *Default(); c.Root = "/r" }},
		"a value that no daemon can have": {told: `{"Root":"here"}`, error: "the daemon's root"},
		"a flag that no daemon can have":  {told: string(told), args: []string{"--root=here"}, error: "--root"},
		"no configuration":                {told: `[]`, error: "read the configuration of the daemon"},
		"a duration that is not one":      {told: `{"StallTimeout":"soon"}`, error: "read the configuration of the daemon"},
		"what is not JSON":                {told: `root = "/r"`, error: "read the configuration of the daemon"},
		"nothing":                         {told: ``, error: "read the configuration of the daemon"},
		"a duration, by its text":         {told: `{"StallTimeout":"7s"}`, want: func(c *Config) { *c = *Default(); c.StallTimeout = Duration{7 * time.Second} }},
		"a list and a table, by their own": {told: `{"NRIReject":["hooks"],"Handlers":{"crun":{"Path":"/usr/bin/crun"}}}`, want: func(c *Config) {
			*c = *Default()
			c.NRIReject, c.Handlers = []string{"hooks"}, map[string]Handler{"crun": {Type: "oci", Path: "/usr/bin/crun"}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			flags := pflag.NewFlagSet("", pflag.ContinueOnError)
			AddFlags(flags)
			if err := flags.Parse(c.args); err != nil {
				t.Fatal(err)
			}
			got, err := LoadReported(flags, []byte(c.told))
			if c.error != "" {
				if err == nil || !strings.Contains(err.Error(), c.error) {
					t.Errorf("got %v, want %q", err, c.error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := *running
			c.want(&want)
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("got %+v\nwant %+v", *got, want)
			}
		})
	}
}
