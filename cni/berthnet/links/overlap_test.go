package links

import (
	"net/netip"
	"testing"
)

// Only success is cached.
func TestOverlapsCachesOnlySuccess(t *testing.T) {
	var answer error
	looks := 0
	o := &Overlaps{check: func([]netip.Prefix, string) error { looks++; return answer }}
	one, other := []netip.Prefix{netip.MustParsePrefix("10.99.0.1/24")}, []netip.Prefix{netip.MustParsePrefix("10.98.0.1/24")}
	for _, c := range []struct {
		when    string
		change  func()
		subnets []netip.Prefix
		bridge  string
		looks   int // number of checks so far
		refused bool
	}{
		{"at first", func() {}, one, "", 1, false},
		{"again", func() {}, one, "", 1, false},
		{"of others", func() {}, other, "", 2, false},
		{"with a bridge", func() {}, one, "bn0", 3, false},
		{"of the first ones again, with a new overlap", func() { answer = ErrOverlap }, one, "", 3, false},
		{"after Forget", o.Forget, one, "", 4, true},
		{"with an overlap as before", func() {}, one, "", 5, true},
		{"with the overlap removed", func() { answer = nil }, one, "", 6, false},
		{"once more", func() {}, one, "", 6, false},
		{"later", func() {
			o.lock.Lock()
			defer o.lock.Unlock()
			for question, at := range o.none {
				o.none[question] = at.Add(-CacheTime)
			}
		}, one, "", 7, false},
	} {
		c.change()
		err := o.Check(c.subnets, c.bridge)
		if looks != c.looks {
			t.Errorf("%s: %d checks, want %d", c.when, looks, c.looks)
		}
		if c.refused != (err != nil) {
			t.Errorf("%s: %v", c.when, err)
		}
	}
	o.check = func([]netip.Prefix, string) error { o.Forget(); return nil } // during the check
	o.Forget()
	if err := o.Check(one, ""); err != nil {
		t.Error(err)
	}
	o.lock.Lock()
	defer o.lock.Unlock()
	if len(o.none) != 0 {
		t.Errorf("a check during Forget cached %v", o.none)
	}
}

func TestOverlapsExpire(t *testing.T) {
	o := &Overlaps{check: func([]netip.Prefix, string) error { return nil }}
	for _, subnet := range []string{"10.99.0.1/24", "10.98.0.1/24"} {
		for question, at := range o.none {
			o.none[question] = at.Add(-CacheTime)
		}
		if err := o.Check([]netip.Prefix{netip.MustParsePrefix(subnet)}, ""); err != nil {
			t.Error(err)
		}
	}
	if len(o.none) != 1 {
		t.Errorf("%d old results are kept", len(o.none)-1)
	}
}
