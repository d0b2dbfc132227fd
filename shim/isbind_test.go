package shim

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

func TestIsBind(t *testing.T) {
	for _, test := range []struct {
		kind    string
		options []string
		want    bool
	}{
		{"bind", nil, true},
		{"", []string{"ro", "bind"}, true},
		{"", []string{"rbind", "rslave"}, true},
		{"none", []string{"rbind"}, true},
		{"", []string{"ro"}, false},
		{"tmpfs", []string{"nodev"}, false},
		{"proc", nil, false},
	} {
		if got := isBind(specs.Mount{Type: test.kind, Options: test.options}); got != test.want {
			t.Errorf("type %q, options %q: %t", test.kind, test.options, got)
		}
	}
}
