package lazy

import (
	"strings"
	"testing"
	"time"

	"berth/internal/rootfs"
)

func TestDecideLazy(t *testing.T) {
	t.Parallel()
	good := facts{policy: On, driver: rootfs.EROFS, works: true, indexed: true, served: true, missing: 10, least: 10}
	for _, c := range []struct {
		name   string
		change func(*facts)
		reason string // empty: lazily
	}{
		{"all is good", func(*facts) {}, ""},
		{"off", func(f *facts) { f.policy = Off }, "lazy.policy"},
		{"directories", func(f *facts) { f.driver = rootfs.Directory }, "directories"},
		{"old kernel", func(f *facts) { f.works = false }, "kernel"},
		{"pinned", func(f *facts) { f.pinned = true }, "pinned"},
		{"no index", func(f *facts) { f.indexed = false }, "no index"},
		{"table of contents", func(f *facts) { f.indexed, f.served, f.table = false, false, true }, ""},
		{"another registry", func(f *facts) { f.served = false }, "another registry"},
		{"small", func(f *facts) { f.least++ }, "lazy.min_bytes"},
		{"fast", func(f *facts) { f.leastTime, f.estimate = 2*time.Second, 1999*time.Millisecond }, "lazy.min_time"},
		{"slow", func(f *facts) { f.leastTime, f.estimate = 2*time.Second, 2*time.Second }, ""},
		{"of unknown speed", func(f *facts) { f.leastTime = 2 * time.Second }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := good
			c.change(&f)
			lazily, reason := f.decide()
			if lazily != (c.reason == "") || reason == "" || !strings.Contains(reason, c.reason) {
				t.Errorf("%v: %s", lazily, reason)
			}
		})
	}
}
