package failpoint

import (
	"regexp"
	"testing"

	"berth/internal/failpoint/points"
	"berth/internal/testutil"
)

// A name must be a literal of the documented form and occur in one place only.
func TestNamesAreUniqueLiterals(t *testing.T) {
	all, err := points.Below("../..")
	testutil.Must(t, err)
	form := regexp.MustCompile(`^[a-z]+(\.[a-z]+(-[a-z]+)*)+$`)
	places := map[string]string{}
	for _, p := range all {
		if p.Name == "" {
			t.Errorf("%s: the name is not a literal", p.Place)
			continue
		}
		if !form.MatchString(p.Name) {
			t.Errorf("%s: the name %q is not of the form area.what-happened", p.Place, p.Name)
		}
		if other := places[p.Name]; other != "" {
			t.Errorf("%s: the name %q is also used at %s", p.Place, p.Name, other)
		}
		places[p.Name] = p.Place
	}
	if len(places) < 50 {
		t.Errorf("found only %d points", len(places))
	}
}
